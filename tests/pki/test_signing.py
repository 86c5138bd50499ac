"""Keys that are made at the parties: request, sign, pin. The certificates are checked with openssl."""

from __future__ import annotations

import hashlib
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding

from glasu.errors import GlasuError
from glasu.pki.fingerprint import format_fingerprint
from glasu.pki.identity import make_identity_uri
from glasu.pki.kit import CA, CERTIFICATE, KEY, MANIFEST, REQUEST, Kit, open_kit
from glasu.pki.pins import PINS, add_pins
from glasu.pki.provision import add, provision, renew, revoke
from glasu.pki.refusal import find_refusal
from glasu.pki.request import make_request, read_request
from glasu.pki.secret_file import SECRET
from glasu.pki.signing import sign_requests

NOW = datetime.now(UTC).replace(microsecond=0)
DIGITS = "0123456789abcdef01234567"


def openssl(*words: str | Path, given: bytes | None = None) -> bytes:
    done = subprocess.run(["openssl", *map(str, words)], input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def party(folder: Path, name: str) -> Path:
    """Return the folder of a party with a key and a request."""
    make_request(folder / f"{name}-kit", name)
    return folder / f"{name}-kit"


def sign(folder: Path, *requests: Path, hosts: tuple[str, ...] = (), **keys: object) -> None:
    """Sign requests in folders of parties, and give the parties what comes back."""
    paths = [request / REQUEST for request in requests]
    for signed, request in zip(sign_requests(folder / "ca", paths, hosts, **keys), requests, strict=True):  # type: ignore[arg-type]
        for path in signed.folder.iterdir():
            shutil.copy(path, request)


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    """Return a folder with a CA and the kits of the parties a and b, which made their keys themselves."""
    sign(tmp_path, party(tmp_path, "a"), party(tmp_path, "b"), hosts=("localhost",))
    return tmp_path


def assert_action_refused(action: Callable[[], object], words: str) -> None:
    """Assert that an action is refused in one line with these words."""
    with pytest.raises(GlasuError, match=words) as caught:
        action()
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


# The way of a key


def test_a_party_sends_a_request_and_keeps_its_key_and_secret(tmp_path):
    kit = party(tmp_path, "a")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in kit.iterdir()}
    assert modes == {KEY: 0o600, SECRET: 0o600, REQUEST: 0o644}
    assert stat.S_IMODE(kit.stat().st_mode) == 0o700
    shown = openssl("req", "-in", kit / REQUEST, "-noout", "-verify", "-text").decode()
    assert "verify OK" in shown
    assert "URI:glasu:party:a\n" in shown
    assert "NIST CURVE: P-256" in shown
    key = openssl("pkey", "-in", kit / KEY, "-pubout")
    assert openssl("req", "-in", kit / REQUEST, "-noout", "-pubkey") == key


def test_openssl_accepts_the_chain_the_name_and_the_key(federation):
    for name in "ab":
        kit = federation / f"{name}-kit"
        for purpose, accepted in (("sslclient", True), ("sslserver", False)):
            words = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", kit / CA, kit / CERTIFICATE]
            assert (subprocess.run(words, capture_output=True, check=False).returncode == 0) == accepted
        shown = openssl("x509", "-in", kit / CERTIFICATE, "-noout", "-ext", "subjectAltName").decode()
        assert shown.split("\n")[1].strip() == f"URI:glasu:party:{name}"
        public = openssl("x509", "-in", kit / CERTIFICATE, "-noout", "-pubkey")
        assert public == openssl("pkey", "-in", kit / KEY, "-pubout")


def test_the_ca_has_no_private_key_or_secret_of_a_party(federation):
    held = {path.relative_to(federation / "ca").as_posix() for path in (federation / "ca").rglob("*.pem")}
    assert {name for name in held if "key" in name} == {"ca/ca-key.pem", "server/key.pem"}
    assert not list((federation / "ca").rglob(SECRET))
    private = [(federation / f"{name}-kit" / KEY).read_text().split("\n")[1] for name in "ab"]
    for path in (federation / "ca").rglob("*"):
        assert not path.is_file() or not any(line in path.read_text() for line in private)


