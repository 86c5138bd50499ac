"""Make the kits of a federation, add or remove parties, renew and revoke kits. No kit is overwritten or deleted.

KITS/ca/         ca.pem, ca-key.pem, ca.toml, revoked.pem: stays on the machine that runs `glasu provision`
KITS/server/     the server's kit
KITS/<party>/    one kit per party
KITS/retired/    renewed and removed kits, by name and time

A command writes ca.toml first, and this file is authoritative. If the command is interrupted after that, --renew makes
the missing kits and updates the revocation lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import tomli_w
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from glasu.errors import ConfigError, TransportError
from glasu.files import write_atomically
from glasu.pki.authority import KIT_DAYS, Signed, certify, issue, make_authority, sign_revocation_list
from glasu.pki.certificate import CertificateInfo, read_certificate
from glasu.pki.fingerprint import fingerprint_key
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
    encode_pem,
    make_manifest,
    open_certificate,
    open_kit,
)
from glasu.records import to_plain

AUTHORITY, AUTHORITY_KEY, STATE = "ca", "ca-key.pem", "ca.toml"
PublicKeys: TypeAlias = Mapping[str, ec.EllipticCurvePublicKey]  # by name of the party or server


@dataclass(frozen=True)
class CertificateAuthority:
    """The CA of a folder of kits. The folder is locked."""

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

    def encode_manifest(self, own: CertificateInfo) -> bytes:
        """Return kit.toml for a certificate."""
        return tomli_w.dumps(
            to_plain(make_manifest(own, self.own.certificate, self.state.roster, trial=self.state.trial))
        ).encode()

    def find_revocation_lists(self) -> list[Path]:
        """Return the paths of the revocation lists."""
        return [folder / REVOKED for folder in (self.folder, self.out / SERVER_NAME) if folder.is_dir()]


def provision(
    out: Path, parties: Sequence[str], hosts: Sequence[str], *, days: int = KIT_DAYS, now: datetime | None = None
) -> list[Kit]:
    """Make a CA, the server's kit and one trial kit per party. The private key in a trial kit was made at the CA.

    Args:
        out: the folder for the kits; no kit may exist there.
        parties: the roster; the position of a party is its client index.
        hosts: the DNS names and IP addresses of the server.
        days: validity of the kits.
        now: the time at which the kits are made; None: the current time.
    """
    check_roster(parties)
    return make_federation(out, parties, hosts, days, truncate_to_seconds(now))


def make_federation(
    out: Path,
    parties: Sequence[str],
    hosts: Sequence[str],
    days: int,
    now: datetime,
    keys: PublicKeys | None = None,
) -> list[Kit]:
    """Make a CA, the server's kit, and the kits or certificates of the parties; see `provision`.

    Args:
        out: the folder for the kits.
        parties: the roster.
        hosts: the hosts of the server.
        days: validity.
        now: the current time.
        keys: the public keys of all parties, and perhaps of the server, if they made their own keys; None: make trial
            kits, with keys that are made here.
    """
    parse_hosts(hosts)
    own, names = make_authority(now), (SERVER_NAME, *parties)
    with open_staging(out) as staging:
        _refuse_existing(out, (*RESERVED, *parties))
        state = IssuedCertificates(roster=tuple(parties), hosts=tuple(hosts), trial=keys is None)
        authority = _issue(CertificateAuthority(out, staging, own, state, now), names, days, keys)
        public = {CA: encode_pem(own.certificate), STATE: authority.state.to_toml(), REVOKED: authority.revoked_pem()}
        write_folder(staging / AUTHORITY, public, {AUTHORITY_KEY: _encode_key(own)})
        move_folder(staging / AUTHORITY, authority.folder)
        return _publish_kits(authority, names)


def add(out: Path, parties: Sequence[str], *, days: int = KIT_DAYS, now: datetime | None = None) -> list[Kit]:
    """Append parties to the roster, make their kits and update the server's kit.toml."""
    with open_authority(out, truncate_to_seconds(now)) as authority:
        roster = authority.state.roster
        _refuse_making_keys(authority, parties)
        for name in parties:
            if name in roster:
                raise ConfigError(f"party {name!r}: is already on the roster; for a new kit, use --renew {name}.")
        check_roster((*roster, *parties))
        _refuse_existing(out, parties)
        if not (out / SERVER_NAME).is_dir():
            raise ConfigError(
                f"{out / SERVER_NAME}: this folder is missing, but its {MANIFEST} must list the new party; "
                "restore the folder, or create another with --renew server."
            )
        state = replace(authority.state, roster=(*roster, *parties))
        return change_authority(authority, state, issued=parties, days=days)


