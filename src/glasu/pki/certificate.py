"""Parse a certificate once and completely; later checks use the parsed values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.hashes import SHA256

from glasu.pki.identity import USAGE, Role, read_name


@dataclass(frozen=True)
class CertificateInfo:
    """The parts of a certificate that determine its identity and validity."""

    certificate: x509.Certificate
    role: Role | None  # None: the key usage fits neither a server nor a party
    name: str | None  # None: the subject alternative name (SAN) does not name exactly one server or party
    hosts: tuple[str, ...]  # DNS names and IP addresses
    issuer: str
    is_authority: bool

    @property
    def serial(self) -> str:
        """The serial number in hexadecimal. It has up to 159 bits, but an integer in TOML has only 64 bits."""
        return f"{self.certificate.serial_number:x}"

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the certificate, as `openssl x509 -fingerprint -sha256` prints it."""
        return fingerprint_certificate(self.certificate)

    @property
    def expires(self) -> datetime:
        return self.certificate.not_valid_after_utc

    def validity_error(self, now: datetime) -> str:
        """Return the reason why the certificate is not valid at this time, or an empty string."""
        first, last = self.certificate.not_valid_before_utc, self.expires
        if now > last:
            return f"expired on {format_time(last)}"
        return f"is not valid before {format_time(first)}, but the time is {format_time(now)}" if now < first else ""

    def is_issued_by(self, authority: x509.Certificate) -> bool:
        """Return True if the key of this CA signed the certificate."""
        try:
            self.certificate.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError, TypeError):  # the key, the issuer name or the type of the key differs
            return False
        return True

    @property
    def is_self_signed(self) -> bool:
        return self.is_issued_by(self.certificate)


def read_certificate(pem: bytes) -> CertificateInfo | None:
    """Parse one PEM certificate; return None for any other content."""
    try:
        (certificate,) = x509.load_pem_x509_certificates(pem)
        extensions = {extension.oid: extension.value for extension in certificate.extensions}
        issuer = certificate.issuer.rfc4514_string()
        _ = (
            certificate.subject,
            certificate.public_key(),
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
        )
    except Exception:  # the parser raises many types of errors for invalid input
        return None
    names = extensions.get(x509.SubjectAlternativeName.oid, x509.SubjectAlternativeName([]))
    usage = extensions.get(x509.ExtendedKeyUsage.oid, ())
    limits = extensions.get(x509.BasicConstraints.oid)
    assert isinstance(names, x509.SubjectAlternativeName)
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return CertificateInfo(
        certificate=certificate,
        role=next((role for role, oid in USAGE.items() if list(usage) == [oid]), None),
        name=read_name(uris[0]) if len(uris) == 1 else None,
        hosts=tuple(hosts),
        issuer=issuer,
        is_authority=isinstance(limits, x509.BasicConstraints) and limits.ca,
    )


def fingerprint_certificate(certificate: x509.Certificate) -> str:
    """Return the SHA-256 of a certificate as openssl prints it: AB:CD:..."""
    return certificate.fingerprint(SHA256()).hex(":").upper()


def format_time(time: datetime) -> str:
    """Format a time for messages."""
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"
