"""Limit how many log lines one party can cause: the rest are counted and reported as a number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

BURST, EVERY = 10, 6.0  # lines without a pause, and seconds after which a further one is free


class LogLimit:
    """A token bucket per subject: BURST lines, then one line every EVERY seconds. Nothing here locks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens: dict[str, float] = {}
        self._seen: dict[str, float] = {}  # when the tokens were counted last
        self._dropped: dict[str, int] = {}

    def admit(self, subject: str) -> bool:
        """Return whether a line about this subject may be written now; else count it."""
        now = self._clock()
        refilled = self._tokens.get(subject, float(BURST)) + (now - self._seen.get(subject, now)) / EVERY
        tokens, self._seen[subject] = min(float(BURST), refilled), now
        if tokens < 1.0:
            self._tokens[subject] = tokens
            self._dropped[subject] = self._dropped.get(subject, 0) + 1
            return False
        self._tokens[subject] = tokens - 1.0
        return True

    def take_dropped(self) -> Iterator[tuple[str, int]]:
        """Yield subjects whose lines were dropped, with how many, where a line may be written again."""
        for subject in list(self._dropped):
            count = self._dropped.pop(subject)
            if self.admit(subject):
                yield subject, count
            else:
                self._dropped[subject] = count


class LimitedLog:
    """A log in which one party cannot drown the lines about the others. Nothing here locks."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log, self._limit = log, LogLimit(clock)

    def write(self, line: str, about: str = "") -> bool:
        """Write a line and return True, or count it where the party `about` has caused too many."""
        if about and not self._limit.admit(about):
            return False
        self._log.info("%s", line)
        return True

    def write_counts(self) -> None:
        """Write how many lines were left out, where lines may be written again."""
        for subject, count in self._limit.take_dropped():
            self._log.info("%s: and %s more lines.", subject, f"{count:,}")
