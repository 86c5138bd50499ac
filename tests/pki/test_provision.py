from __future__ import annotations

import hashlib
import os
import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from glasu.errors import ConfigError, GlasuError, TransportError
from glasu.files import hold_folder
from glasu.pki.kit import open_kit
from glasu.pki.provision import add, find_valid_predecessors, provision, remove, renew, revoke
from glasu.pki.refusal import find_refusal, read_peer_name
from support.crashes import crash_at_rename

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
def out(kits: Path, tmp_path: Path) -> Path:
    """Kits that a test may change."""
    return Path(shutil.copytree(kits, tmp_path / "kits"))


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Return mode and digest of every file and the mode of every folder."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


def test_kits_hold_these_files_and_nothing_else(kits):
    party = {"ca.pem", "certificate.pem", "key.pem", "kit.toml"}
    expected = dict.fromkeys("abc", party)
    expected |= {"server": party | {"revoked.pem"}, "ca": {"ca.pem", "ca-key.pem", "ca.toml", "revoked.pem"}}
    assert {folder.name for folder in kits.iterdir()} == expected.keys()
    for name, files in expected.items():
        assert {path.name for path in (kits / name).iterdir()} == files


def test_no_kit_holds_the_key_of_the_ca_or_of_another(kits):
    keys = {path: path.read_bytes() for path in kits.rglob("*key.pem")}
    assert len(keys) == len(set(keys.values())) == 5
    for path in kits.rglob("*.*"):
        if path.is_file() and path not in keys:
            assert b"PRIVATE" not in path.read_bytes()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_keys_are_their_owners_alone_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        provision(tmp_path, ["a"], ["localhost"])
        renew(tmp_path, ["a"])
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    keys = {mode for path, mode in found.items() if path.name.endswith("key.pem")}
    private = {mode for path, mode in found.items() if path.is_dir()}
    others = {mode for path, mode in found.items() if path.suffix in (".pem", ".toml") and "key" not in path.name}
    assert (keys, private, others) == ({0o600}, {0o700}, {0o644})


def test_a_key_is_never_readable_by_others_even_while_it_is_written(tmp_path, monkeypatch):
    seen = []

    def watch(path, mode, **keys) -> None:
        if Path(path).is_file():
            seen.append(stat.S_IMODE(Path(path).stat().st_mode))
        chmod(path, mode, **keys)

    chmod = os.chmod
    monkeypatch.setattr(os, "chmod", watch)
    before = os.umask(0)
    try:
        provision(tmp_path, ["a"], ["localhost"])
    finally:
        os.umask(before)
    assert len(seen) == 13
    assert set(seen) == {0o600}


def test_kits_last_a_year_the_ca_ten_and_both_begin_five_minutes_ago(tmp_path):
    kits = provision(tmp_path, ["a"], ["localhost"], now=NOW)
    assert [kit.expires for kit in kits] == [NOW + 365 * DAY] * 2
    for path in tmp_path.rglob("c*.pem"):
        if "key" not in path.name:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            assert certificate.not_valid_before_utc == NOW - timedelta(minutes=5)
            assert certificate.not_valid_after_utc == NOW + (3650 if path.name == "ca.pem" else 365) * DAY


@pytest.mark.parametrize("days", [0, -1, 3651])
def test_a_kit_cannot_outlive_its_ca(tmp_path, days):
    with pytest.raises(ConfigError, match=rf"--days {days}: must lie in 1..3650"):
        provision(tmp_path, ["a"], ["localhost"], days=days)
    assert contents(tmp_path) == {}


def test_shortly_before_the_ca_expires_the_days_left_are_named_and_then_a_new_ca_is_required(tmp_path):
    provision(tmp_path, ["a"], ["localhost"], now=NOW)
    with pytest.raises(ConfigError, match=r"--days 365: must lie in 1\.\.50"):
        renew(tmp_path, ["a"], now=NOW + 3600 * DAY)
    (kit,) = renew(tmp_path, ["a"], days=50, now=NOW + 3600 * DAY)
    assert kit.expires == NOW + 3650 * DAY
    with pytest.raises(TransportError, match="expired on 2036-02-27 12:00:00 UTC; make a new CA"):
        renew(tmp_path, ["a"], days=1, now=NOW + 3650 * DAY + timedelta(seconds=1))


