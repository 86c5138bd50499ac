"""Make the kits of a federation, add or remove parties, renew and revoke. Nothing is overwritten or deleted.

KITS/ca/         ca.pem, ca-key.pem, ca.toml, revoked.pem: stays on the machine that runs `glasu provision`
KITS/server/     the server's kit
KITS/<party>/    one kit per party
KITS/retired/    renewed and removed kits, by name and time

ca.toml is written first and decides. If a command is interrupted after that, --renew completes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import tomli_w
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from glasu.errors import ConfigError, TransportError
from glasu.files import write_atomically
from glasu.pki.authority import KIT_DAYS, Signed, issue, make_authority, sign_revocation_list
from glasu.pki.certificate import CertificateInfo, read_certificate
from glasu.pki.folders import move_folder, open_staging, retire_folder, write_folder
from glasu.pki.identity import RESERVED, SERVER_NAME, check_roster, parse_hosts
from glasu.pki.issued import Issued, IssuedCertificates, read_issued
from glasu.pki.kit import (
    CA,
    CERTIFICATE,
    KEY,
    MANIFEST,
    REVOKED,
    Kit,
    check_key,
    make_manifest,
    open_certificate,
    open_kit,
    pem,
)
from glasu.records import to_plain

AUTHORITY, AUTHORITY_KEY, STATE = "ca", "ca-key.pem", "ca.toml"


@dataclass(frozen=True)
class CertificateAuthority:
    """The CA in a locked folder of kits."""

    out: Path
    staging: Path  # holds folders that are not complete yet
    own: Signed
    state: IssuedCertificates
    now: datetime

    @property
    def folder(self) -> Path:
        return self.out / AUTHORITY

    def revoked_pem(self) -> bytes:
        """Sign the list of revoked certificates."""
        return sign_revocation_list(self.own, self.state.revoked_serials(), self.now).public_bytes(Encoding.PEM)

    def manifest(self, own: CertificateInfo) -> bytes:
        """Return kit.toml for a certificate."""
        return tomli_w.dumps(to_plain(make_manifest(own, self.own.certificate, self.state.roster))).encode()

    def lists(self) -> list[Path]:
        """Return the paths of the revocation lists."""
        return [folder / REVOKED for folder in (self.folder, self.out / SERVER_NAME) if folder.is_dir()]


def provision(
    out: Path, parties: Sequence[str], hosts: Sequence[str], *, days: int = KIT_DAYS, now: datetime | None = None
) -> list[Kit]:
    """Make a CA, the server's kit and one kit per party.

    Args:
        out: the folder for the kits; none of them may exist.
        parties: the roster; the position of a party is its client index.
        hosts: the DNS names and IP addresses of the server.
        days: validity of the kits.
        now: the present by default.
    """
    now = _to_seconds(now)
    check_roster(parties)
    parse_hosts(hosts)
    own, names = make_authority(now), (SERVER_NAME, *parties)
    with open_staging(out) as staging:
        _refuse_existing(out, (*RESERVED, *parties))
        state = IssuedCertificates(roster=tuple(parties), hosts=tuple(hosts))
        authority = _issue(CertificateAuthority(out, staging, own, state, now), names, days)
        public = {CA: pem(own.certificate), STATE: authority.state.to_toml(), REVOKED: authority.revoked_pem()}
        write_folder(staging / AUTHORITY, public, {AUTHORITY_KEY: _key_pem(own)})
        move_folder(staging / AUTHORITY, authority.folder)
        return _publish_kits(authority, names)


def add(out: Path, parties: Sequence[str], *, days: int = KIT_DAYS, now: datetime | None = None) -> list[Kit]:
    """Append parties to the roster, make their kits and update the server's kit.toml."""
    with _open_authority(out, _to_seconds(now)) as authority:
        roster = authority.state.roster
        for name in parties:
            if name in roster:
                raise ConfigError(f"party {name!r}: is already on the roster; for a new kit, use --renew {name}.")
        check_roster((*roster, *parties))
        _refuse_existing(out, parties)
        if not (out / SERVER_NAME).is_dir():
            raise ConfigError(
                f"{out / SERVER_NAME}: is not here, and its {MANIFEST} must list the new party; "
                "restore it, or create another with --renew server."
            )
        state = replace(authority.state, roster=(*roster, *parties))
        return _change(authority, state, issued=parties, days=days)


def remove(out: Path, names: Sequence[str], *, now: datetime | None = None) -> list[Path]:
    """Remove parties from the roster, revoke their certificates and retire their kits.

    The other parties keep their order. A name that is added again comes last.

    Returns:
        The revocation lists written.
    """
    with _open_authority(out, _to_seconds(now)) as authority:
        _check_known(authority, names, authority.state.roster)
        if set(names) == set(authority.state.roster):
            raise ConfigError(f"{', '.join(names)}: the roster would be empty; --add another party first.")
        roster = tuple(name for name in authority.state.roster if name not in names)
        _change(authority, replace(authority.state.revoke(names, authority.now), roster=roster), retired=names)
        return authority.lists()


def renew(
    out: Path, names: Sequence[str], hosts: Sequence[str] = (), *, days: int = KIT_DAYS, now: datetime | None = None
) -> list[Kit]:
    """Make new keys and certificates for parties or the server, and retire the old kits.

    Old certificates stay valid until they expire or are revoked (see `find_valid_predecessors`), which leaves time to
    hand over the new kit. A kit that is no longer in `out` can be renewed, too. New `hosts` replace those in the
    server's certificate.
    """
    with _open_authority(out, _to_seconds(now)) as authority:
        _check_known(authority, names, (SERVER_NAME, *authority.state.roster))
        if hosts and SERVER_NAME not in names:
            raise ConfigError(f"--host {hosts[0]}: only the certificate of the server names hosts; use --renew server.")
        state = replace(authority.state, hosts=tuple(hosts) or authority.state.hosts)
        return _change(authority, state, issued=names, retired=names, days=days)


