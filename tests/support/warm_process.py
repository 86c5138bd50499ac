"""Start commands and programs in forks of a process that has loaded torch and numba, which takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["support.warm_imports"])


class WarmProcess:
    """A `glasu` command or a script in another process; offers the methods of subprocess.Popen that tests use."""

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        out: Path | None = None,
        *,
        script: Path | None = None,
        path: Sequence[Path] = (),
    ) -> None:
        """Start a command.

        Args:
            words: the arguments of the command.
            log: standard error is appended to this file.
            out: standard output is appended to this file; None: to `log`.
            script: a file with a function `main` to call with the arguments; None: the `glasu` command.
            path: folders of modules, before those of this process.
        """
        self._process = _start(_run_command, words, out or log, log, script, [*map(str, path)])

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


def run_program(program: str, folder: Path, path: Sequence[Path] = (), arguments: Sequence[str] = ()) -> str:
    """Run a Python program in a fork and return what it prints; `folder` takes its output, `path` its modules."""
    out, log = folder / "program.out", folder / "program.log"
    out.write_text("")  # of an earlier program
    process = _start(_run_program, program, out, log, [*map(str, path)], arguments)
    process.join(240)
    assert process.exitcode == 0, log.read_text()
    return out.read_text()


def _start(target: Callable[..., None], work: Any, out: Path, log: Path, *more: Any) -> BaseProcess:
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # for the modules to preload
        ensure_running()
    process = _CONTEXT.Process(target=target, args=(work, out, log, dict(os.environ), *more), daemon=True)
    process.start()
    return process


def _run_command(
    words: Sequence[str], out: Path, log: Path, environment: dict[str, str], script: Path | None, path: Sequence[str]
) -> None:
    _redirect(out, log, environment)
    sys.path[:0] = path
    if script is not None:
        sys.exit(runpy.run_path(str(script))["main"](words))
    from glasu.cli.main import main  # after the environment is set: it may name a cache or an option of grpc

    sys.exit(main(words))


def _run_program(
    program: str, out: Path, log: Path, environment: dict[str, str], path: Sequence[str], arguments: Sequence[str]
) -> None:
    _redirect(out, log, environment)
    sys.path[:0] = path
    sys.argv[1:] = arguments
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})


def _redirect(out: Path, log: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in ((1, out), (2, log)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