def test_signed_kits_are_complete_and_accept_each_other(federation):
    server, kits = open_kit(federation / "ca" / "server", "server"), [open_kit(federation / f"{n}-kit") for n in "ab"]
    assert server.roster == ("a", "b")
    for kit in kits:
        assert find_refusal(kit.certificate_pem, server) == ""
        assert find_refusal(server.certificate_pem, kit) == ""
        assert kit.secret is not None


def test_only_kits_whose_keys_were_made_at_the_ca_are_trial_kits(federation, tmp_path):
    signed = [open_kit(federation / name) for name in ("ca/server", "a-kit", "b-kit")]
    made = provision(tmp_path / "trial", ["a", "b"], ["localhost"])
    made += [*add(tmp_path / "trial", ["c"]), *renew(tmp_path / "trial", ["a"])]
    assert {kit.trial for kit in signed} == {False}
    assert {kit.trial for kit in made} == {True}
    assert "trial = true\n" in (tmp_path / "trial" / "a" / MANIFEST).read_text()


def test_parties_can_follow_later_and_come_last_in_the_roster(federation):
    sign(federation, party(federation, "0"))
    assert open_kit(federation / "ca" / "server").roster == ("a", "b", "0")
    assert open_kit(federation / "0-kit").name == "0"


def test_a_request_of_the_same_key_renews_the_certificate(federation):
    before = open_kit(federation / "a-kit")
    sign(federation, federation / "a-kit", now=NOW + timedelta(days=300))
    after = open_kit(federation / "a-kit", now=NOW + timedelta(days=300))
    assert after.expires == NOW + timedelta(days=665)
    assert before.expires < NOW + timedelta(days=366)
    assert (after.key_pem, after.secret) == (before.key_pem, before.secret)
    assert after.serial != before.serial
    assert open_kit(federation / "ca" / "server").roster == ("a", "b")


def test_opening_a_kit_without_its_certificate_names_the_next_step(tmp_path):
    kit = party(tmp_path, "a")
    assert_action_refused(lambda: open_kit(kit), rf"waits for its certificate; send {REQUEST} to the CA")


def test_a_folder_with_content_is_not_overwritten(tmp_path):
    kit = party(tmp_path, "a")
    before = {path: path.read_bytes() for path in kit.iterdir()}
    assert_action_refused(lambda: make_request(kit, "a"), "is not empty .*; nothing was changed")
    assert {path: path.read_bytes() for path in kit.iterdir()} == before


# Refused requests


def write_request(path: Path, *names: str, key: object = None, algorithm: object = None) -> Path:
    """Write a request with these URIs or, without a colon, DNS names."""
    made = x509.CertificateSigningRequestBuilder(x509.Name([]))
    if names:
        listed = [x509.UniformResourceIdentifier(name) if ":" in name else x509.DNSName(name) for name in names]
        made = made.add_extension(x509.SubjectAlternativeName(listed), critical=False)
    signed = made.sign(key or ec.generate_private_key(ec.SECP256R1()), algorithm or SHA256())  # type: ignore[arg-type]
    path.write_bytes(signed.public_bytes(Encoding.PEM))
    return path


def change_byte(path: Path, place: int) -> None:
    content = bytearray(x509.load_pem_x509_csr(path.read_bytes()).public_bytes(Encoding.DER))
    content[place] ^= 1
    path.write_bytes(openssl("req", "-inform", "DER", "-outform", "PEM", given=bytes(content)))


def test_a_request_whose_signature_is_wrong_is_refused(tmp_path):
    path = write_request(tmp_path / "r.pem", make_identity_uri("a"))
    assert read_request(path).name == "a"
    change_byte(path, -1)
    assert_action_refused(
        lambda: read_request(path), "r.pem: its signature .* is not valid, so it was modified in transit"
    )


