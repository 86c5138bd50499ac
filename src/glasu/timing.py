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
        self.inner = [0.0]

    def measure(self, name: str) -> Measurement:
        """Add the time spent in a `with` block, which must not contain a `yield`."""
        return Measurement(self, name)


class Measurement:
    """One `with` block that is being timed."""

    __slots__ = ("name", "start", "watch")

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self.watch, self.name = watch, name

    def __enter__(self) -> None:
        self.watch.inner.append(0.0)
        self.start = self.watch.clock()

    def __exit__(self, *exception: object) -> None:
        watch = self.watch
        elapsed = watch.clock() - self.start
        watch.seconds[self.name] += elapsed - watch.inner.pop()
        watch.inner[-1] += elapsed
