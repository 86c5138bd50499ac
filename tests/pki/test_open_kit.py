from __future__ import annotations

import shutil
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from glasu.errors import TransportError
from glasu.pki.kit import open_kit

DAY = timedelta(days=1)


def assert_kit_refused(folder: Path, *words: str, **keys: object) -> None:
    with pytest.raises(TransportError) as caught:
        open_kit(folder, **keys)  # type: ignore[arg-type]
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    for word in words:
        assert word in text


def test_a_party_kit_holds_what_tls_needs_and_its_name(kits):
    kit = open_kit(kits / "b", "party")
    assert (kit.role, kit.name, kit.roster, kit.hosts, kit.revoked) == ("party", "b", (), (), frozenset())
    certificate = x509.load_pem_x509_certificate(kit.certificate_pem)
    assert load_pem_private_key(kit.key_pem, None).public_key() == certificate.public_key()
    assert kit.fingerprint == certificate.fingerprint(SHA256()).hex(":").upper()
    assert kit.ca_fingerprint == open_kit(kits / "server").ca_fingerprint
    assert (kit.serial, kit.expires) == (f"{certificate.serial_number:x}", certificate.not_valid_after_utc)
    assert kit.ca_pem == (kits / "ca" / "ca.pem").read_bytes()


def test_a_server_kit_knows_the_roster_in_its_order_and_the_hosts(kits, tmp_path):
    kit = open_kit(kits / "server", "server")
    assert (kit.role, kit.name, kit.roster) == ("server", "server", ("a", "b", "c"))
    assert kit.hosts == ("localhost", "127.0.0.1")


def test_a_kit_does_not_show_its_key(kits):
    assert "PRIVATE" not in repr(open_kit(kits / "a"))


def test_a_kit_is_not_valid_before_its_clock_skew_nor_after_its_expiry(kits):
    kit = open_kit(kits / "a")
    first = x509.load_pem_x509_certificate(kit.certificate_pem).not_valid_before_utc
    second = timedelta(seconds=1)
    assert timedelta(minutes=4) < datetime.now(UTC) - first
    for moment in (first, kit.expires):
        assert open_kit(kits / "a", now=moment).name == "a"
    assert_kit_refused(kits / "a", "certificate.pem", "expired on", "renewed", now=kit.expires + second)
    assert_kit_refused(kits / "a", "not valid before", "is the clock correct?", now=first - second)


def test_after_ten_years_the_ca_is_named(kits):
    assert_kit_refused(kits / "a", "ca.pem", "expired on", now=datetime.now(UTC) + 3651 * DAY)


@pytest.mark.parametrize("name", ["ca.pem", "certificate.pem", "key.pem", "revoked.pem"])
def test_a_missing_file_is_named(copy, name):
    folder = copy("server")
    (folder / name).unlink()
    assert_kit_refused(folder, f"{name}: is missing", "again")


@pytest.mark.parametrize("name", ["ca.pem", "certificate.pem", "key.pem", "kit.toml", "revoked.pem"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END"])
def test_garbage_is_named(copy, name, content):
    folder = copy("server")
    (folder / name).write_bytes(content)
    assert_kit_refused(folder, name)


def test_a_folder_in_the_place_of_a_file_is_one_line(copy):
    folder = copy("a")
    (folder / "key.pem").unlink()
    (folder / "key.pem").mkdir()
    assert_kit_refused(folder, "key.pem", "cannot be read")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o700 | 0o010])
def test_a_key_that_others_may_use_is_refused(copy, mode):
    folder = copy("a")
    (folder / "key.pem").chmod(mode)
    assert_kit_refused(folder, "key.pem", f"mode {mode:o}", "chmod 600")


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_key_of_its_owner_alone_is_accepted(copy, mode):
    folder = copy("a")
    (folder / "key.pem").chmod(mode)
    assert open_kit(folder).name == "a"


def test_an_encrypted_key_is_refused_without_asking_for_its_password(copy):
    folder = copy("a")
    key = load_pem_private_key((folder / "key.pem").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (folder / "key.pem").write_bytes(locked)
    assert_kit_refused(folder, "key.pem", "unencrypted")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("key.pem", "does not belong to the certificate"),
        ("certificate.pem", "does not belong to the certificate"),
        ("kit.toml", "name='b', but the certificate has 'a'"),
    ],
)
def test_files_of_two_kits_do_not_mix(kits, copy, name, said):
    folder = copy("a")
    shutil.copy2(kits / "b" / name, folder / name)
    assert_kit_refused(folder, said, "mixed?")


def test_a_key_of_another_kind_is_a_mismatch_too(copy):
    folder = copy("a")
    key = ed25519.Ed25519PrivateKey.generate()
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert_kit_refused(folder, "does not belong")


def test_the_ca_of_another_federation_is_refused(foreign, copy):
    folder = copy("a")
    shutil.copy2(foreign / "a" / "ca.pem", folder / "ca.pem")
    assert_kit_refused(folder, "certificate.pem", "not signed by the CA")


