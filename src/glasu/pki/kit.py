"""Kit: the folder with the key and certificates of a server or a party, written by `glasu provision`.

ca.pem            certificate of the private CA
certificate.pem   certificate of the server or the party; see glasu.pki.identity
key.pem           its private key, readable by its owner only
secret.hex        at a party, after its first use: the secret of the party, see glasu.pki.secret_file
kit.toml          role, name, fingerprints, expiry and whether it is a trial kit; at the server also the roster
pins.toml         after `glasu provision pin`: the fingerprints of the peers' keys, see glasu.pki.pins
request.pem       if the key was made in this folder: the signing request for the key, see glasu.pki.request
revoked.pem       at the server: the CA's signed list of revoked certificates

For gRPC:  grpc.ssl_channel_credentials(kit.ca_pem, kit.key_pem, kit.certificate_pem)
           grpc.ssl_server_credentials([(kit.key_pem, kit.certificate_pem)], kit.ca_pem, require_client_auth=True)
Call glasu.pki.tls.require_tls_1_3() before grpc is imported. glasu.pki.refusal checks the certificate of a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from glasu.errors import ConfigError, GlasuError, TransportError
from glasu.pki.certificate import CertificateInfo, fingerprint_certificate, read_certificate
from glasu.pki.identity import SERVER_NAME, Role, check_roster, find_role
from glasu.pki.pins import read_pins
from glasu.pki.secret_file import read_secret
from glasu.records import RecordError, parse_toml, read_record
from glasu.secret import Secret

CA, CERTIFICATE, KEY, MANIFEST, REVOKED = "ca.pem", "certificate.pem", "key.pem", "kit.toml", "revoked.pem"
REQUEST = "request.pem"
KIT_SCHEMA = 2
T = TypeVar("T")
_ADVICE = "restore it, or ask for the kit again where `glasu provision` was run"


@dataclass(frozen=True, kw_only=True)
class KitManifest:
    """The content of kit.toml: values of the certificate in readable form, and at the server also the roster."""

    schema: int = KIT_SCHEMA
    role: Role
    name: str  # name of the party, or "server"
    expires: datetime
    serial: str  # hexadecimal
    fingerprint: str  # SHA-256 of the certificate, as openssl prints it
    ca_fingerprint: str  # the same in all kits of one federation
    trial: bool  # whether the key was made at the CA; if so, the CA's operator may have a copy of it
    hosts: tuple[str, ...] = ()  # at the server: its DNS names and IP addresses
    roster: tuple[str, ...] = ()  # at the server: the parties, in the order of their client indices


@dataclass(frozen=True, kw_only=True)
class Kit(KitManifest):
    """A kit whose files were checked: they belong together and are valid."""

    folder: Path
    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    secret: Secret | None = None  # at a party; None before its first use
    revoked: frozenset[str] = frozenset()  # at the server: serial numbers, hexadecimal
    pins: Mapping[str, str] = field(default_factory=dict)  # fingerprints of the peers' keys, by name


def make_manifest(
    own: CertificateInfo, authority: x509.Certificate, roster: tuple[str, ...], *, trial: bool
) -> KitManifest:
    """Return the content of kit.toml for the certificate of a server or a party."""
    assert own.role is not None
    assert own.name is not None
    return KitManifest(
        role=own.role,
        name=own.name,
        expires=own.expires,
        serial=own.serial,
        fingerprint=own.fingerprint,
        ca_fingerprint=fingerprint_certificate(authority),
        trial=trial,
        hosts=own.hosts,
        roster=roster if own.role == "server" else (),
    )


def refuse_data_of_others(kit: Kit, party: str) -> None:
    """Refuse data that does not belong to the party of the kit."""
    if party != kit.name:
        raise ConfigError(
            f"the data belongs to party {party!r} and the kit to party {kit.name!r}; use the kit of {party!r}."
        )


def open_kit(folder: Path, role: Role | None = None, *, now: datetime | None = None) -> Kit:
    """Read a kit and check it.

    Args:
        folder: a folder that `glasu provision` wrote for the server or one party.
        role: the role that the kit must have; None accepts both.
        now: the time at which the kit must be valid; None: the current time.

    Raises:
        TransportError: the kit is invalid. The message names the file, the fault and the remedy.
    """
    now = now or datetime.now(UTC)
    _check_folder(folder)
    manifest = read_document(KitManifest, folder / MANIFEST, KIT_SCHEMA, _ADVICE)
    authority, own = (open_certificate(folder / name) for name in (CA, CERTIFICATE))
    key_pem = check_key(folder / KEY, own)
    _check_certificates(folder, authority, own, now)
    _check_manifest(folder / MANIFEST, manifest, authority, own)
    if role not in (None, own.role):
        owner = "the server" if own.role == "server" else f"party {own.name!r}"
        wanted, example = ("the server", "server") if role == "server" else ("a party", "<party>")
        raise TransportError(
            f"{folder}: is the kit of {owner}, but the kit of {wanted} is needed here, for example kits/{example}."
        )
    return Kit(
        **vars(make_manifest(own, authority.certificate, manifest.roster, trial=manifest.trial)),
        folder=folder,
        ca_pem=encode_pem(authority.certificate),
        certificate_pem=encode_pem(own.certificate),
        key_pem=key_pem,
        secret=read_secret(folder) if own.role == "party" else None,
        pins=read_pins(folder),
        revoked=_read_revocations(folder / REVOKED, authority.certificate) if own.role == "server" else frozenset(),
    )


def reload_revocations(kit: Kit) -> Kit:
    """Return a server's kit with the current revocation list of its folder."""
    authority = x509.load_pem_x509_certificate(kit.ca_pem)
    return replace(kit, revoked=_read_revocations(kit.folder / REVOKED, authority))


