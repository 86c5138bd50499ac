"""Clocks, and a stopwatch that adds up seconds by activity. The clock is an argument, so tests can replace it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

Clock = Callable[[], float]


class PausableClock:
    """A clock that can stop. Any thread may read it; only one thread at a time may pause and resume it."""

    def __init__(self) -> None:
        # Seconds of finished pauses, and the start of the current pause. Both are in one tuple, so that other threads
        # never read one new and one old value.
        self._paused: tuple[float, float | None] = (0.0, None)

    def __call__(self) -> float:
        """Return the seconds without the pauses."""
        finished, start = self._paused
        return (time.perf_counter() if start is None else start) - finished

    def paused_seconds(self) -> float:
        """Return the seconds of all pauses."""
        finished, start = self._paused
        return finished if start is None else finished + time.perf_counter() - start

    def pause(self) -> None:
        """Stop the clock."""
        self._paused = self._paused[0], time.perf_counter()

    def resume(self) -> None:
        """Let the clock run again."""
        self._paused = self.paused_seconds(), None


class Stopwatch:
    """Adds up seconds by activity. The time of an inner measurement does not count for the outer measurement."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.running: list[str] = []  # activities being measured, innermost last
        self.since = 0.0  # time at which the innermost measurement started or resumed
        self._measurements: dict[str, Measurement] = {}

    def measure(self, name: str) -> Measurement:
        """Add the time spent in a `with` block, which must not contain a `yield`."""
        if name not in self._measurements:
            self._measurements[name] = Measurement(self, name)
        return self._measurements[name]


class Measurement:
    """A timed `with` block. It has no state, so one object per name is enough."""

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
