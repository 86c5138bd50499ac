"""Write the log of a command to standard error: text lines, or one JSON object per line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from glasu.cli.arguments import format_event
from glasu.cli.progress import LineTimer, describe_evaluation, describe_progress, print_lines
from glasu.network.options import Status
from glasu.protocol.requests import Aligning, Evaluated, Evaluating, WarmStepDone

if TYPE_CHECKING:
    from glasu.network.options import RoleEvent
    from glasu.timing import Clock

PROGRESS = "glasu.compiling"  # a logger whose warnings only report progress; --quiet suppresses them


class _Receiver(logging.Handler):
    """Receives the log of the library during a `with` block."""

    def __enter__(self) -> Self:
        """Start to receive the records of all GLASU loggers."""
        logger = logging.getLogger("glasu")
        self._level_before = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop receiving records, and restore the level of the loggers."""
        logger = logging.getLogger("glasu")
        logger.removeHandler(self)
        logger.setLevel(self._level_before)


class LineLog(_Receiver):
    """Writes the log to standard error, one line per record. If quiet, writes only warnings and errors."""

    def __init__(self, prefix: str = "", *, quiet: bool = False) -> None:
        super().__init__(logging.WARNING if quiet else logging.INFO)
        self._prefix = prefix
        if quiet:
            self.addFilter(lambda record: record.name != PROGRESS)

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a record."""
        print_lines([f"{self._prefix}{record.getMessage()}"])


class Log(_Receiver):
    """Writes the log and the events of one role during a `with` block. Several threads may write at the same time."""

    def __init__(
        self,
        args: argparse.Namespace,
        role: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Clock = time.monotonic,
    ) -> None:
        """Read the log options.

        Args:
            args: the command, --log-format and --quiet.
            role: "server", or the party's name.
            now: returns the time for JSON.
            clock: measures the time between two progress lines of one long operation.
        """
        super().__init__(logging.INFO)
        self._command, self._role, self._now = args.command, role, now
        self._as_json, self._quiet = args.log_format == "json", args.quiet
        self._write_lock, self._patience = threading.Lock(), LineTimer(clock)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record, even if quiet."""
        self.write_notice(record.getMessage())

    def write_notice(self, line: str) -> None:
        """Write a line, even if quiet."""
        self._write(line, "notice", message=line)

    def observe(self, event: RoleEvent) -> None:
        """Write the status after a round, the result of an evaluation, or the progress of a long evaluation."""
        if self._quiet:
            return
        if isinstance(event, Status):
            who = "" if self._role == "server" else f"{self._role}: "
            self._write(f"{who}{event.line()}", "round", **dataclasses.asdict(event))
        elif isinstance(event, Evaluated):
            self._patience.restart()
            found = {"split": event.split, "metrics": event.metrics, "loss": event.loss, "improved": event.improved}
            if event.ensemble:
                found["ensemble"] = True
            self._write(f"round {event.round}: {describe_evaluation(event)}", "evaluated", round=event.round, **found)
        elif isinstance(event, Evaluating) and self._patience.is_over():
            self._patience.restart()
            self._write(describe_progress(event), "evaluating", round=event.round, share=event.share)
        elif isinstance(event, WarmStepDone) and self._patience.is_over():
            self._patience.restart()
            self._write(describe_progress(event), "warm step", step=event.step, loss=event.loss)
        elif isinstance(event, Aligning) and (event.share == 1 or self._patience.is_over()):
            self._patience.restart()
            self._write(str(event), "aligning", share=event.share)

    def write_finished(self, report: Path, **fields: Any) -> None:
        """Write the event `finished` to a JSON log.

        A text log does not need it, because the command prints its result.
        """
        if self._as_json:
            found = json.loads(report.read_bytes())
            weights = {name: found[name] for name in ("weights_sha256",) if name in found}
            self._write("", "finished", report=str(report), **weights, **fields)

    def _write(self, line: str, event: str, **fields: Any) -> None:
        with self._write_lock:
            if self._as_json:
                line = format_event(self._command, event, self._now(), role=self._role, **fields)
            else:
                line = f"glasu {self._command}: {line}"
            print_lines([line])
