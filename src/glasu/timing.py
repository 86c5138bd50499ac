"""A stopwatch that adds up seconds by name; the clock is an argument, so that nothing below reads the time itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Clock = Callable[[], float]


class Stopwatch:
    """Seconds spent, by what they were spent on; an inner measurement is taken off the outer one."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time spent in the `with` block; the block must not contain a `yield`."""
        self._inner.append(0.0)
        start = self.clock()
        try:
            yield
        finally:
            elapsed = self.clock() - start
            self.seconds[name] += elapsed - self._inner.pop()
            self._inner[-1] += elapsed