def test_every_certificate_has_a_serial_number_of_its_own(out):
    add(out, ["d"])
    renew(out, ["a", "server"])
    serials = [x509.load_pem_x509_certificate(path.read_bytes()).serial_number for path in out.rglob("certificate.pem")]
    assert len(serials) == len(set(serials)) == 7


def test_provisioning_again_is_refused_and_changes_nothing(out):
    before = contents(out)
    with pytest.raises(ConfigError, match="already") as caught:
        provision(out, ["a", "b"], ["localhost"])
    assert "nothing was changed" in str(caught.value)
    assert contents(out) == before


@pytest.mark.parametrize("name", ["a", "server", "ca", "retired"])
def test_a_folder_or_link_that_stands_in_the_way_is_left_alone(tmp_path, name):
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=name):
        provision(tmp_path, ["a"], ["localhost"])
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_files_of_others_in_the_same_folder_do_not_matter(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    provision(tmp_path, ["a"], ["localhost"])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_names_that_need_care_make_kits_that_open(tmp_path):
    names = ["Sales EU", "München", "a.b", "localhost", "x" * 100, "100% ours", "naïve:party:a", "-"]
    kits = provision(tmp_path, names, ["localhost"])
    assert [kit.name for kit in kits] == ["server", *names]
    assert kits[0].roster == tuple(names)
    for kit in kits[1:]:
        assert find_refusal(kit.certificate_pem, kits[0]) == ""
        assert read_peer_name(kit.certificate_pem) == kit.name
    assert [kit.name for kit in renew(tmp_path, names)] == names  # the dated names fit too


def test_a_renewed_kit_has_a_new_key_and_the_old_one_is_kept_aside_unchanged(out):
    before, old = contents(out / "a"), open_kit(out / "a")
    (new,) = renew(out, ["a"])
    (kept,) = (out / "retired").iterdir()
    assert kept.name.startswith(f"a-{datetime.now(UTC):%Y}")
    assert contents(kept) == before
    assert new.key_pem != old.key_pem
    assert new.serial != old.serial
    assert new.name == "a"
    server = open_kit(out / "server")
    assert [find_refusal(kit.certificate_pem, server) for kit in (old, new)] == ["", ""]


def test_renewing_twice_in_a_second_keeps_both(out):
    for _ in range(3):
        renew(out, ["a"], now=datetime.now(UTC).replace(second=0))
    assert len(list((out / "retired").iterdir())) == 3


def test_a_kit_that_was_handed_over_and_removed_can_be_renewed(out):
    shutil.rmtree(out / "a")
    (kit,) = renew(out, ["a"])
    assert kit.name == "a"
    assert not (out / "retired").exists()


def test_a_damaged_kit_can_be_renewed_and_is_kept(out):
    (out / "server" / "certificate.pem").write_text("garbage")
    (kit,) = renew(out, ["server"])
    assert kit.roster == ("a", "b", "c")
    assert kit.hosts == ("localhost", "127.0.0.1")
    (kept,) = (out / "retired").iterdir()
    assert (kept / "certificate.pem").read_text() == "garbage"


def test_the_server_moves_to_another_host_by_renewal_and_stays_there(out):
    (kit,) = renew(out, ["server"], ["glasu.example.org", "::1"])
    assert kit.hosts == ("glasu.example.org", "::1")
    (kit,) = renew(out, ["server"])
    assert kit.hosts == ("glasu.example.org", "::1")


def test_an_added_party_comes_last_in_the_roster_and_is_served(out):
    others = {name: contents(out / name) for name in ("a", "b", "c", "ca")}
    certificate = (out / "server" / "certificate.pem").read_bytes()
    (kit,) = add(out, ["d"])
    server = open_kit(out / "server")
    assert server.roster == ("a", "b", "c", "d")
    assert find_refusal(kit.certificate_pem, server) == ""
    assert (out / "server" / "certificate.pem").read_bytes() == certificate
    assert {name: contents(out / name) for name in "abc"} == {name: others[name] for name in "abc"}


def test_a_removed_party_is_off_the_roster_and_the_others_keep_their_order(out):
    before = open_kit(out / "b")
    remove(out, ["b"])
    server = open_kit(out / "server")
    assert server.roster == ("a", "c")
    assert "not on the roster" in find_refusal(before.certificate_pem, server)
    assert find_refusal(open_kit(out / "c").certificate_pem, server) == ""
    assert not (out / "b").exists()
    assert len(list((out / "retired").glob("b-*"))) == 1


def test_what_was_added_and_removed_again_leaves_the_roster_as_it_was(out):
    before = open_kit(out / "server").roster
    add(out, ["d"])
    remove(out, ["d"])
    assert open_kit(out / "server").roster == before


def test_a_name_that_was_removed_may_be_added_again_and_its_old_kit_stays_refused(out):
    old = open_kit(out / "b")
    remove(out, ["b"])
    (new,) = add(out, ["b"])
    server = open_kit(out / "server")
    assert server.roster == ("a", "c", "b")
    assert "revoked" in find_refusal(old.certificate_pem, server)
    assert find_refusal(new.certificate_pem, server) == ""


@pytest.mark.parametrize(
    ("names", "said"),
    [(["x"], "'x'"), (["server"], "'server'"), (["a", "a"], "twice"), (["a", "b", "c"], "the roster would be empty")],
)
def test_a_removal_that_cannot_be_changes_nothing(out, names, said):
    before = contents(out)
    with pytest.raises(ConfigError, match=said):
        remove(out, names)
    assert contents(out) == before


def test_what_a_renewed_kit_replaces_is_good_unless_it_was_revoked(out):
    assert find_valid_predecessors(out, renew(out, ["a", "b"])) == ["a", "b"]
    revoke(out, ["a"])
    kits = renew(out, ["a", "b"])
    assert find_valid_predecessors(out, kits) == ["b"]
    assert find_valid_predecessors(out, kits, now=datetime.now(UTC) + 366 * DAY) == []


def test_a_revoked_party_is_refused_until_it_has_a_new_kit_and_the_others_are_served(out):
    (second,) = renew(out, ["a"])
    (first,) = (open_kit(path) for path in (out / "retired").iterdir())
    lists = revoke(out, ["a"])
    assert lists == [out / "ca" / "revoked.pem", out / "server" / "revoked.pem"]
    server = open_kit(out / "server")
    assert server.revoked == {first.serial, second.serial}
    for kit in (first, second):
        assert "revoked" in find_refusal(kit.certificate_pem, server)
    assert find_refusal(open_kit(out / "b").certificate_pem, server) == ""
    (third,) = renew(out, ["a"])
    assert find_refusal(third.certificate_pem, open_kit(out / "server")) == ""


def test_what_was_revoked_stays_revoked_in_a_renewed_server_kit_and_when_revoked_again(out):
    serial = open_kit(out / "a").serial
    dates = []
    for days in range(2):
        revoke(out, ["a"], now=datetime.now(UTC) + days * DAY)
        found = x509.load_pem_x509_crl((out / "ca" / "revoked.pem").read_bytes())
        dates += [entry.revocation_date_utc for entry in found]
    assert len(dates) == 2
    assert dates[0] == dates[1]
    (server,) = renew(out, ["server"])
    assert server.revoked == {serial}


def test_revoking_works_when_the_servers_kit_has_left_the_folder(out):
    shutil.move(out / "server", out.parent / "elsewhere")
    (path,) = revoke(out, ["a"])
    shutil.copy(path, out.parent / "elsewhere" / "revoked.pem")
    assert open_kit(out.parent / "elsewhere").revoked == {open_kit(out / "a").serial}
    with pytest.raises(ConfigError, match="this folder is missing"):
        add(out, ["d"])


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (lambda out: renew(out, ["z"]), "'z': is not known .* known are: server, a, b, c"),
        (lambda out: renew(out, ["a", "a"]), "named twice"),
        (lambda out: renew(out, ["a"], ["localhost"]), "only the certificate of the server"),
        (lambda out: renew(out, ["server"], ["no host"]), "neither a host name"),
        (lambda out: renew(out, ["a"], days=0), "--days 0"),
        (lambda out: revoke(out, ["a", "z"]), "'z': is not known"),
        (lambda out: revoke(out, ["server"]), "parties read no revocation list"),
        (lambda out: add(out, ["d", "a"]), "'a': is already on the roster"),
        (lambda out: add(out, ["A"]), "differ by more than case"),
        (lambda out: add(out, ["ca"]), "are reserved"),
        (lambda out: add(out, ["all"]), "party 'all': train.labels = .all. means all parties; use another name"),
        (lambda out: add(out, ["d", ".e"]), "the name is used in file names"),
        (lambda out: add(out, ["d"], days=9999), "--days 9999"),
    ],
)
def test_a_refused_request_changes_nothing(out, action, said):
    before = contents(out)
    with pytest.raises(GlasuError, match=said) as caught:
        action(out)
    assert len(str(caught.value).splitlines()) == 1
    assert contents(out) == before


