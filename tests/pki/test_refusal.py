from __future__ import annotations

import base64
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given, settings
from hypothesis import strategies as st

from glasu.pki.authority import Signed, issue, make_authority
from glasu.pki.kit import Kit, encode_pem, open_kit
from glasu.pki.refusal import find_refusal, read_peer_name

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)
quick = settings(deadline=None)
AUTHORITY = make_authority(NOW - 10 * DAY)
GOOD = encode_pem(issue(AUTHORITY, "a", (), NOW, 30).certificate)


def a_kit(role: str, **changes: object) -> Kit:
    """A kit that exists in memory only; `find_refusal` reads no file."""
    own = issue(AUTHORITY, "server" if role == "server" else "a", ["localhost"], NOW, 30).certificate
    kit = Kit(
        folder=None,  # type: ignore[arg-type]
        role=role,  # type: ignore[arg-type]
        name="server" if role == "server" else "a",
        ca_pem=encode_pem(AUTHORITY.certificate),
        certificate_pem=encode_pem(own),
        key_pem=b"",
        fingerprint="",
        serial=f"{own.serial_number:x}",
        trial=True,
        ca_fingerprint="",
        expires=own.not_valid_after_utc,
        roster=("a", "b") if role == "server" else (),
    )
    return replace(kit, **changes)  # type: ignore[arg-type]


SERVER_KIT, PARTY_KIT = a_kit("server"), a_kit("party")


def odd(
    *uris: str,
    usage: tuple[x509.ObjectIdentifier, ...] = (ExtendedKeyUsageOID.CLIENT_AUTH,),
    signer: Signed = AUTHORITY,
    issuer: x509.Name | None = None,
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None,
) -> bytes:
    """A signed certificate that `issue` would not make."""
    public = (key or ec.generate_private_key(ec.SECP256R1())).public_key()
    name = issuer or signer.certificate.subject
    builder = x509.CertificateBuilder(name, name, public, x509.random_serial_number(), NOW - DAY, NOW + DAY)
    if uris:
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if usage:
        builder = builder.add_extension(x509.ExtendedKeyUsage(list(usage)), critical=False)
    return encode_pem(builder.sign(signer.key, SHA256()))


def self_signed() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    return odd("glasu:party:a", signer=Signed(AUTHORITY.certificate, key), issuer=name, key=key)


CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
REFUSED = {
    "none": (None, "no certificate"),
    "empty": (b"", "no certificate"),
    "garbage": (b"\x00\xff" * 50, "cannot be read"),
    "a key instead": (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "cannot be read"),
    "two at once": (GOOD + GOOD, "cannot be read"),
    "self-signed": (self_signed(), "self-signed"),
    "other CA": (encode_pem(issue(make_authority(NOW), "a", (), NOW, 3).certificate), "another CA ('CN=GLASU CA"),
    "our CA's name, another key": (
        odd("glasu:party:a", signer=Signed(AUTHORITY.certificate, make_authority(NOW).key)),
        "another CA",
    ),
    "expired": (encode_pem(issue(AUTHORITY, "a", (), NOW - 3 * DAY, 1).certificate), "expired on"),
    "not yet valid": (encode_pem(issue(AUTHORITY, "a", (), NOW + DAY, 1).certificate), "not valid before"),
    "the CA itself": (encode_pem(AUTHORITY.certificate), "names neither"),
    "no SAN": (odd(), "names neither"),
    "foreign SAN": (odd("spiffe://example.org/a"), "names neither"),
    "two names": (odd("glasu:party:a", "glasu:party:b"), "names neither"),
    "second spelling": (odd("glasu:party:%61"), "names neither"),
    "no usage": (odd("glasu:party:a", usage=()), "its key usage does not fit a party"),
    "the server's usage": (odd("glasu:party:a", usage=(SERVER,)), "its key usage does not fit a party"),
    "both usages": (odd("glasu:party:a", usage=(CLIENT, SERVER)), "its key usage does not fit a party"),
    "server kit as party": (
        SERVER_KIT.certificate_pem,
        "belongs to a server, but the certificate of a party is needed",
    ),
    "server's name for a party": (odd("glasu:server"), "its key usage does not fit a server"),
    "not on the roster": (encode_pem(issue(AUTHORITY, "z", (), NOW, 3).certificate), "'z' is not on the roster (a, b)"),
    "an RSA key from nowhere": (
        odd(
            "glasu:party:a",
            signer=Signed(AUTHORITY.certificate, rsa.generate_private_key(65537, 2048)),  # type: ignore[arg-type]
        ),
        "another CA",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_server_says_why_a_certificate_is_not_served(kind):
    presented, said = REFUSED[kind]
    reason = find_refusal(presented, SERVER_KIT, now=NOW)
    assert said in reason
    assert len(reason.splitlines()) == 1


def test_a_party_of_the_roster_is_served():
    assert find_refusal(GOOD, SERVER_KIT, now=NOW) == ""
    assert read_peer_name(GOOD) == "a"


def test_a_revoked_certificate_is_refused_and_the_next_one_of_the_party_is_not():
    old, new = (issue(AUTHORITY, "a", (), NOW, 30).certificate for _ in range(2))
    kit = replace(SERVER_KIT, revoked=frozenset([f"{old.serial_number:x}"]))
    reason = find_refusal(encode_pem(old), kit, now=NOW)
    assert "'a' is revoked" in reason
    assert f"{old.serial_number:x}" in reason
    assert find_refusal(encode_pem(new), kit, now=NOW) == ""


def test_a_party_talks_to_the_server_only():
    assert find_refusal(SERVER_KIT.certificate_pem, PARTY_KIT, now=NOW) == ""
    assert "belongs to a party, but the certificate of a server is needed" in find_refusal(GOOD, PARTY_KIT, now=NOW)
    assert "its key usage does not fit a server" in find_refusal(
        odd("glasu:server", usage=(SERVER, CLIENT)), PARTY_KIT, now=NOW
    )


def test_validity_is_checked_at_the_current_time_by_default():
    assert find_refusal(GOOD, SERVER_KIT) == ""
    assert "expired" in find_refusal(GOOD, SERVER_KIT, now=NOW + 31 * DAY)


@quick
@given(st.binary(max_size=300))
def test_no_bytes_make_the_check_fail(content):
    assert find_refusal(content, SERVER_KIT, now=NOW) != ""


@quick
@given(st.integers(min_value=0), st.integers(1, 255))
def test_a_certificate_with_one_byte_changed_is_refused(where, change):
    der = bytearray(x509.load_pem_x509_certificate(GOOD).public_bytes(Encoding.DER))
    der[where % len(der)] ^= change
    body = base64.encodebytes(bytes(der)).decode()
    text = f"-----BEGIN CERTIFICATE-----\n{body}-----END CERTIFICATE-----\n"
    assert find_refusal(text.encode(), SERVER_KIT, now=NOW) != ""


def test_kits_on_disk_recognise_each_other(kits, foreign):
    server, party, stranger = open_kit(kits / "server"), open_kit(kits / "b"), open_kit(foreign / "b")
    assert find_refusal(party.certificate_pem, server) == ""
    assert find_refusal(server.certificate_pem, party) == ""
    assert "another CA" in find_refusal(stranger.certificate_pem, server)
    assert "another CA" in find_refusal(server.certificate_pem, stranger)
