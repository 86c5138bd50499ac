"""Run a glasu command as a child process of a Flower process. Its output goes to Flower's log."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

CHILD = [sys.executable, "-m", "glasu.integrations.flower.child_process"]
GRACE = 20.0  # seconds for a command to exit after SIGINT; this is enough for a server to notify its parties


def print_line(line: str) -> None:
    """Write a line to Flower's log."""
    print(line, flush=True)


class ChildCommand:
    """A child process that runs a glasu command."""

    def __init__(self, words: Sequence[str], on_line: Callable[[str], None]) -> None:
        """Start the command; call `on_line` with every line of its output."""
        self._process = subprocess.Popen(
            [*CHILD, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read_lines, args=(on_line,), name="glasu-lines", daemon=True)
        self._reader.start()

    def _read_lines(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                on_line(line.rstrip())

    def poll(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait until the command has ended; read its last lines for up to GRACE seconds; return the exit code."""
        code = self._process.wait()
        self._reader.join(GRACE)
        return code

    def stop(self) -> None:
        """End the command. SIGINT is sent first, so that a server can notify its parties; checkpoints are kept."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


@contextmanager
def run_command(words: Sequence[str], on_line: Callable[[str], None]) -> Iterator[ChildCommand]:
    """Run a command during the block; stop it at the end."""
    command = ChildCommand(words, on_line)
    try:
        yield command
    finally:
        command.stop()