def test_a_request_with_another_name_than_its_sender_signed_is_refused(tmp_path):
    path = write_request(tmp_path / "r.pem", make_identity_uri("a"))
    content = x509.load_pem_x509_csr(path.read_bytes()).public_bytes(Encoding.DER)
    forged = content.replace(b"glasu:party:a", b"glasu:party:b")
    assert forged != content
    path.write_bytes(openssl("req", "-inform", "DER", "-outform", "PEM", given=forged))
    assert_action_refused(lambda: read_request(path), "its signature .* is not valid")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "does not name one party"),
        (("glasu:party:a", "glasu:party:b"), "does not name one party"),
        (("glasu:party:a", "localhost"), "does not name one party"),
        (("glasu:party:%61",), "does not name one party"),
        (("https://a",), "does not name one party"),
        (("glasu:server",), "a new CA needs the request of at least one party"),
        (("glasu:party:ca",), "the names ca, server, retired are reserved"),
        (("glasu:party:..%2Fca",), "name"),
        (("glasu:party:.a",), "name"),
    ],
)
def test_a_request_for_a_wrong_name_is_refused(names, words, tmp_path):
    path = write_request(tmp_path / "r.pem", *names)
    assert_action_refused(lambda: sign_requests(tmp_path / "ca", [path], ["localhost"]), words)
    assert not (tmp_path / "ca").exists()


@pytest.mark.parametrize(
    "key",
    [
        lambda: rsa.generate_private_key(65537, 1024),
        lambda: rsa.generate_private_key(65537, 3072),
        lambda: ec.generate_private_key(ec.SECP192R1()),
        lambda: ec.generate_private_key(ec.SECP384R1()),
    ],
    ids=["RSA 1024", "RSA 3072", "P-192", "P-384"],
)
def test_a_weak_key_or_one_of_another_kind_is_refused(key, tmp_path):
    path = write_request(tmp_path / "r.pem", make_identity_uri("a"), key=key())
    assert_action_refused(lambda: read_request(path), "its key is not ECDSA on P-256")


def test_a_signature_with_another_hash_is_refused(tmp_path):
    path = write_request(tmp_path / "r.pem", make_identity_uri("a"), algorithm=SHA384())
    assert_action_refused(lambda: read_request(path), r"its signature \(ECDSA with SHA-256\) is not valid")


