"""Kit: the folder with the key and certificates of a server or a party, written by `glasu provision`.

ca.pem            certificate of the private CA
certificate.pem   certificate of the server or the party; its SAN is the identity
key.pem           its private key, readable by its owner only
kit.toml          role, name, fingerprints and expiry; at the server also the roster
revoked.pem       at the server: the CA's signed list of revoked certificates

For gRPC:  grpc.ssl_channel_credentials(kit.ca_pem, kit.key_pem, kit.certificate_pem)
           grpc.ssl_server_credentials([(kit.key_pem, kit.certificate_pem)], kit.ca_pem, require_client_auth=True)
Call glasu.pki.tls.require_tls_1_3() before grpc is imported. glasu.pki.refusal checks the certificate of a peer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from glasu.errors import GlasuError, TransportError
from glasu.pki.certificate import CertificateInfo, fingerprint, read_certificate
from glasu.pki.documents import read_document
from glasu.pki.identity import SERVER, Role, check_roster, role_of

CA, CERTIFICATE, KEY, MANIFEST, REVOKED = "ca.pem", "certificate.pem", "key.pem", "kit.toml", "revoked.pem"
SCHEMA = 1
_ADVICE = "restore it, or ask for the kit again where `glasu provision` was run"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """kit.toml: the contents of the certificate in plain text and, at the server, the roster."""

    schema: int = SCHEMA
    role: Role
    name: str
    expires: datetime
    serial: str  # hexadecimal
    fingerprint: str
    ca_fingerprint: str
    hosts: tuple[str, ...] | None = None
    roster: tuple[str, ...] | None = None

    @classmethod
    def of(cls, own: CertificateInfo, authority: x509.Certificate, roster: tuple[str, ...]) -> Manifest:
        """Describe a certificate of a server or a party."""
        assert own.role is not None
        assert own.name is not None
        is_server = own.role == "server"
        return cls(
            role=own.role,
            name=own.name,
            expires=own.expires,
            serial=f"{own.serial:x}",
            fingerprint=own.fingerprint,
            ca_fingerprint=fingerprint(authority),
            hosts=own.hosts if is_server else None,
            roster=roster if is_server else None,
        )


@dataclass(frozen=True)
class Kit:
    """A checked kit: its files belong together and are valid."""

    folder: Path
    role: Role
    name: str  # of the party, or "server"
    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    fingerprint: str  # SHA-256 of the own certificate, as openssl prints it
    serial: int
    expires: datetime
    hosts: tuple[str, ...] = ()  # at the server: its DNS names and IP addresses
    roster: tuple[str, ...] = ()  # at the server: the parties, in the order of their client indices
    revoked: frozenset[int] = frozenset()  # at the server: serial numbers

    @property
    def ca_fingerprint(self) -> str:
        """The SHA-256 of the CA certificate; it is the same in all kits of one federation."""
        return fingerprint(x509.load_pem_x509_certificate(self.ca_pem))


def open_kit(folder: Path, role: Role | None = None, *, now: datetime | None = None) -> Kit:
    """Read a kit and check it.

    Args:
        folder: a folder that `glasu provision` wrote for the server or one party.
        role: the role that the kit must have; None accepts both.
        now: the time at which it must be valid; the present by default.

    Raises:
        TransportError: names the file, the fault and the remedy.
    """
    now = now or datetime.now(UTC)
    _check_folder(folder)
    manifest = read_document(Manifest, folder / MANIFEST, _read(folder / MANIFEST), SCHEMA, _ADVICE)
    authority, own = (open_certificate(folder / name) for name in (CA, CERTIFICATE))
    key_pem = check_key(folder / KEY, own)
    _check_certificates(folder, authority, own, now)
    name = _check_name(folder / CERTIFICATE, own)
    _check_manifest(folder / MANIFEST, manifest, authority, own)
    if role not in (None, role_of(name)):
        owner = "the server" if name == SERVER else f"party {name!r}"
        raise TransportError(f"{folder}: is the kit of {owner}, but that of a {role} is needed here.")
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
        roster=manifest.roster or (),
        revoked=_read_revocations(folder / REVOKED, authority.certificate) if is_server else frozenset(),
    )


def reload_revocations(kit: Kit) -> Kit:
    """Return a server's kit with the present revocation list of its folder."""
    authority = x509.load_pem_x509_certificate(kit.ca_pem)
    return replace(kit, revoked=_read_revocations(kit.folder / REVOKED, authority))


def pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate in PEM form."""
    return certificate.public_bytes(Encoding.PEM)


def open_certificate(path: Path) -> CertificateInfo:
    """Read a file that holds exactly one certificate."""
    found = read_certificate(_read(path))
    if found is None:
        raise TransportError(f"{path}: does not hold one certificate in PEM form; {_ADVICE}.")
    return found


def check_key(path: Path, own: CertificateInfo) -> bytes:
    """Return a private key; refuse one that other users can read or that does not fit the certificate."""
    content = _read(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise TransportError(f"{path}: other users may read it (mode {mode:o}); if none did, run: chmod 600 {path}")
    try:
        public = load_pem_private_key(content, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it is encrypted
        raise TransportError(f"{path}: does not hold a private key in PEM form, unencrypted; {_ADVICE}.") from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != own.certificate.public_key().public_bytes(*form):
        raise TransportError(f"{path}: does not belong to the certificate beside it; are files of two kits mixed?")
    return content


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise TransportError(f"{folder}: no such folder; a kit is a folder that `glasu provision` wrote.")
    if not (folder / MANIFEST).exists():
        if (folder / SERVER / MANIFEST).exists():
            raise TransportError(f"{folder}: holds several kits; name one of them, for example {folder / SERVER}.")
        raise TransportError(f"{folder}: is no kit, because it holds no {MANIFEST}; {_ADVICE}.")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise TransportError(f"{path}: is missing; {_ADVICE}.") from None
    except OSError as error:
        raise TransportError(f"{path}: cannot be read ({error.strerror}); {_ADVICE}.") from None


def _check_certificates(folder: Path, authority: CertificateInfo, own: CertificateInfo, now: datetime) -> None:
    if not (authority.is_authority and authority.is_self_signed):
        raise TransportError(f"{folder / CA}: is not the certificate of a CA; {_ADVICE}.")
    if not own.is_issued_by(authority.certificate):
        raise TransportError(
            f"{folder / CERTIFICATE}: was not signed by the CA beside it; are files of two kits mixed?"
        )
    for name, certificate in ((CA, authority), (CERTIFICATE, own)):
        if reason := certificate.validity_error(now):
            advice = "ask for a renewed kit." if now > certificate.expires else "is the clock right?"
            raise TransportError(f"{folder / name}: {reason}; {advice}")


def _check_name(path: Path, own: CertificateInfo) -> str:
    if own.name is None or own.role != role_of(own.name):
        raise TransportError(f"{path}: names neither a party nor the server; {_ADVICE}.")
    return own.name


def _check_manifest(path: Path, manifest: Manifest, authority: CertificateInfo, own: CertificateInfo) -> None:
    expected = Manifest.of(own, authority.certificate, manifest.roster or ())
    for key in (item.name for item in fields(Manifest) if item.name != "roster"):
        written, actual = getattr(manifest, key), getattr(expected, key)
        if _normalize(key, written) != _normalize(key, actual):
            raise TransportError(
                f"{path}: {key}={_show(written)}, but the certificate says {_show(actual)}; "
                "was it edited, or are files of two kits mixed?"
            )
    if own.role == "server":
        try:
            check_roster(manifest.roster or ())
        except GlasuError as error:
            raise TransportError(f"{path}: {error}") from None


def _normalize(key: str, value: object) -> object:
    """Ignore colons and case in fingerprints; tools print them differently."""
    return str(value).replace(":", "").lower() if "fingerprint" in key else value


def _show(value: object) -> str:
    return repr(str(value) if isinstance(value, datetime) else list(value) if isinstance(value, tuple) else value)


def _read_revocations(path: Path, authority: x509.Certificate) -> frozenset[int]:
    content = _read(path)
    try:
        found = x509.load_pem_x509_crl(content)
        is_signed = found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
        serials = frozenset(entry.serial_number for entry in found)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise TransportError(f"{path}: does not hold a revocation list in PEM form; {_ADVICE}.") from None
    if not is_signed:
        raise TransportError(f"{path}: was not signed by the CA beside it; {_ADVICE}.")
    return serials
