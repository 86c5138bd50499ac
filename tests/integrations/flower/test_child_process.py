"""A command that a Flower process starts ends with it, and does not share its gRPC."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from glasu.integrations.flower.command import CHILD, run_command
from glasu.pki.provision import provision

SETTINGS = '[data]\nname = "synthetic"\n'
STARTER = """
import subprocess, sys
command = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stderr=open("lines", "w"))
print(command.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def serve(tmp_path: Path) -> list[str]:
    """Return the command of a server that waits for a party in vain."""
    provision(tmp_path / "kits", ["a"], ["localhost"])
    (tmp_path / "run.toml").write_text(SETTINGS)
    words = ["serve", str(tmp_path / "run.toml"), "--listen", "127.0.0.1:0"]
    return [*words, "--kit", str(tmp_path / "kits" / "server"), "--out", str(tmp_path / "out")]


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_command_ends_when_its_parent_is_killed(serve, tmp_path):
    lines = tmp_path / "lines"
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER, *CHILD, *serve], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        until((tmp_path / "out" / "serving.json").exists)
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: "Flower ended this run" in lines.read_text())


def test_a_command_is_stopped_when_the_block_ends_and_its_output_is_passed_on(serve, tmp_path):
    lines: list[str] = []
    with run_command(serve, lines.append) as serving:
        until((tmp_path / "out" / "serving.json").exists)
        assert serving.poll() is None
    assert serving.poll() == 2
    assert "Flower ended this run" in lines[-1]


def test_a_command_that_fails_says_its_exit_code():
    lines: list[str] = []
    with run_command(["serve"], lines.append) as serving:
        assert serving.wait() == 2
    assert "the following arguments are required" in lines[-1]


def test_nothing_of_flower_or_grpc_is_loaded_before_the_command():
    code = "import sys, glasu.integrations.flower.child_process; print(sorted({'flwr', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
