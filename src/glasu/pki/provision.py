"""A federation's kits: make them all, add or remove a party, renew, revoke; nothing is overwritten, nothing is deleted.

KITS/ca/         ca.pem, ca-key.pem, ca.toml, revoked.pem: stays with whoever runs `glasu provision`
KITS/server/     the server's kit
KITS/<party>/    one kit per party
KITS/retired/    kits that were renewed or removed, under their name and the time

The register ca.toml comes first and decides; whatever is interrupted after it, renewing completes.
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
from glasu.pki.authority import KIT_DAYS, Signed, issue, new_authority, revocation_list
from glasu.pki.certificate import CertificateInfo, read_certificate
from glasu.pki.folders import at_work, move, retire, write_folder
from glasu.pki.identity import RESERVED, SERVER, check_roster, host_names
from glasu.pki.issued import Register
from glasu.pki.kit import (
    CA,
    CERTIFICATE,
    KEY,
    MANIFEST,
    REVOKED,
    Kit,
    check_key,
    manifest_of,
    open_certificate,
    open_kit,
    pem,
)

AUTHORITY, AUTHORITY_KEY, REGISTER = "ca", "ca-key.pem", "ca.toml"


@dataclass(frozen=True)
class _Office:
    """A CA at work in a folder that no other command uses meanwhile."""

    out: Path
    fresh: Path  # for folders that are not complete yet
    authority: Signed
    register: Register
    now: datetime

    @property
    def folder(self) -> Path:
        return self.out / AUTHORITY

    def revoked_pem(self) -> bytes:
        """Sign the list of what the register calls revoked."""
        signed = revocation_list(self.authority, self.register.revoked(), self.now)
        return signed.public_bytes(Encoding.PEM)

    def manifest(self, own: CertificateInfo) -> bytes:
        """Return kit.toml for a certificate."""
        return tomli_w.dumps(manifest_of(own, self.authority.certificate, self.register.roster)).encode()


def provision(
    out: Path, parties: Sequence[str], hosts: Sequence[str], *, days: int = KIT_DAYS, now: datetime | None = None
) -> list[Kit]:
    """Make a CA, the server's kit and one kit per party.

    Args:
        out: where their folders are made; none of them may exist.
        parties: the roster; a party's position is its client index.
        hosts: the DNS names and IP addresses under which parties reach the server.
        days: how long the kits are valid.
        now: by default the present.
    """
    now = _seconds(now)
    check_roster(parties)
    host_names(hosts)
    authority, names = new_authority(now), (SERVER, *parties)
    with at_work(out) as fresh:
        _refuse_existing(out, (*RESERVED, *parties))
        register = Register(roster=tuple(parties), hosts=tuple(hosts))
        office = _issue(_Office(out, fresh, authority, register, now), names, days)
        public = {CA: pem(authority.certificate), REGISTER: office.register.to_toml(), REVOKED: office.revoked_pem()}
        write_folder(fresh / AUTHORITY, public, {AUTHORITY_KEY: _key_pem(authority)})
        move(fresh / AUTHORITY, office.folder)
        return _place(office, names)


def add(out: Path, parties: Sequence[str], *, days: int = KIT_DAYS, now: datetime | None = None) -> list[Kit]:
    """Append parties to the roster and make their kits; the server's kit.toml lists them from now on."""
    with _open_office(out, _seconds(now)) as office:
        roster = office.register.roster
        for name in parties:
            if name in roster:
                raise ConfigError(f"party {name!r}: is on the roster already; for a new kit, ask for --renew {name}.")
        check_roster((*roster, *parties))
        _refuse_existing(out, parties)
        if not (out / SERVER).is_dir():
            raise ConfigError(
                f"{out / SERVER}: is not here, and its {MANIFEST} must list the new party; "
                "bring it back, or make another with --renew server."
            )
        office = _issue(replace(office, register=replace(office.register, roster=(*roster, *parties))), parties, days)
        office.register.save(office.folder / REGISTER)
        kits = _place(office, parties)
        _publish(office)
        return kits


def remove(out: Path, names: Sequence[str], *, now: datetime | None = None) -> list[Path]:
    """Take parties off the roster, revoke their certificates, put their kits aside; return the lists written.

    The parties that stay keep their order; added again, a name comes last.
    """
    with _open_office(out, _seconds(now)) as office:
        _check_known(office, names, office.register.roster)
        if set(names) == set(office.register.roster):
            raise ConfigError(f"{', '.join(names)}: nobody would be left on the roster; --add another party before.")
        office = replace(office, register=office.register.without(names, office.now))
        office.register.save(office.folder / REGISTER)
        for name in names:
            retire(out / name, office.now)
        return _publish(office)


