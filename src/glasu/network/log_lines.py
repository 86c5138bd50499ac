"""Log lines about peers: printable text of limited length, and a limited number of lines about one party."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

MAX_REASON = 1200  # greatest length of a reason
MAX_LINES = 50  # of a table
BURST, EVERY = 10, 6.0  # lines without a pause, and seconds after which a further one is free


def printable(text: object, most: int = 300) -> str:
    """Return text of a peer without control characters, cut to `most` characters."""
    shown = str(text)
    cut = shown if len(shown) <= most else f"{shown[: most - 3]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


@dataclass
class _Bucket:
    """How many lines about one party may be written now, and how many were left out."""

    counted: float  # when the tokens were counted last
    tokens: float = BURST
    dropped: int = 0


class LimitedLog:
    """A log in which one party cannot drown the lines about the others. Nothing here locks."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log, self._clock = log, clock
        self._buckets: dict[str, _Bucket] = {}  # by party

    def write(self, line: str, about: str = "") -> bool:
        """Write a line and return True, or count it where the party `about` has caused too many."""
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
