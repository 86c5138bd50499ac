"""Kit: what a server or a party needs to prove who it is; a folder that `glasu provision` wrote, opened and checked.

    open_kit(folder, role=None, *, now=None) -> Kit
    refusal(peer_certificate_pem, kit, *, claimed=None, now=None) -> str     in glasu.pki.refusal

ca.pem            certificate of the private CA
certificate.pem   certificate of the server or the party; its SAN is the identity
key.pem           its private key, readable by its owner only
kit.toml          role, name, fingerprints and expiry; at the server also the roster
revoked.pem       at the server: the CA's signed list of certificates that are not served any more

For gRPC:  grpc.ssl_channel_credentials(kit.ca_pem, kit.key_pem, kit.certificate_pem)
           grpc.ssl_server_credentials([(kit.key_pem, kit.certificate_pem)], kit.ca_pem, require_client_auth=True)
           refusal(context.auth_context()["x509_pem_cert"][0], kit), and kit.roster.index(name) for a client's index,
           where name = glasu.pki.refusal.peer_name(pem). Before grpc is imported: glasu.pki.tls.require_tls_1_3().
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from glasu.errors import GlasuError, TransportError
from glasu.pki.certificate import CertificateInfo, fingerprint, read_certificate
from glasu.pki.identity import SERVER, Role, check_roster, role_of

CA, CERTIFICATE, KEY, MANIFEST, REVOKED = "ca.pem", "certificate.pem", "key.pem", "kit.toml", "revoked.pem"
SCHEMA = 1


@dataclass(frozen=True)
class Kit:
    """A kit whose files belong together and are valid now."""

    folder: Path
    role: Role
    name: str  # the party's, or "server"
    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    fingerprint: str  # SHA-256 of the own certificate, as openssl shows it
    serial: int
    expires: datetime
    hosts: tuple[str, ...] = ()  # at the server: under which names it may be reached
    roster: tuple[str, ...] = ()  # at the server: the parties, in the order of their client indices
    revoked: frozenset[int] = frozenset()  # at the server: serial numbers

    @property
    def ca_fingerprint(self) -> str:
        """The SHA-256 of the CA's certificate: equal in all kits of one federation."""
        return fingerprint(x509.load_pem_x509_certificate(self.ca_pem))


def open_kit(folder: Path, role: Role | None = None, *, now: datetime | None = None) -> Kit:
    """Read a kit and check it.

    Args:
        folder: what `glasu provision` wrote for one server or party.
        role: what the kit is to be used as; None accepts both.
        now: the time at which it must be valid; by default the present.

    Raises:
        TransportError: names the file, what is wrong with it, and what to do.
    """
    now = now or datetime.now(UTC)
    _check_folder(folder)
    manifest = _read_manifest(folder / MANIFEST)
    authority, own = (open_certificate(folder / name) for name in (CA, CERTIFICATE))
    key_pem = check_key(folder / KEY, own)
    _check_certificates(folder, authority, own, now)
    name = _name(folder / CERTIFICATE, own)
    _check_manifest(folder / MANIFEST, manifest, authority, own)
    if role not in (None, role_of(name)):
        bearer = "the server" if name == SERVER else f"party {name!r}"
        raise TransportError(f"{folder}: is the kit of {bearer}, but that of a {role} is needed here.")
    is_server = name == SERVER
    return Kit(
        folder=folder,
        role=role_of(name),
        name=name,
        ca_pem=pem(authority.certificate),
        certificate_pem=pem(own.certificate),
        key_pem=key_pem,
        fingerprint=own.fingerprint,
        serial=own.serial,
        expires=own.expires,
        hosts=own.hosts,
        roster=tuple(manifest["roster"]) if is_server else (),
        revoked=_read_revocations(folder / REVOKED, authority.certificate) if is_server else frozenset(),
    )


def with_revocations_of_now(kit: Kit) -> Kit:
    """Return a server's kit with what its folder's revocation list says now; the rest stays as it was opened."""
    authority = x509.load_pem_x509_certificate(kit.ca_pem)
    return replace(kit, revoked=_read_revocations(kit.folder / REVOKED, authority))


def manifest_of(own: CertificateInfo, authority: x509.Certificate, roster: tuple[str, ...]) -> dict[str, Any]:
    """Return the contents of kit.toml: what the certificate says in plain words and, at the server, the roster."""
    content = {
        "schema": SCHEMA,
        "role": own.role,
        "name": own.name,
        "expires": own.expires,
        "serial": f"{own.serial:x}",
        "fingerprint": own.fingerprint,
        "ca_fingerprint": fingerprint(authority),
    }
    return {**content, "hosts": list(own.hosts), "roster": list(roster)} if own.role == "server" else content


def pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as text."""
    return certificate.public_bytes(Encoding.PEM)


def open_certificate(path: Path) -> CertificateInfo:
    """Read a file that holds exactly one certificate."""
    found = read_certificate(_content(path))
    if found is None:
        raise TransportError(f"{path}: does not hold one certificate in PEM form; {_AGAIN}.")
    return found


def check_key(path: Path, own: CertificateInfo) -> bytes:
    """Return a private key that others cannot read and that belongs to the certificate."""
    content = _content(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise TransportError(f"{path}: others may read this key (mode {mode:o}); if none did, run: chmod 600 {path}")
    try:
        public = load_pem_private_key(content, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it is encrypted
        raise TransportError(f"{path}: does not hold a private key in PEM form, unencrypted; {_AGAIN}.") from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != own.certificate.public_key().public_bytes(*form):
        raise TransportError(f"{path}: does not belong to the certificate beside it; are files of two kits mixed?")
    return content


_AGAIN = "restore it, or ask whoever ran `glasu provision` for the kit again"


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise TransportError(f"{folder}: no such folder; a kit is a folder that `glasu provision` wrote.")
    if not (folder / MANIFEST).exists():
        if (folder / SERVER / MANIFEST).exists():
            raise TransportError(f"{folder}: holds several kits; name one of them, for example {folder / SERVER}.")
        raise TransportError(f"{folder}: is no kit, for it holds no {MANIFEST}; {_AGAIN}.")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise TransportError(f"{path}: is missing; {_AGAIN}.") from None
    except OSError as error:
        raise TransportError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}.") from None


def _check_certificates(folder: Path, authority: CertificateInfo, own: CertificateInfo, now: datetime) -> None:
    if not (authority.is_authority and authority.is_self_signed):
        raise TransportError(f"{folder / CA}: is not the certificate of a CA; {_AGAIN}.")
    if not own.issued_by(authority.certificate):
        raise TransportError(
            f"{folder / CERTIFICATE}: was not signed by the CA beside it; are files of two kits mixed?"
        )
    for name, passport in ((CA, authority), (CERTIFICATE, own)):
        if outdated := passport.outdated(now):
            advice = "is the clock right?" if "before" in outdated else "ask for a renewed kit."
            raise TransportError(f"{folder / name}: {outdated}; {advice}")


def _name(path: Path, own: CertificateInfo) -> str:
    if own.name is None or own.role != role_of(own.name):
        raise TransportError(f"{path}: names neither a party nor the server; {_AGAIN}.")
    return own.name


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = tomllib.loads(_content(path).decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TransportError(f"{path}: is not TOML ({error}); {_AGAIN}.") from None
    if manifest.get("schema") != SCHEMA:
        raise TransportError(
            f"{path}: schema={manifest.get('schema')!r}, but this version reads {SCHEMA}; "
            "use the version of glasu that made the kit, or ask for a new one."
        )
    return manifest


def _check_manifest(path: Path, manifest: dict[str, Any], authority: CertificateInfo, own: CertificateInfo) -> None:
    roster = manifest.get("roster", [])
    expected = manifest_of(own, authority.certificate, ())
    for key in ("role", "name", "expires", "serial", "fingerprint", "ca_fingerprint", "hosts"):
        written, said = manifest.get(key), expected.get(key)
        if _comparable(key, written) != _comparable(key, said):
            if isinstance(written, date):  # also a datetime
                written, said = str(written), str(said)
            raise TransportError(
                f"{path}: {key}={written!r}, but the certificate says {said!r}; "
                "was it edited, or are files of two kits mixed?"
            )
    if own.role == "server":
        try:
            if not (isinstance(roster, list) and all(isinstance(name, str) for name in roster)):
                raise TransportError(f"roster={roster!r} must list the names of the parties.")
            check_roster(roster)
        except GlasuError as error:
            raise TransportError(f"{path}: {error}") from None


def _comparable(key: str, value: Any) -> Any:
    """Return a value of kit.toml; fingerprints count the same with and without colons, in large or small letters."""
    return value.replace(":", "").lower() if "fingerprint" in key and isinstance(value, str) else value


def _read_revocations(path: Path, authority: x509.Certificate) -> frozenset[int]:
    content = _content(path)
    try:
        found = x509.load_pem_x509_crl(content)
        genuine = found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
        serials = frozenset(entry.serial_number for entry in found)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise TransportError(f"{path}: does not hold a revocation list in PEM form; {_AGAIN}.") from None
    if not genuine:
        raise TransportError(f"{path}: was not signed by the CA beside it; {_AGAIN}.")
    return serials
