"""`glasu provision` as a user types it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from glasu.pki.kit import open_kit
from glasu.pki.refusal import find_refusal
from support.commands import GLASU, glasu, refused


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
    server, first, second, authority = result.stdout.splitlines()
    expiry = {
        name: f"expires {day}, fingerprint {open_kit(tmp_path / name).fingerprint}" for name in ("server", "a", "b")
    }
    assert server == f"{tmp_path / 'server'}: kit of the server at localhost, 127.0.0.1, ::1, {expiry['server']}"
    assert first == f"{tmp_path / 'a'}: kit of party a, {expiry['a']}"
    assert second == f"{tmp_path / 'b'}: kit of party b, {expiry['b']}"
    assert authority.startswith(f"{tmp_path / 'ca'}: the CA")


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
    refused(
        glasu("provision", "--parties", "a,b,c", "--host", "localhost", "--out", kits),
        "already (ca, server, a, b, c)",
        "nothing was changed",
        "--renew",
    )
    assert {path: path.read_bytes() for path in kits.rglob("*.*") if path.is_file()} == before


def test_add_renew_and_revoke_from_the_command_line(kits):
    result = glasu("provision", "--add", "d,e", "--out", kits)
    assert result.returncode == 0, result.stderr
    assert "kit.toml: lists them now" in result.stdout
    assert "A run that started without d, e cannot resume" in result.stdout
    assert "--remove d,e" in result.stdout
    stolen = open_kit(kits / "d")
    result = glasu("provision", "--revoke", "d", "--out", kits)
    assert result.returncode == 0, result.stderr
    assert str(kits / "server" / "revoked.pem") in result.stdout
    result = glasu("provision", "--renew", "d,server", "--host", "127.0.0.1", "--days", "30", "--out", kits)
    assert result.returncode == 0, result.stderr
    assert str(kits / "retired") in result.stdout
    assert "server: no longer names localhost, for --host replaces all names." in result.stdout
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
        ("--host localhost", "required"),
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
    refused(glasu("provision", *words.split(), "--out", tmp_path / "kits"), said)
    assert not list(tmp_path.glob("kits/[!.]*"))


def test_a_name_in_broken_utf_8_is_one_line(tmp_path):
    words = [sys.executable, "-m", "glasu.cli.main", "provision", "--parties", b"\xff", "--host", "localhost"]
    result = subprocess.run(
        [*words, "--out", str(tmp_path / "kits")], capture_output=True, text=True, timeout=60, check=False
    )
    refused(result, "the name is used in file names")


def test_out_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "kits"):
        refused(glasu("provision", "--parties", "a", "--host", "localhost", "--out", out), "--out", "another folder")


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
