"""What a role of a network run writes to standard error: lines for people, or one JSON object per line for programs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glasu.cli.arguments import record
from glasu.cli.progress import Patience, describe, say, so_far
from glasu.protocol.requests import Evaluated, Evaluating, Event

if TYPE_CHECKING:
    from glasu.network.status import Status


class Log:
    """One role's log; threads may write to it at once."""

    def __init__(
        self,
        args: argparse.Namespace,
        role: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Log as the arguments ask.

        Args:
            args: the command, --log-format and --quiet.
            role: "server", or the party's name.
            now: tells the time for JSON.
        """
        self._command, self._role, self._now = args.command, role, now
        self._as_json, self._quiet = args.log_format == "json", args.quiet
        self._lock, self._patience = threading.Lock(), Patience(time.monotonic)

    def tell(self, line: str) -> None:
        """Write a notice; also when quiet."""
        self._write(line, "notice", message=line)

    def status(self, status: Status) -> None:
        """Write the status line of a round."""
        if not self._quiet:
            who = "" if self._role == "server" else f"{self._role}: "
            self._write(f"{who}{status.line()}", "round", **dataclasses.asdict(status))

    def observe(self, event: Event) -> None:
        """Write what an evaluation found, and how far a long one is; rounds have a status line."""
        if self._quiet:
            return
        if isinstance(event, Evaluated):
            self._patience.begin()
            found = {"split": event.split, "metrics": event.metrics, "loss": event.loss, "improved": event.improved}
            self._write(f"round {event.round}: {describe(event)}", "evaluated", round=event.round, **found)
        elif isinstance(event, Evaluating) and self._patience.is_over():
            self._patience.begin()
            self._write(so_far(event), "evaluating", round=event.round, share=event.share)

    def finished(self, report: Path, **fields: Any) -> None:
        """Write for programs that all is done, and where it stands; people read that on standard output."""
        if self._as_json:
            found = json.loads(report.read_bytes())
            weights = {name: found[name] for name in ("weights_sha256",) if name in found}
            self._write("", "finished", report=str(report), **weights, **fields)

    def _write(self, line: str, event: str, **fields: Any) -> None:
        with self._lock:
            if self._as_json:
                sys.stderr.write(record(self._command, event, self._now(), role=self._role, **fields) + "\n")
                sys.stderr.flush()
            else:
                say([f"glasu {self._command}: {line}"])
