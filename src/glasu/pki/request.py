"""Signing requests. A party or the server makes a key and a request. The key stays there; the CA signs the request.

KIT/key.pem       the private key, readable by its owner only
KIT/secret.hex    at a party: its secret
KIT/request.pem   the request (PKCS #10) to send to the CA; not secret

The CA returns ca.pem, certificate.pem and kit.toml, and to the server also revoked.pem. When these files are copied to
the folder of the key, the kit is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from glasu.errors import ConfigError, GlasuError, TransportError
from glasu.files import sync_folder, write_atomically
from glasu.pki.fingerprint import fingerprint_key
from glasu.pki.identity import SERVER_NAME, check_roster, find_role, make_identity_uri, read_name
from glasu.pki.kit import KEY, REQUEST
from glasu.pki.secret_file import make_secret

MAX_REQUEST_BYTES = 1 << 16


@dataclass(frozen=True)
class SigningRequest:
    """A checked request: its sender has the private key, and the name is legal."""

    name: str
    key: ec.EllipticCurvePublicKey
    source: str

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the public key, in hexadecimal."""
        return fingerprint_key(self.key)


def make_request(folder: Path, name: str) -> SigningRequest:
    """Make a key and a signing request in a new folder. For a party, also make its secret.

    Args:
        folder: the folder for the kit.
        name: the name of the party, or SERVER_NAME. The CA adds the hosts of the server.
    """
    _check_name(name)
    key, subject = ec.generate_private_key(ec.SECP256R1()), f"GLASU {find_role(name)}"
    request = (
        x509.CertificateSigningRequestBuilder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(make_identity_uri(name))]), False)
        .sign(key, SHA256())
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if taken := sorted(path.name for path in folder.iterdir()):
            raise ConfigError(f"--out {folder}: is not empty ({taken[0]}); nothing was changed. Choose another folder.")
        folder.chmod(0o700)
        write_atomically(folder / KEY, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
        if name != SERVER_NAME:
            make_secret(folder)
        write_atomically(folder / REQUEST, request.public_bytes(Encoding.PEM))
        sync_folder(folder)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written to ({error.strerror}); choose another folder.") from None
    return SigningRequest(name, key.public_key(), str(folder / REQUEST))


def read_request(path: Path) -> SigningRequest:
    """Read a signing request and check its signature, key and name.

    Raises:
        TransportError: the request is invalid. The message names the file and the fault.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_REQUEST_BYTES)
    except OSError as error:
        raise TransportError(f"{path}: cannot be read ({error.strerror}).") from None
    try:
        request = x509.load_pem_x509_csr(content)
        found: Any = request.public_key()
        uris = _list_names(request)
        is_signed = request.is_signature_valid and isinstance(request.signature_hash_algorithm, SHA256)
    except Exception:  # the parser raises many types of errors for invalid input
        raise TransportError(
            f"{path}: holds no signing request in PEM form; ask for the correct request.pem."
        ) from None
    if not isinstance(found, ec.EllipticCurvePublicKey) or not isinstance(found.curve, ec.SECP256R1):
        raise TransportError(f"{path}: its key is not ECDSA on P-256; make it with `glasu provision request`.")
    if not is_signed:
        raise TransportError(
            f"{path}: its signature (ECDSA with SHA-256) is not valid, so it was modified in transit; ask for it again."
        )
    name = read_name(uris[0]) if len(uris) == 1 else None
    if name is None:
        raise TransportError(f"{path}: does not name one party or the server; make it with `glasu provision request`.")
    try:
        _check_name(name)
    except GlasuError as error:
        raise TransportError(f"{path}: {error}") from None
    return SigningRequest(name, found, str(path))


def _check_name(name: str) -> None:
    """Refuse a name that no party can have, unless it is the name of the server."""
    if name != SERVER_NAME:
        check_roster([name])


def _list_names(request: x509.CertificateSigningRequest) -> list[str]:
    """Return the URIs in the subject alternative name; an empty list if it also contains names that are not URIs."""
    try:
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    if any(not isinstance(name, x509.UniformResourceIdentifier) for name in names):
        return []
    return list(names.get_values_for_type(x509.UniformResourceIdentifier))