def find_dropped_hosts(out: Path, hosts: Sequence[str]) -> list[str]:
    """Return the names of the server that a renewal with these hosts drops; without hosts, it drops none."""
    path = out / AUTHORITY / STATE
    if not hosts or not path.is_file():
        return []
    return [name for name in read_issued(path).hosts if name not in hosts]


def find_valid_predecessors(out: Path, kits: Sequence[Kit], *, now: datetime | None = None) -> list[str]:
    """Return the names of renewed kits whose former certificates are still valid."""
    state = read_issued(out / AUTHORITY / STATE)
    return [kit.name for kit in kits if state.has_other_valid(kit.name, kit.serial, _to_seconds(now))]


def revoke(out: Path, names: Sequence[str], *, now: datetime | None = None) -> list[Path]:
    """Revoke every certificate issued to these parties so far; return the revocation lists written.

    A second call writes the same list.
    """
    with _open_authority(out, _to_seconds(now)) as authority:
        if SERVER_NAME in names:
            raise ConfigError(
                "server: parties read no revocation list, so a stolen key of the server stays valid; "
                "make a new CA and new kits in another --out."
            )
        _check_known(authority, names, authority.state.roster)
        _change(authority, authority.state.revoke(names, authority.now))
        return authority.lists()


@contextmanager
def _open_authority(out: Path, now: datetime) -> Iterator[CertificateAuthority]:
    folder = out / AUTHORITY
    if not folder.is_dir():
        raise ConfigError(f"{out}: holds no CA; give the --out of the first `glasu provision --parties ...`.")
    with open_staging(out) as staging:
        own = open_certificate(folder / CA)
        if reason := own.validity_error(now):
            raise TransportError(f"{folder / CA}: {reason}; make a new CA and new kits in another --out.")
        key = load_pem_private_key(check_key(folder / AUTHORITY_KEY, own), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        state = read_issued(folder / STATE)
        yield CertificateAuthority(out, staging, Signed(own.certificate, key), state, now)


def _change(
    authority: CertificateAuthority,
    state: IssuedCertificates,
    *,
    issued: Sequence[str] = (),
    retired: Sequence[str] = (),
    days: int = KIT_DAYS,
) -> list[Kit]:
    """Write ca.toml, then retire and make kits, then update the revocation lists and the server's kit.toml.

    Args:
        authority: the CA.
        state: its new state, without the certificates to be issued.
        issued: the names that get a new kit.
        retired: the names whose old kits are moved away.
        days: validity of the new kits.

    Returns:
        The new kits.
    """
    authority = _issue(replace(authority, state=state), issued, days)
    write_atomically(authority.folder / STATE, authority.state.to_toml())
    for name in retired:
        retire_folder(authority.out / name, authority.now)
    kits = _publish_kits(authority, issued)
    for path in authority.lists():
        write_atomically(path, authority.revoked_pem())
    if (server := authority.out / SERVER_NAME).is_dir():
        write_atomically(server / MANIFEST, authority.manifest(open_certificate(server / CERTIFICATE)))
    return kits


def _issue(authority: CertificateAuthority, names: Sequence[str], days: int) -> CertificateAuthority:
    """Write new kits to the staging folder; return the CA with a state that lists them."""
    issued = list(authority.state.issued)
    for name in names:
        signed = issue(authority.own, name, authority.state.hosts, authority.now, days)
        own = read_certificate(pem(signed.certificate))
        assert own is not None
        public = {
            CA: pem(authority.own.certificate),
            CERTIFICATE: pem(signed.certificate),
            MANIFEST: authority.manifest(own),
            **({REVOKED: authority.revoked_pem()} if name == SERVER_NAME else {}),
        }
        write_folder(authority.staging / name, public, {KEY: _key_pem(signed)})
        issued.append(Issued(name=name, serial=own.serial, expires=own.expires))
    return replace(authority, state=replace(authority.state, issued=tuple(issued)))


def _publish_kits(authority: CertificateAuthority, names: Sequence[str]) -> list[Kit]:
    for name in names:
        move_folder(authority.staging / name, authority.out / name)
    return [open_kit(authority.out / name, now=authority.now) for name in names]


def _refuse_existing(out: Path, names: Sequence[str]) -> None:
    if taken := [name for name in names if os.path.lexists(out / name)]:
        if AUTHORITY in taken:
            raise ConfigError(
                f"{out}: already has kits ({', '.join(taken)}); nothing was changed. Use --add, --remove, --renew or "
                "--revoke, or choose another --out."
            )
        raise ConfigError(f"{out / taken[0]}: exists and is not overwritten; move it away, or choose another --out.")


def _check_known(authority: CertificateAuthority, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r}: is not known in {authority.out}; known are: {', '.join(known)}.")
        if names.count(name) > 1:
            raise ConfigError(f"{name!r}: is named twice; name it once.")


def _key_pem(signed: Signed) -> bytes:
    return signed.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _to_seconds(now: datetime | None) -> datetime:
    """Return the time without microseconds, which certificates do not have."""
    return (now or datetime.now(UTC)).replace(microsecond=0)
