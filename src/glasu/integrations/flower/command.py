"""Run one glasu command as a child of a Flower process: its lines go to Flower's log, and it does not outlive it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

TIED = [sys.executable, "-m", "glasu.integrations.flower.child_process"]
GRACE = 20.0  # seconds that a command has to end by itself; more than a server takes to hang up


class Command:
    """A command that runs, or has ended with a code."""

    def __init__(self, words: Sequence[str], tell: Callable[[str], None]) -> None:
        """Start it; every line that it writes is told."""
        self._process = subprocess.Popen(
            [*TIED, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._pass_on, args=(tell,), name="glasu-lines", daemon=True)
        self._reader.start()

    def _pass_on(self, tell: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                tell(line.rstrip())

    def code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the end, and for the last line to be told."""
        code = self._process.wait()
        self._reader.join(GRACE)
        return code

    def stop(self) -> None:
        """End it, gently first, so that a server can tell its parties; up to the last checkpoint all is kept."""
        if self.code() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


@contextmanager
def running(words: Sequence[str], tell: Callable[[str], None]) -> Iterator[Command]:
    """Run a command while the block lasts."""
    command = Command(words, tell)
    try:
        yield command
    finally:
        command.stop()