@pytest.mark.parametrize("content", [b"", b"hello", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n", b"\xff" * 100_000])
def test_other_content_is_refused(content, tmp_path):
    (tmp_path / "r.pem").write_bytes(content)
    assert_action_refused(lambda: read_request(tmp_path / "r.pem"), "holds no signing request in PEM form")
    assert_action_refused(lambda: read_request(tmp_path / "missing.pem"), "cannot be read")


def test_a_second_key_for_a_name_is_refused_until_the_first_is_revoked(federation):
    before = {path: path.read_bytes() for path in (federation / "ca").rglob("*.*") if path.is_file()}
    make_request(federation / "other", "a")
    words = "'a' has a certificate for another key, valid until .*; .* use --revoke a first"
    assert_action_refused(lambda: sign(federation, federation / "other"), words)
    assert {path: path.read_bytes() for path in before} == before
    revoke(federation / "ca", ["a"])
    sign(federation, federation / "other")
    server = open_kit(federation / "ca" / "server")
    assert "is revoked" in find_refusal(open_kit(federation / "a-kit").certificate_pem, server)
    assert find_refusal(open_kit(federation / "other").certificate_pem, server) == ""


def test_two_requests_for_one_name_are_refused_together(tmp_path):
    requests = [write_request(tmp_path / name, make_identity_uri("a")) for name in ("1.pem", "2.pem")]
    assert_action_refused(
        lambda: sign_requests(tmp_path / "ca", requests, ["localhost"]), "1.pem, .*2.pem: are requests for one name"
    )
    assert not (tmp_path / "ca").exists()


def test_names_that_differ_in_case_only_are_refused(federation):
    assert_action_refused(lambda: sign(federation, party(federation, "A")), "the names must differ by more than case")


def test_a_ca_either_makes_keys_or_signs_requests(federation, tmp_path):
    provision(tmp_path / "trial", ["x"], ["localhost"])
    request = party(federation, "c") / REQUEST
    assert_action_refused(lambda: sign_requests(tmp_path / "trial", [request], ()), "its CA makes trial kits")
    for action in (lambda: add(federation / "ca", ["d"]), lambda: renew(federation / "ca", ["a"])):
        assert_action_refused(action, "are made where they are used; use `glasu provision request` there")
    assert renew(federation / "ca", ["server"])[0].trial is False


def test_a_new_ca_needs_a_host_and_an_old_one_takes_none(federation, tmp_path):
    request = party(federation, "c") / REQUEST
    assert_action_refused(lambda: sign_requests(tmp_path / "new", [request], ()), "--host: name the host")
    assert_action_refused(
        lambda: sign_requests(federation / "ca", [request], ["localhost"]), "has a CA and a server already"
    )


# The key of the server


@pytest.fixture
def own_server(tmp_path: Path) -> Path:
    """Return a folder with a CA that has no private key of a role: the server made its key itself, too."""
    sign(tmp_path, party(tmp_path, "a"), party(tmp_path, "server"), party(tmp_path, "b"), hosts=("localhost",))
    return tmp_path


def test_a_server_sends_a_request_and_keeps_its_key(own_server):
    kit, ca = own_server / "server-kit", own_server / "ca"
    assert not (kit / SECRET).exists()
    assert not list((ca / "server").glob(KEY))
    opened = open_kit(kit, "server")
    assert (opened.roster, opened.hosts, opened.trial) == (("a", "b"), ("localhost",), False)
    shown = openssl("x509", "-in", kit / CERTIFICATE, "-noout", "-ext", "subjectAltName,extendedKeyUsage").decode()
    assert "URI:glasu:server, DNS:localhost" in shown
    assert "TLS Web Server Authentication" in shown
    for name in "ab":
        party_kit = open_kit(own_server / f"{name}-kit")
        assert find_refusal(party_kit.certificate_pem, opened) == ""
        assert find_refusal(opened.certificate_pem, party_kit) == ""


def test_the_same_request_renews_the_certificate_of_the_server_with_other_hosts(own_server):
    kit = own_server / "server-kit"
    before = open_kit(kit)
    sign(own_server, kit, party(own_server, "c"), hosts=("glasu.example.org",))
    renewed = open_kit(kit)
    assert renewed.key_pem == before.key_pem
    assert renewed.serial != before.serial
    assert (renewed.hosts, renewed.roster) == (("glasu.example.org",), ("a", "b", "c"))


def test_the_ca_makes_no_key_for_a_server_that_made_its_own(own_server):
    assert_action_refused(
        lambda: renew(own_server / "ca", ["server"]), "server: the keys for .* are made where they are used"
    )
    make_request(own_server / "other", "server")
    words = "'server' has a certificate for another key, valid until .*; if that key is lost, make a new CA"
    assert_action_refused(lambda: sign(own_server, own_server / "other"), words)


def test_a_server_replaces_the_key_that_the_ca_made(federation):
    before = open_kit(federation / "ca" / "server")
    sign(federation, party(federation, "server"))
    after = open_kit(federation / "server-kit", "server")
    assert after.key_pem != before.key_pem
    assert (after.roster, after.hosts) == (before.roster, before.hosts)
    assert not (federation / "ca" / "server" / KEY).exists()  # the former kit is retired


# Pins


def own_fingerprint(kit: Kit) -> str:
    public = openssl("x509", "-noout", "-pubkey", given=kit.certificate_pem)
    return hashlib.sha256(openssl("pkey", "-pubin", "-outform", "DER", given=public)).hexdigest()


def test_a_fingerprint_has_at_least_80_bits_in_groups_and_is_that_of_openssl(federation):
    kit = open_kit(federation / "a-kit")
    shown = format_fingerprint(read_request(federation / "a-kit" / REQUEST).fingerprint)
    assert re.fullmatch("([0-9a-f]{4}-){5}[0-9a-f]{4}", shown)
    assert own_fingerprint(kit).startswith(shown.replace("-", ""))


@pytest.mark.parametrize(
    "form", [str, str.upper, lambda text: text.replace("-", " "), lambda text: text.replace("-", ":")]
)
def test_a_pin_that_matches_is_accepted(form, federation):
    server = federation / "ca" / "server"
    for name in "ab":
        shown = format_fingerprint(own_fingerprint(open_kit(federation / f"{name}-kit")))
        add_pins(server, "server", {name: form(shown)})
    assert set(open_kit(server).pins) == {"a", "b"}
    for name in "ab":
        assert find_refusal(open_kit(federation / f"{name}-kit").certificate_pem, open_kit(server)) == ""


def test_a_key_that_the_ca_signed_in_place_of_the_pinned_one_is_refused(federation):
    kit, server = open_kit(federation / "a-kit"), federation / "ca" / "server"
    add_pins(server, "server", {"a": own_fingerprint(kit)})
    revoke(federation / "ca", ["a"])
    make_request(federation / "other", "a")
    sign(federation, federation / "other")
    other = open_kit(federation / "other")
    said = find_refusal(other.certificate_pem, open_kit(server))
    shown = [format_fingerprint(own_fingerprint(each)) for each in (other, kit)]
    assert said == f"the key of 'a' is {shown[0]}, but this kit pins {shown[1]}"


def test_a_party_pins_the_server_and_the_other_parties(federation):
    kit, server = federation / "a-kit", open_kit(federation / "ca" / "server")
    add_pins(kit, "a", {"server": own_fingerprint(server), "b": DIGITS})
    assert find_refusal(server.certificate_pem, open_kit(kit)) == ""
    renewed = renew(federation / "ca", ["server"])[0]
    assert "this kit pins" in find_refusal(renewed.certificate_pem, open_kit(kit))


def test_a_second_pin_must_be_that_of_the_first(federation):
    kit = federation / "a-kit"
    add_pins(kit, "a", {"b": DIGITS})
    assert add_pins(kit, "a", {"b": DIGITS[:20]}) == {"b": DIGITS}  # shorter, but the same
    assert add_pins(kit, "a", {"b": DIGITS + "89"}) == {"b": DIGITS + "89"}
    assert_action_refused(
        lambda: add_pins(kit, "a", {"b": "f" + DIGITS[1:]}), "--peers b: f123-.* is not the pinned key 0123-"
    )
    assert open_kit(kit).pins == {"b": DIGITS + "89"}


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ({"b": DIGITS[:19]}, "is not a fingerprint of 20 to 64 hexadecimal digits"),
        ({"b": "x" * 24}, "is not a fingerprint"),
        ({"b": "0" * 65}, "is not a fingerprint"),
        ({"b": ""}, "is not a fingerprint"),
        ({"a": DIGITS}, "'a' is the name in this kit"),
        ({"x/y": DIGITS}, "--peers x/y="),
    ],
)
def test_pins_that_are_too_short_or_of_wrong_names_are_refused(peers, words, federation):
    assert_action_refused(lambda: add_pins(federation / "a-kit", "a", peers), words)
    assert not (federation / "a-kit" / PINS).exists()


@pytest.mark.parametrize(
    "content", ["x", "schema = 2\n[peers]\n", "schema = 1\n[peers]\nb = 7\n", "schema = 1\n[peers]\nb = '12'\n"]
)
def test_a_damaged_file_of_pins_is_refused(content, federation):
    (federation / "a-kit" / PINS).write_text(content)
    assert_action_refused(lambda: open_kit(federation / "a-kit"), PINS)
