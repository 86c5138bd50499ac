"""The private CA: make keys, issue certificates, sign revocation lists. It uses no files, and the time is an argument.

Keys are ECDSA on P-256, which every TLS 1.3 library accepts. The library in gRPC refuses Ed25519 by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from glasu.errors import ConfigError
from glasu.pki.identity import USAGE, find_role, make_identity_uri, parse_hosts

KIT_DAYS, AUTHORITY_DAYS = 365, 3650
CLOCK_SKEW = timedelta(minutes=5)  # certificates become valid this long before their issue, for peers with slow clocks


@dataclass(frozen=True)
class Signed:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)


def make_authority(now: datetime) -> Signed:
    """Make a self-signed CA. It may sign certificates of servers and parties, but not of another CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    subject = _make_subject(f"GLASU CA {serial:040x}"[:25])  # a different name per CA makes errors clear
    builder = (
        x509.CertificateBuilder(subject, subject, key.public_key(), serial)
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_key_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Signed(builder.sign(key, SHA256()), key)


def issue(authority: Signed, name: str, hosts: Sequence[str], now: datetime, days: int) -> Signed:
    """Make a new key, and a certificate for it; see `certify`."""
    key = ec.generate_private_key(ec.SECP256R1())
    return Signed(certify(authority, name, key.public_key(), hosts, now, days), key)


def certify(
    authority: Signed,
    name: str,
    key: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    now: datetime,
    days: int,
) -> x509.Certificate:
    """Make a certificate for a public key. The name determines the role; only the server's certificate lists hosts."""
    role, last = find_role(name), authority.certificate.not_valid_after_utc
    left = (last - now).days
    if not 1 <= days <= left:
        raise ConfigError(f"--days {days}: must lie in 1..{left}, because the CA expires on {last:%Y-%m-%d}.")
    names = [x509.UniformResourceIdentifier(make_identity_uri(name)), *(parse_hosts(hosts) if role == "server" else ())]
    # The subject contains the role but no name. Some clients compare the subject with a host name, and a party may be
    # called "localhost".
    builder = (
        x509.CertificateBuilder(authority.certificate.subject, _make_subject(f"GLASU {role}"), key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([USAGE[role]]), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(_make_authority_key_id(authority), critical=False)
    )
    return builder.sign(authority.key, SHA256())


def sign_revocation_list(
    authority: Signed, revoked: Mapping[str, datetime], now: datetime
) -> x509.CertificateRevocationList:
    """Sign a list of revoked certificates: {hexadecimal serial number: time}. A later list has a higher list number."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(now - CLOCK_SKEW)
        .next_update(authority.certificate.not_valid_after_utc)
        .add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
        .add_extension(_make_authority_key_id(authority), critical=False)
    )
    for serial, date in sorted(revoked.items()):
        entry = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(date).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(authority.key, SHA256())


def _make_subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _make_authority_key_id(authority: Signed) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())


def _make_key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