def encode_pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate in PEM form."""
    return certificate.public_bytes(Encoding.PEM)


def read_document(cls: type[T], path: Path, schema: int, advice: str) -> T:
    """Read kit.toml or ca.toml strictly.

    Args:
        cls: the dataclass of its contents.
        path: the file.
        schema: the schema number that this version reads.
        advice: what to do about a damaged file.
    """
    try:
        plain = parse_toml(_read(path), str(path))
        found = plain.get("schema") if isinstance(plain, Mapping) else None
        if found != schema:
            raise TransportError(
                f"{path}: schema={found!r}, but this version reads {schema}; use the version of glasu that made it, or "
                f"{advice}."
            )
        return read_record(cls, plain, str(path))
    except RecordError as error:
        raise TransportError(f"{str(error).rstrip('.')}; {advice}.") from None


def open_certificate(path: Path) -> CertificateInfo:
    """Read a file that holds exactly one certificate."""
    found = read_certificate(_read(path))
    if found is None:
        raise TransportError(f"{path}: does not hold one certificate in PEM form; {_ADVICE}.")
    return found


def check_key(path: Path, own: CertificateInfo) -> bytes:
    """Read a private key. Refuse it if other users can read it, or if it does not belong to the certificate."""
    content = _read(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise TransportError(f"{path}: other users may read it (mode {mode:o}); if none did, run: chmod 600 {path}")
    try:
        public = load_pem_private_key(content, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it is encrypted
        raise TransportError(f"{path}: does not hold an unencrypted private key in PEM form; {_ADVICE}.") from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != own.certificate.public_key().public_bytes(*form):
        raise TransportError(f"{path}: does not belong to the certificate next to it; are files of two kits mixed?")
    return content


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise TransportError(f"{folder}: no such folder; a kit is a folder that `glasu provision` wrote.")
    if not (folder / MANIFEST).exists():
        if (folder / SERVER_NAME / MANIFEST).exists():
            raise TransportError(f"{folder}: holds several kits; name one of them, for example {folder / SERVER_NAME}.")
        if (folder / REQUEST).exists():
            raise TransportError(
                f"{folder}: waits for its certificate; send {REQUEST} to the CA (`glasu provision sign`) and copy the "
                "returned files here."
            )
        raise TransportError(f"{folder}: is not a kit, because it holds no {MANIFEST}; {_ADVICE}.")


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
            f"{folder / CERTIFICATE}: was not signed by the CA next to it; are files of two kits mixed?"
        )
    if own.name is None or own.role != find_role(own.name):
        raise TransportError(f"{folder / CERTIFICATE}: names neither a party nor the server; {_ADVICE}.")
    for name, certificate in ((CA, authority), (CERTIFICATE, own)):
        if reason := certificate.validity_error(now):
            advice = "ask for a renewed kit." if now > certificate.expires else "is the clock correct?"
            raise TransportError(f"{folder / name}: {reason}; {advice}")


def _check_manifest(path: Path, manifest: KitManifest, authority: CertificateInfo, own: CertificateInfo) -> None:
    expected = make_manifest(own, authority.certificate, manifest.roster, trial=manifest.trial)
    for key, actual in vars(expected).items():
        written = getattr(manifest, key)
        if _normalize(key, written) != _normalize(key, actual):
            raise TransportError(
                f"{path}: {key}={_show(written)}, but the certificate has {_show(actual)}; "
                "was it edited, or are files of two kits mixed?"
            )
    if own.role == "server":
        try:
            check_roster(manifest.roster)
        except GlasuError as error:
            raise TransportError(f"{path}: {error}") from None


def _normalize(key: str, value: object) -> object:
    """Remove colons and ignore the case in fingerprints, because tools print fingerprints differently."""
    return str(value).replace(":", "").lower() if "fingerprint" in key else value


def _show(value: object) -> str:
    return repr(str(value) if isinstance(value, datetime) else list(value) if isinstance(value, tuple) else value)


def _read_revocations(path: Path, authority: x509.Certificate) -> frozenset[str]:
    content = _read(path)
    try:
        found = x509.load_pem_x509_crl(content)
        is_signed = found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
        serials = frozenset(f"{entry.serial_number:x}" for entry in found)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise TransportError(f"{path}: does not hold a revocation list in PEM form; {_ADVICE}.") from None
    if not is_signed:
        raise TransportError(f"{path}: was not signed by the CA next to it; {_ADVICE}.")
    return serials
