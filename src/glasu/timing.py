"""A stopwatch that adds up seconds by name; the clock is an argument, so that nothing below reads the time itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

Clock = Callable[[], float]


class Stopwatch:
    """Seconds spent, by what they were spent on; an inner measurement is taken off the outer one."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.running: list[str] = []  # what is being measured, the innermost last
        self.since = 0.0  # when the innermost measurement began, or went on
        self._measurements: dict[str, Measurement] = {}

    def measure(self, name: str) -> Measurement:
        """Add the time spent in a `with` block, which must not contain a `yield`."""
        if name not in self._measurements:
            self._measurements[name] = Measurement(self, name)
        return self._measurements[name]


class Measurement:
    """A `with` block that is timed; one for each name, for it remembers nothing."""

    __slots__ = ("name", "watch")

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self.watch, self.name = watch, name

    def __enter__(self) -> None:
        watch = self.watch
        now = watch.clock()
        if watch.running:
            watch.seconds[watch.running[-1]] += now - watch.since
        watch.running.append(self.name)
        watch.since = now

    def __exit__(self, *exception: object) -> None:
        watch = self.watch
        now = watch.clock()
        watch.seconds[watch.running.pop()] += now - watch.since
        watch.since = now