def renew(
    out: Path, names: Sequence[str], hosts: Sequence[str] = (), *, days: int = KIT_DAYS, now: datetime | None = None
) -> list[Kit]:
    """Make new keys and certificates for parties or the server, and put the old kits aside.

    Old certificates that were not revoked stay valid until they expire (see `still_good`), so that a kit can be handed
    over without haste. A kit that is no longer in `out` is made all the same. New `hosts` replace those in the server's
    certificate.
    """
    with _open_office(out, _seconds(now)) as office:
        _check_known(office, names, (SERVER, *office.register.roster))
        if hosts and SERVER not in names:
            raise ConfigError(f"--host {hosts[0]}: only the server's certificate names hosts; ask for --renew server.")
        register = replace(office.register, hosts=tuple(hosts) or office.register.hosts)
        office = _issue(replace(office, register=register), names, days)
        office.register.save(office.folder / REGISTER)
        for name in names:
            retire(out / name, office.now)
        kits = _place(office, names)
        _publish(office)
        return kits


def no_longer_named(out: Path, hosts: Sequence[str]) -> list[str]:
    """Return the server's present names that a renewal with these hosts would drop; without any, all stay."""
    register = out / AUTHORITY / REGISTER
    return [name for name in Register.load(register).hosts if name not in hosts] if hosts and register.is_file() else []


def still_good(out: Path, kits: Sequence[Kit], *, now: datetime | None = None) -> list[str]:
    """Return whose kits, of those renewed just now, replace certificates that are served until they expire."""
    register = Register.load(out / AUTHORITY / REGISTER)
    return [kit.name for kit in kits if register.still_good(kit.name, kit.serial, _seconds(now))]


def revoke(out: Path, names: Sequence[str], *, now: datetime | None = None) -> list[Path]:
    """List every certificate issued to these parties so far as one that is not served; return the lists written.

    Asking again signs the same list again.
    """
    with _open_office(out, _seconds(now)) as office:
        if SERVER in names:
            raise ConfigError(
                "server: parties read no revocation list, so a stolen server key stays good to them; "
                "make a new CA and new kits in another --out."
            )
        _check_known(office, names, office.register.roster)
        office = replace(office, register=office.register.with_revoked(names, office.now))
        office.register.save(office.folder / REGISTER)
        return _publish(office)


@contextmanager
def _open_office(out: Path, now: datetime) -> Iterator[_Office]:
    folder = out / AUTHORITY
    if not folder.is_dir():
        raise ConfigError(f"{out}: holds no CA; give the --out of the first `glasu provision --parties ...`.")
    with at_work(out) as fresh:
        own = open_certificate(folder / CA)
        if outdated := own.outdated(now):
            raise TransportError(f"{folder / CA}: {outdated}; make a new CA and new kits in another --out.")
        key = load_pem_private_key(check_key(folder / AUTHORITY_KEY, own), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        yield _Office(out, fresh, Signed(own.certificate, key), Register.load(folder / REGISTER), now)


def _issue(office: _Office, names: Sequence[str], days: int) -> _Office:
    """Write new kits, not yet in their place; return the office with the register that knows them."""
    passports = []
    for name in names:
        signed = issue(office.authority, name, office.register.hosts, office.now, days)
        own = read_certificate(pem(signed.certificate))
        assert own is not None
        public = {
            CA: pem(office.authority.certificate),
            CERTIFICATE: pem(signed.certificate),
            MANIFEST: office.manifest(own),
            **({REVOKED: office.revoked_pem()} if name == SERVER else {}),
        }
        write_folder(office.fresh / name, public, {KEY: _key_pem(signed)})
        passports.append(own)
    return replace(office, register=office.register.with_issued(passports))


def _place(office: _Office, names: Sequence[str]) -> list[Kit]:
    for name in names:
        move(office.fresh / name, office.out / name)
    return [open_kit(office.out / name, now=office.now) for name in names]


def _publish(office: _Office) -> list[Path]:
    """Write what the register says of roster and revocations, to the server's kit if it is here; return the lists."""
    lists = [folder / REVOKED for folder in (office.folder, office.out / SERVER) if folder.is_dir()]
    for path in lists:
        write_atomically(path, office.revoked_pem())
    if (server := office.out / SERVER).is_dir():
        write_atomically(server / MANIFEST, office.manifest(open_certificate(server / CERTIFICATE)))
    return lists


def _refuse_existing(out: Path, names: Sequence[str]) -> None:
    if taken := [name for name in names if os.path.lexists(out / name)]:
        if AUTHORITY in taken:
            raise ConfigError(
                f"{out}: kits are here already ({', '.join(taken)}), and nothing was changed; "
                "ask for --add, --remove, --renew or --revoke, or choose another --out."
            )
        raise ConfigError(f"{out / taken[0]}: exists and is not overwritten; move it away, or choose another --out.")


def _check_known(office: _Office, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{name!r}: is not known in {office.out}; known are: {', '.join(known)}.")
        if names.count(name) > 1:
            raise ConfigError(f"{name!r}: is named twice; once is enough.")


def _key_pem(signed: Signed) -> bytes:
    return signed.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _seconds(now: datetime | None) -> datetime:
    """Return the time to the second, as certificates have it."""
    return (now or datetime.now(UTC)).replace(microsecond=0)
