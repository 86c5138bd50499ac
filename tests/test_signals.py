"""Commands that tests start react to SIGINT, also in a background job of a shell, which ignores it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

SHOW = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_a_child_of_the_tests_can_be_interrupted():
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "True"


def test_a_child_of_the_tests_can_be_interrupted_where_their_shell_ignores_sigint():
    inner = f"{Path(__file__)}::{test_a_child_of_the_tests_can_be_interrupted.__name__}"
    words = ["-q", "-p", "no:cacheprovider", inner]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        shown = subprocess.run([sys.executable, "-m", "pytest", *words], capture_output=True, text=True, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "1 passed" in shown.stdout, shown.stdout


def test_glasu_keeps_ignoring_sigint_where_its_shell_ignores_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        program = "import signal; from glasu.cli.main import main; main(['--version'])"
        watch = f"try:\n    {program}\nexcept SystemExit:\n    print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
        shown = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, check=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert shown.stdout.splitlines()[-1] == "True"
