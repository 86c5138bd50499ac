"""`glasu provision` as a user types it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from glasu.cli.main import build_parser
from glasu.pki.kit import open_kit
from glasu.pki.refusal import find_refusal
from support.commands import GLASU, assert_refused, glasu


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    result = glasu("provision", "--parties", "a,b,c", "--host", "localhost", "--out", tmp_path / "kits")
    assert result.returncode == 0, result.stderr
    return tmp_path / "kits"


def test_provision_says_what_it_made_for_whom_and_when_it_expires(tmp_path):
    result = glasu(
        "provision", "--parties", "a, b", "--host", "localhost,127.0.0.1", "--host", "::1", "--out", tmp_path
    )
    assert result.returncode == 0
    assert result.stderr == ""
    day = f"{datetime.now(UTC) + timedelta(days=365):%Y-%m-%d}"
    server, first, second, authority, mark = result.stdout.splitlines()
    expiry = {
        name: f"expires {day}, fingerprint {open_kit(tmp_path / name).fingerprint}" for name in ("server", "a", "b")
    }
    assert server == f"{tmp_path / 'server'}: kit of the server at localhost, 127.0.0.1, ::1, {expiry['server']}"
    assert first == f"{tmp_path / 'a'}: kit of party a, {expiry['a']}"
    assert second == f"{tmp_path / 'b'}: kit of party b, {expiry['b']}"
    assert authority.startswith(f"{tmp_path / 'ca'}: the CA")
    assert mark.startswith("These are trial kits: ")


def test_days_set_the_expiry(tmp_path):
    words = ("--parties", "a", "--host", "localhost", "--days", "7", "--out", tmp_path)
    assert glasu("provision", *words).returncode == 0
    left = open_kit(tmp_path / "a").expires - datetime.now(UTC)
    assert timedelta(days=6) < left <= timedelta(days=7)


def test_the_installed_command_makes_private_keys_under_an_open_umask(tmp_path):
    words = [*GLASU, "provision", "--parties", "a", "--host", "localhost", "--out", str(tmp_path / "kits")]
    result = subprocess.run(words, umask=0, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kits").rglob("*key.pem")}
    assert modes == {0o600}


def test_the_command_again_says_what_exists_and_changes_nothing(kits):
    before = {path: path.read_bytes() for path in kits.rglob("*.*") if path.is_file()}
    assert_refused(
        glasu("provision", "--parties", "a,b,c", "--host", "localhost", "--out", kits),
        "already has kits (ca, server, a, b, c)",
        "nothing was changed",
        "--renew",
    )
    assert {path: path.read_bytes() for path in kits.rglob("*.*") if path.is_file()} == before


def test_add_renew_and_revoke_from_the_command_line(kits):
    result = glasu("provision", "--add", "d,e", "--out", kits)
    assert result.returncode == 0, result.stderr
    assert "kit.toml: lists the new parties" in result.stdout
    assert "A run that started without d, e cannot resume" in result.stdout
    assert "--remove d,e" in result.stdout
    stolen = open_kit(kits / "d")
    result = glasu("provision", "--revoke", "d", "--out", kits)
    assert result.returncode == 0, result.stderr
    assert str(kits / "server" / "revoked.pem") in result.stdout
    result = glasu("provision", "--renew", "d,server", "--host", "127.0.0.1", "--days", "30", "--out", kits)
    assert result.returncode == 0, result.stderr
    assert str(kits / "retired") in result.stdout
    assert "server: its certificate no longer names localhost, because --host replaces all names." in result.stdout
    assert "server: the former certificate stays valid until it expires." in result.stdout
    assert "d: no former certificate is valid any more." in result.stdout
    server = open_kit(kits / "server")
    assert server.roster == ("a", "b", "c", "d", "e")
    assert server.hosts == ("127.0.0.1",)
    assert "revoked" in find_refusal(stolen.certificate_pem, server)
    assert find_refusal(open_kit(kits / "d").certificate_pem, server) == ""


def test_a_party_is_taken_off_the_roster_from_the_command_line(kits):
    result = glasu("provision", "--remove", "b", "--out", kits)
    assert result.returncode == 0, result.stderr
    assert "b: removed from the roster" in result.stdout
    assert str(kits / "server" / "revoked.pem") in result.stdout
    assert open_kit(kits / "server").roster == ("a", "c")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--parties a,b", "--host"),
        ("--host localhost", "name an action"),
        ("--parties a --renew a --host localhost", "not allowed with"),
        ("--parties a,,b --host localhost", "the name is used in file names"),
        ("--parties a,../b --host localhost", "'../b'"),
        ("--parties a,a --host localhost", "'a' and 'a'"),
        ("--parties server --host localhost", "'server'"),
        ("--parties a --host https://x", "neither a host name nor an IP address"),
        ("--parties a --host localhost, --days 1", "--host ''"),
        ("--parties a --host localhost --days 0", "--days 0"),
        ("--parties a --host localhost --days 1000000000", "--days 1000000000"),
        ("--parties a --host localhost --days x", "--days"),
        ("--add a --host localhost", "--host localhost"),
        ("--revoke a --days 3", "--days 3"),
        ("--remove a --days 3", "--days 3"),
        ("--remove a --host localhost", "--host localhost"),
        ("--renew a", "holds no CA"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, words, said):
    assert_refused(glasu("provision", *words.split(), "--out", tmp_path / "kits"), said)
    assert not list(tmp_path.glob("kits/[!.]*"))


def test_a_name_in_broken_utf_8_is_one_line(tmp_path):
    words = [sys.executable, "-m", "glasu.cli.main", "provision", "--parties", b"\xff", "--host", "localhost"]
    result = subprocess.run(
        [*words, "--out", str(tmp_path / "kits")], capture_output=True, text=True, timeout=60, check=False
    )
    assert_refused(result, "the name is used in file names")


def test_out_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "kits"):
        assert_refused(
            glasu("provision", "--parties", "a", "--host", "localhost", "--out", out), "--out", "another folder"
        )


def test_provision_loads_neither_numpy_nor_torch(tmp_path):
    code = (
        "import sys; from glasu.cli.main import main\n"
        f"assert main(['provision', '--parties', 'a', '--host', 'localhost', '--out', {str(tmp_path)!r}]) == 0\n"
        "assert not {'torch', 'numpy', 'grpc'} & set(sys.modules)"
    )
    environment = {**os.environ, "GLASU_TRACEBACK": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


# Keys that are made at the parties


@pytest.fixture
def signed_kits(tmp_path: Path) -> Path:
    """Return a folder with a CA and the kits of two parties that made their keys themselves."""
    for name in "ab":
        assert glasu("provision", "request", "--party", name, "--out", tmp_path / name).returncode == 0
    requests = [tmp_path / name / "request.pem" for name in "ab"]
    result = glasu("provision", "sign", *requests, "--ca", tmp_path / "kits", "--host", "localhost")
    assert result.returncode == 0, result.stderr
    for name in "ab":
        for path in (tmp_path / "kits" / name).iterdir():
            shutil.copy(path, tmp_path / name)
    return tmp_path


def test_request_sign_and_pin_show_the_same_fingerprint(tmp_path):
    made = glasu("provision", "request", "--party", "a", "--out", tmp_path / "a")
    assert (made.returncode, made.stderr) == (0, "")
    (shown,) = re.findall("([0-9a-f]{4}(?:-[0-9a-f]{4}){5})", made.stdout)
    done = glasu("provision", "sign", tmp_path / "a" / "request.pem", "--ca", tmp_path / "kits", "--host", "localhost")
    assert (done.returncode, done.stderr) == (0, "")
    day = f"{datetime.now(UTC) + timedelta(days=365):%Y-%m-%d}"
    first = done.stdout.splitlines()[0]
    assert first == f"{tmp_path / 'kits' / 'a'}: for party a, expires {day}, key {shown}; send it back."
    for path in (tmp_path / "kits" / "a").iterdir():
        shutil.copy(path, tmp_path / "a")
    assert glasu("provision", "pin", tmp_path / "a").stdout == f"a (this kit): {shown}\n"


def test_the_server_makes_its_key_itself_too(tmp_path):
    made = glasu("provision", "request", "--server", "--out", tmp_path / "server")
    assert (made.returncode, made.stderr) == (0, "")
    assert "key and request of the server" in made.stdout
    assert {path.name for path in (tmp_path / "server").iterdir()} == {"key.pem", "request.pem"}
    (shown,) = re.findall("([0-9a-f]{4}(?:-[0-9a-f]{4}){5})", made.stdout)
    assert glasu("provision", "request", "--party", "a", "--out", tmp_path / "a").returncode == 0
    requests = [tmp_path / name / "request.pem" for name in ("server", "a")]
    done = glasu("provision", "sign", *requests, "--ca", tmp_path / "kits", "--host", "localhost")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"for the server, expires {datetime.now(UTC) + timedelta(days=365):%Y-%m-%d}, key {shown}" in done.stdout
    assert not list((tmp_path / "kits").rglob("key.pem"))  # only ca-key.pem is here
    for path in (tmp_path / "kits" / "server").iterdir():
        shutil.copy(path, tmp_path / "server")
    assert open_kit(tmp_path / "server", "server").roster == ("a",)
    assert_refused(glasu("provision", "request", "--out", tmp_path / "x"), "--party")


def test_pin_records_peers_and_refuses_another_key(signed_kits):
    digits = "0123-4567-89ab-cdef-0123-4567"
    pinned = [f"b (pinned): {digits}", f"server (pinned): {digits}"]
    result = glasu("provision", "pin", signed_kits / "a", "--peers", f"b={digits}", f"server={digits}")
    assert result.stdout.splitlines()[1:] == pinned
    other = glasu("provision", "pin", signed_kits / "a", "--peers", "b=1123-4567-89ab-cdef-0123-4567")
    assert_refused(other, "--peers b: 1123-", "is not the pinned key 0123-")
    assert glasu("provision", "pin", signed_kits / "a").stdout.splitlines()[1:] == pinned


def test_pin_at_the_server_refuses_a_name_that_its_roster_does_not_list(kits):
    peer = "insuror=0123-4567-89ab-cdef-0123-4567"
    refused = glasu("provision", "pin", kits / "server", "--peers", peer)
    roster = ", ".join(open_kit(kits / "server").roster)
    assert_refused(refused, "--peers insuror: ", f"lists no such party; the parties are {roster}.")
    assert not (kits / "server" / "pins.toml").exists()


def test_secret_makes_a_secret_once(kits):
    first = glasu("provision", "secret", kits / "a")
    assert first.stdout == f"{kits / 'a' / 'secret.hex'}: made; back it up, and never share it.\n"
    content = (kits / "a" / "secret.hex").read_text()
    second = glasu("provision", "secret", kits / "a")
    assert second.stdout == f"{kits / 'a' / 'secret.hex'}: exists already.\n"
    assert (kits / "a" / "secret.hex").read_text() == content
    assert content.strip() not in first.stdout + second.stdout
    assert_refused(glasu("provision", "secret", kits / "server"), "is the kit of the server")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name an action: request, sign, pin, secret, or one of --parties, --add"),
        (["--parties", "a", "--host", "localhost"], "--parties: also give --out KITS"),
        (["--parties", "a", "pin", "kit"], "--parties: cannot be combined with `glasu provision pin`"),
        (["pin", "kit", "--peers", "b"], "'b' is not NAME=FINGERPRINT"),
        (["pin", "kit"], "kit: no such folder"),
        (["sign", "r.pem", "--ca", "kits"], "r.pem: cannot be read"),
        (["request", "--party", "server", "--out", "kit"], "are reserved"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(glasu("provision", *words), said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("action", ["request", "sign", "pin", "secret"])
def test_the_help_of_an_action_describes_it_and_has_a_valid_example(action):
    said = glasu("provision", action, "--help").stdout
    example = re.search(r"example: glasu (provision .*)", said)[1]
    assert build_parser().parse_args(example.split()).action == action
    assert len(said.partition("\n\n")[2].partition("positional arguments:")[0].partition("options:")[0]) > 100
