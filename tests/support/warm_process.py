"""Start commands in forks of a process that has loaded torch and numba; loading them takes seconds each time."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
# Not grpc: it starts threads, and a fork does not copy them.
_CONTEXT.set_forkserver_preload(
    ["glasu.runtime.simulation", "glasu.model.kernels.loops", "torch.fx.experimental.symbolic_shapes"]
)


class WarmProcess:
    """A `glasu` command in another process; offers the methods of subprocess.Popen that tests use."""

    def __init__(self, words: Sequence[str], log: Path, out: Path | None = None) -> None:
        """Start a command.

        Args:
            words: the arguments of the command.
            log: standard error is appended to this file.
            out: standard output is appended to this file; None: to `log`.
        """
        self._process = _CONTEXT.Process(target=_run, args=(words, out or log, log, dict(os.environ)), daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("glasu", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(words: Sequence[str], out: Path, log: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in ((1, out), (2, log)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    from glasu.cli.main import main  # after the environment is set: it may name a cache or an option of grpc

    sys.exit(main(words))