def remove(out: Path, names: Sequence[str], *, now: datetime | None = None) -> list[Path]:
    """Remove parties from the roster, revoke their certificates and retire their kits.

    The other parties keep their order. If a removed party is added again, it comes last.

    Returns:
        The paths of the revocation lists that were written.
    """
    with open_authority(out, truncate_to_seconds(now)) as authority:
        _check_known(authority, names, authority.state.roster)
        if set(names) == set(authority.state.roster):
            raise ConfigError(f"{', '.join(names)}: the roster would be empty; --add another party first.")
        roster = tuple(name for name in authority.state.roster if name not in names)
        change_authority(authority, replace(authority.state.revoke(names, authority.now), roster=roster), retired=names)
        return authority.find_revocation_lists()


def renew(
    out: Path, names: Sequence[str], hosts: Sequence[str] = (), *, days: int = KIT_DAYS, now: datetime | None = None
) -> list[Kit]:
    """Make new keys and certificates for parties or the server, and retire the old kits.

    Old certificates stay valid until they expire or are revoked (see `find_valid_predecessors`), so that there is time
    to hand over the new kit. A kit that is no longer in `out` can be renewed as well. If `hosts` is not empty, these
    hosts replace the hosts in the server's certificate.
    """
    with open_authority(out, truncate_to_seconds(now)) as authority:
        _check_known(authority, names, (SERVER_NAME, *authority.state.roster))
        _refuse_making_keys(authority, names)
        if hosts and SERVER_NAME not in names:
            raise ConfigError(f"--host {hosts[0]}: only the certificate of the server names hosts; use --renew server.")
        state = replace(authority.state, hosts=tuple(hosts) or authority.state.hosts)
        return change_authority(authority, state, issued=names, retired=names, days=days)


def find_dropped_hosts(out: Path, hosts: Sequence[str]) -> list[str]:
    """Return the hosts that the server's certificate would lose by a renewal with `hosts`; none if `hosts` is empty."""
    path = out / AUTHORITY / STATE
    if not hosts or not path.is_file():
        return []
    return [name for name in read_issued(path).hosts if name not in hosts]


def find_valid_predecessors(out: Path, kits: Sequence[Kit], *, now: datetime | None = None) -> list[str]:
    """Return the names in `kits` for which an earlier certificate is still valid."""
    state = read_issued(out / AUTHORITY / STATE)
    return [kit.name for kit in kits if state.has_other_valid(kit.name, kit.serial, truncate_to_seconds(now))]


def revoke(out: Path, names: Sequence[str], *, now: datetime | None = None) -> list[Path]:
    """Revoke every certificate issued to these parties so far; return the paths of the written revocation lists.

    Certificates that are already revoked keep their time of revocation.
    """
    with open_authority(out, truncate_to_seconds(now)) as authority:
        if SERVER_NAME in names:
            raise ConfigError(
                "server: parties read no revocation list, so a stolen key of the server stays valid; "
                "make a new CA and new kits in another --out."
            )
        _check_known(authority, names, authority.state.roster)
        change_authority(authority, authority.state.revoke(names, authority.now))
        return authority.find_revocation_lists()


