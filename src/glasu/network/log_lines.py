"""Log lines about peers. Their text is printable, and their length and their number per party are limited."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

MAX_REASON = 1200  # maximum length of a reason, in characters
MAX_LINES = 50  # maximum number of lines of a table
BURST, EVERY = 10, 6.0  # number of lines that may be written at once; then one line per EVERY seconds


def make_printable(text: object, most: int = 300) -> str:
    """Return text from a peer without control characters, cut to `most` characters."""
    shown = str(text)
    cut = shown if len(shown) <= most else f"{shown[: most - 3]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


@dataclass
class _Bucket:
    """A token bucket for the lines about one party."""

    counted: float  # time of the last refill
    tokens: float = BURST  # number of lines that may be written now
    dropped: int = 0


class LimitedLog:
    """A log that limits the number of lines about each party. It has no lock, so its callers must hold one."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log, self._clock = log, clock
        self._buckets: dict[str, _Bucket] = {}  # by party

    def write(self, line: str, about: str = "") -> bool:
        """Write a line and return True. If the party `about` has caused too many lines, only count the line."""
        if about:
            bucket = self._refill(about)
            if bucket.tokens < 1.0:
                bucket.dropped += 1
                return False
            bucket.tokens -= 1.0
        self._log.info("%s", line)
        return True

    def write_counts(self) -> None:
        """For every party that may log again, write how many lines were dropped."""
        for about, bucket in self._buckets.items():
            if bucket.dropped and self._refill(about).tokens >= 1.0:
                self.write(f"{about}: and {bucket.dropped:,} more lines.", about)
                bucket.dropped = 0

    def _refill(self, about: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault(about, _Bucket(now))
        bucket.tokens = min(float(BURST), bucket.tokens + (now - bucket.counted) / EVERY)
        bucket.counted = now
        return bucket
