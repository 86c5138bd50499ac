"""The log of a role of a network run on standard error: lines for people, or one JSON object per line for programs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from glasu.cli.arguments import record
from glasu.cli.progress import Patience, describe, say, so_far
from glasu.network.status import Status
from glasu.protocol.requests import Evaluated, Evaluating

if TYPE_CHECKING:
    from glasu.network.options import RoleEvent
    from glasu.timing import Clock


@contextmanager
def show_log(prefix: str = "", *, quiet: bool = False) -> Iterator[None]:
    """Write the library's log to standard error while the block lasts; if quiet, warnings and errors only."""
    handler = _LineHandler(prefix)
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    logger = logging.getLogger("glasu")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _LineHandler(logging.Handler):
    """Prints the message of a record as one line."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        say([f"{self._prefix}{record.getMessage()}"])


class Log(logging.Handler):
    """Writes the log and the events of one role while its block lasts. Threads may write at once."""

    def __init__(
        self,
        args: argparse.Namespace,
        role: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Clock = time.monotonic,
    ) -> None:
        """Prepare to write as the arguments ask.

        Args:
            args: the command, --log-format and --quiet.
            role: "server", or the party's name.
            now: returns the time for JSON.
            clock: measures the time between two lines about one long evaluation.
        """
        super().__init__(logging.INFO)
        self._command, self._role, self._now = args.command, role, now
        self._as_json, self._quiet = args.log_format == "json", args.quiet
        self._write_lock, self._patience = threading.Lock(), Patience(clock)

    def __enter__(self) -> Log:
        """Receive the records of all loggers of GLASU."""
        logger = logging.getLogger("glasu")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        logging.getLogger("glasu").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record of a logger; also when quiet."""
        self.notice(record.getMessage())

    def notice(self, line: str) -> None:
        """Write a line; also when quiet."""
        self._write(line, "notice", message=line)

    def observe(self, event: RoleEvent) -> None:
        """Write the status after a round, the result of an evaluation, and the progress of a long one."""
        if self._quiet:
            return
        if isinstance(event, Status):
            who = "" if self._role == "server" else f"{self._role}: "
            self._write(f"{who}{event.line()}", "round", **dataclasses.asdict(event))
        elif isinstance(event, Evaluated):
            self._patience.begin()
            found = {"split": event.split, "metrics": event.metrics, "loss": event.loss, "improved": event.improved}
            self._write(f"round {event.round}: {describe(event)}", "evaluated", round=event.round, **found)
        elif isinstance(event, Evaluating) and self._patience.is_over():
            self._patience.begin()
            self._write(so_far(event), "evaluating", round=event.round, share=event.share)

    def finished(self, report: Path, **fields: Any) -> None:
        """Write for programs that the role has finished. People read the result on standard output."""
        if self._as_json:
            found = json.loads(report.read_bytes())
            weights = {name: found[name] for name in ("weights_sha256",) if name in found}
            self._write("", "finished", report=str(report), **weights, **fields)

    def _write(self, line: str, event: str, **fields: Any) -> None:
        with self._write_lock:
            if self._as_json:
                sys.stderr.write(record(self._command, event, self._now(), role=self._role, **fields) + "\n")
                sys.stderr.flush()
            else:
                say([f"glasu {self._command}: {line}"])