@contextmanager
def open_authority(out: Path, now: datetime) -> Iterator[CertificateAuthority]:
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


def change_authority(
    authority: CertificateAuthority,
    state: IssuedCertificates,
    *,
    issued: Sequence[str] = (),
    retired: Sequence[str] = (),
    days: int = KIT_DAYS,
    keys: PublicKeys | None = None,
) -> list[Kit]:
    """Write ca.toml, then retire and make kits, then update the revocation lists and the server's kit.toml.

    Args:
        authority: the CA.
        state: the new state of the CA, but without the certificates that this call issues.
        issued: the names for which a new kit is made.
        retired: the names whose old kits are moved to retired/.
        days: validity of the new kits.
        keys: the public keys of parties that made their own keys; their folders get no private key.

    Returns:
        The new kits whose private keys were made here.
    """
    authority = _issue(replace(authority, state=state), issued, days, keys)
    write_atomically(authority.folder / STATE, authority.state.to_toml())
    for name in retired:
        retire_folder(authority.out / name, authority.now)
    kits = _publish_kits(authority, issued)
    for path in authority.find_revocation_lists():
        write_atomically(path, authority.revoked_pem())
    if (server := authority.out / SERVER_NAME).is_dir():
        write_atomically(server / MANIFEST, authority.encode_manifest(open_certificate(server / CERTIFICATE)))
    return kits


def _issue(
    authority: CertificateAuthority,
    names: Sequence[str],
    days: int,
    keys: PublicKeys | None = None,
) -> CertificateAuthority:
    """Write new kits to the staging folder; return the CA with a state that lists their certificates.

    Args:
        authority: the CA.
        names: the names of the kits.
        days: validity.
        keys: public keys by name; for a name without a public key, a new key is made.
    """
    issued, keys = list(authority.state.issued), keys or {}
    for name in names:
        signing, key, private = (authority.own, name), keys.get(name), {}
        if key is None:
            signed = issue(*signing, authority.state.hosts, authority.now, days)
            certificate, private = signed.certificate, {KEY: _encode_key(signed)}
        else:
            certificate = certify(*signing, key, authority.state.hosts, authority.now, days)
        own = read_certificate(encode_pem(certificate))
        assert own is not None
        public = {
            CA: encode_pem(authority.own.certificate),
            CERTIFICATE: encode_pem(certificate),
            MANIFEST: authority.encode_manifest(own),
            **({REVOKED: authority.revoked_pem()} if name == SERVER_NAME else {}),
        }
        write_folder(authority.staging / name, public, private)
        known = None if key is None else fingerprint_key(key)
        issued.append(Issued(name=name, serial=own.serial, expires=own.expires, key=known))
    return replace(authority, state=replace(authority.state, issued=tuple(issued)))


def _publish_kits(authority: CertificateAuthority, names: Sequence[str]) -> list[Kit]:
    for name in names:
        move_folder(authority.staging / name, authority.out / name)
    complete = [authority.out / name for name in names if (authority.out / name / KEY).exists()]
    return [open_kit(folder, now=authority.now) for folder in complete]


def _refuse_making_keys(authority: CertificateAuthority, names: Sequence[str]) -> None:
    """If this CA signs requests, refuse to make a key for a party, or for a server that has sent a request."""
    own = [name for name in names if name != SERVER_NAME or authority.state.has_own_key(SERVER_NAME)]
    if own and not authority.state.trial:
        raise ConfigError(
            f"{', '.join(own)}: the keys for {authority.out} are made where they are used; use `glasu provision "
            "request` there, and `glasu provision sign` here."
        )


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


def _encode_key(signed: Signed) -> bytes:
    return signed.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def truncate_to_seconds(now: datetime | None) -> datetime:
    """Return the time without microseconds, which certificates do not have."""
    return (now or datetime.now(UTC)).replace(microsecond=0)
