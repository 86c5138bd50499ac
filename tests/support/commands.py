"""Commands run through their entry point in this process, and a fake command."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from glasu.cli.main import COMMANDS, Command, main
from support.small import SMALL

GLASU = [sys.executable, "-m", "glasu.cli.main"]
SMALL_RUN = (
    SMALL
    + """\
aggregation_layers = [0, 1]
[train]
num_rounds = 4
evaluate_every = 2
"""
)


@dataclass(frozen=True)
class Fake:
    """A fake command: the arguments of another command with a function of the test."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    EXAMPLE: str = ""


def replace_run(name: str, run: Callable[[argparse.Namespace], int | None]) -> dict[str, Command]:
    """Return all commands; the one named does `run` instead of its work."""
    return {**COMMANDS, name: Fake(COMMANDS[name].add_arguments, run)}


def glasu(*words: str | Path, commands: Mapping[str, Command] = COMMANDS) -> subprocess.CompletedProcess[str]:
    """Run a command through its entry point, in this process: loading torch anew each time would take minutes."""
    out, errors, before = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    arguments = [str(word) for word in words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(arguments, commands)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    signal.signal(signal.SIGTERM, before)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def start_in_group(*words: str | Path) -> subprocess.Popen[str]:
    """Start a command in a process group of its own; its standard error is a pipe."""
    command = [*GLASU, *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def assert_group_ends(process: subprocess.Popen[str], sent: signal.Signals, code: int) -> None:
    """Send a signal as a terminal or an operator does. The command must end with this code and leave no process."""
    try:
        if sent == signal.SIGINT:  # a terminal sends it to all processes
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        _, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == code, errors
    assert "Traceback" not in errors, errors
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):  # no process is left
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        raise AssertionError("a process is left")


def assert_refused(result: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    """One line on standard error, exit code 2 (1: the run failed), nothing else."""
    assert result.returncode == code, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in lines[0]