def test_without_a_ca_there_is_nothing_to_renew(tmp_path):
    for action in (renew, revoke, add):
        with pytest.raises(ConfigError, match="holds no CA"):
            action(tmp_path / "new", ["a"])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("ca.toml", b"schema = 9\n", "ca.toml: schema=9, but this version reads 1"),
        ("ca.toml", b"garbage", "ca.toml: is not valid TOML"),
        ("ca.pem", b"garbage", "ca.pem: does not hold one certificate"),
        ("ca-key.pem", b"garbage", "ca-key.pem: does not hold an unencrypted private key"),
        ("ca-key.pem", None, "ca-key.pem: is missing"),
    ],
)
def test_a_damaged_ca_is_named_and_nothing_changes(out, name, content, said):
    path = out / "ca" / name
    path.write_bytes(content) if content else path.unlink()
    before = contents(out)
    with pytest.raises(TransportError, match=said):
        renew(out, ["a"])
    assert contents(out) == before


def test_a_serial_number_in_ca_toml_that_is_not_hexadecimal_is_named(out):
    path = out / "ca" / "ca.toml"
    path.write_text(path.read_text().replace(f'"{open_kit(out / "a").serial}"', '"xyz"'))
    with pytest.raises(TransportError, match=r"ca\.toml: issued\[1\]: .*not hexadecimal; restore it"):
        renew(out, ["a"])