def test_another_federations_revocation_list_is_refused(foreign, copy):
    folder = copy("server")
    shutil.copy2(foreign / "server" / "revoked.pem", folder / "revoked.pem")
    assert_kit_refused(folder, "revoked.pem", "not signed by the CA")


def test_a_certificate_of_a_party_is_no_ca(copy):
    folder = copy("a")
    shutil.copy2(folder / "certificate.pem", folder / "ca.pem")
    assert_kit_refused(folder, "ca.pem", "not the certificate of a CA")


def test_two_certificates_in_one_file_are_refused(copy):
    folder = copy("a")
    both = (folder / "certificate.pem").read_bytes() + (folder / "ca.pem").read_bytes()
    (folder / "certificate.pem").write_bytes(both)
    assert_kit_refused(folder, "certificate.pem", "one certificate")


@pytest.mark.parametrize(
    ("name", "role", "needed"),
    [
        ("server", "party", "the kit of a party is needed here, for example kits/<party>"),
        ("a", "server", "the kit of the server is needed here, for example kits/server"),
    ],
)
def test_a_kit_is_not_opened_for_the_other_role(kits, name, role, needed):
    assert_kit_refused(kits / name, "is the kit of", needed, role=role)


def test_a_party_cannot_be_made_a_server_by_editing_its_kit_toml(kits, copy):
    folder = copy("a")
    text = (folder / "kit.toml").read_text().replace('role = "party"', 'role = "server"')
    (folder / "kit.toml").write_text(text)
    assert_kit_refused(folder, "role='server', but the certificate has 'party'")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("expires", "2030-01-01T00:00:00Z", "expires='2030-01-01 00:00:00+00:00', but the certificate has"),
        ("serial", '"1f"', "serial='1f'"),
        ("fingerprint", '"AB:CD"', "fingerprint='AB:CD'"),
        ("ca_fingerprint", '"AB:CD"', "ca_fingerprint='AB:CD'"),
        ("hosts", '["example.org"]', "hosts=['example.org'], but the certificate has ['localhost', '127.0.0.1']"),
    ],
)
def test_all_that_kit_toml_says_is_checked_against_the_certificate(copy, key, value, said):
    folder = copy("server")
    text = (folder / "kit.toml").read_text()
    changed = tomllib.loads(text) | tomllib.loads(f"{key} = {value}")
    (folder / "kit.toml").write_text(tomli_w.dumps(changed))
    assert_kit_refused(folder, "kit.toml", said, "was it edited")


@pytest.mark.parametrize(
    ("key", "value"), [("expires", "2030-01-01"), ("expires", '"never"'), ("fingerprint", "7"), ("other", "1")]
)
def test_a_value_of_another_type_and_an_unknown_key_in_kit_toml_are_refused(copy, key, value):
    folder = copy("server")
    changed = tomllib.loads((folder / "kit.toml").read_text()) | tomllib.loads(f"{key} = {value}")
    (folder / "kit.toml").write_text(tomli_w.dumps(changed))
    assert_kit_refused(folder, "kit.toml", key, "restore it")


def test_fingerprints_count_the_same_without_colons_and_in_small_letters(copy):
    folder = copy("a")
    said = tomllib.loads((folder / "kit.toml").read_text())
    assert said["fingerprint"] == open_kit(folder).fingerprint
    for key in ("fingerprint", "ca_fingerprint"):
        said[key] = said[key].replace(":", "").lower()
    (folder / "kit.toml").write_text(tomli_w.dumps(said))
    assert open_kit(folder).name == "a"


@pytest.mark.parametrize(
    ("roster", "said"),
    [
        ("[]", "at least one"),
        ('"abc"', "roster='abc': must be a list"),
        ("[1, 2]", "roster[0]=1: must be a string"),
        ('["a", "../b"]', "the name is used in file names"),
        ('["a", "a"]', "must differ"),
    ],
)
def test_a_roster_edited_by_hand_is_checked(copy, roster, said):
    folder = copy("server")
    text = (folder / "kit.toml").read_text()
    (folder / "kit.toml").write_text(text[: text.index("roster")] + f"roster = {roster}\n")
    assert_kit_refused(folder, "kit.toml", said)


def test_a_kit_of_another_schema_is_refused(copy):
    folder = copy("a")
    (folder / "kit.toml").write_text((folder / "kit.toml").read_text().replace("schema = 2", "schema = 1"))
    assert_kit_refused(folder, "kit.toml", "schema=1", "reads 2")


def test_what_is_no_kit_is_refused_with_a_hint(kits, tmp_path):
    assert_kit_refused(tmp_path / "nowhere", "no such folder")
    assert_kit_refused(tmp_path, "is not a kit")
    assert_kit_refused(kits / "ca", "is not a kit")
    assert_kit_refused(kits, "holds several kits", "server")