def test_a_ca_key_that_others_may_read_signs_nothing(out):
    (out / "ca" / "ca-key.pem").chmod(0o644)
    with pytest.raises(TransportError, match="other users may read it"):
        renew(out, ["a"])


def test_two_commands_cannot_use_one_folder_at_the_same_time(out):
    before = contents(out)
    with hold_folder(out), pytest.raises(ConfigError, match="another command is using this folder"):
        renew(out, ["a"])
    assert contents(out) == before


@pytest.mark.parametrize("after", range(4))
def test_after_a_crash_every_kit_is_whole_or_absent_and_renewing_completes_them(tmp_path, after):
    names = ["server", "a", "b"]
    with crash_at_rename(after, of_folders=True):
        provision(tmp_path, ["a", "b"], ["localhost"])
    present = [name for name in names if (tmp_path / name).exists()]
    assert len(present) == max(0, after - 1)
    for name in present:
        assert open_kit(tmp_path / name).name == name
    assert not list(tmp_path.glob(".new-*"))
    if after == 0:
        provision(tmp_path, ["a", "b"], ["localhost"])
    else:
        renew(tmp_path, [name for name in names if name not in present])
    server = open_kit(tmp_path / "server")
    for name in ("a", "b"):
        assert find_refusal(open_kit(tmp_path / name).certificate_pem, server) == ""


@pytest.mark.parametrize("after", range(2))
def test_after_a_crash_of_a_renewal_the_old_kit_is_somewhere_and_renewing_works(out, after):
    old = open_kit(out / "a")
    with crash_at_rename(after, of_folders=True):
        renew(out, ["a"])
    kept = [open_kit(path.parent).serial for path in out.rglob("kit.toml") if path.parent.name.startswith("a")]
    assert kept == [old.serial]
    (new,) = renew(out, ["a"])
    assert find_refusal(new.certificate_pem, open_kit(out / "server")) == ""


def test_after_a_crash_of_an_addition_renewing_makes_the_kit_and_tells_the_server(out):
    with crash_at_rename(0, of_folders=True):
        add(out, ["d"])
    assert not (out / "d").exists()
    (kit,) = renew(out, ["d"])
    assert find_refusal(kit.certificate_pem, open_kit(out / "server")) == ""


def test_a_crash_between_the_register_and_the_list_is_healed_by_revoking_again(out):
    with crash_at_rename(1):  # the first writes ca.toml
        revoke(out, ["a"])
    assert open_kit(out / "server").revoked == frozenset()
    revoke(out, ["a"])
    assert open_kit(out / "server").revoked == {open_kit(out / "a").serial}
