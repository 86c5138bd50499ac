"""Accounts: what the process that serves a run counts; a run that goes on adds to what was counted before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glasu.runtime.meter import Meter
from glasu.runtime.recorder import Recorder
from glasu.timing import Clock, Stopwatch

PARTS = ("sampling", "compute", "communication", "evaluation")
SERVER_PARTS = ("waiting", "communication")  # between organisations it does nothing else


class Accounts:
    """Traffic, seconds and evaluations of a run, over all processes that served it."""

    def __init__(self, clock: Clock, parties: Sequence[str | None], meter: Meter, parts: Sequence[str] = PARTS) -> None:
        """Begin now.

        Args:
            clock: tells the seconds.
            parties: who is evaluated; None: all together.
            meter: counts the traffic.
            parts: on what seconds are spent.
        """
        self.parts = tuple(parts)
        self.meter, self.watch, self._clock = meter, Stopwatch(clock), clock
        self.recorder = Recorder(parties, meter, self.elapsed)
        self._start, self._before = clock(), dict.fromkeys(("total", *parts), 0.0)

    def elapsed(self) -> float:
        """Return the seconds since the run began, without those in which no process served it."""
        return self._before["total"] + self._clock() - self._start

    def seconds(self, watches: Sequence[Stopwatch] = ()) -> dict[str, float]:
        """Return the seconds by what they were spent on, of the server and of these clients together."""
        spent = {
            name: self._before[name] + sum(watch.seconds[name] for watch in (self.watch, *watches))
            for name in self.parts
        }
        return {"total": self.elapsed(), **spent}

    def spent(self, watches: Sequence[Stopwatch] = ()) -> dict[str, Any]:
        """Return what was used up, whether its results are kept or not."""
        return {"traffic": self.meter.to_dict(), "seconds": self.seconds(watches)}

    def state(self, watches: Sequence[Stopwatch] = ()) -> dict[str, Any]:
        """Return everything counted so far as plain values."""
        return {**self.spent(watches), "recorder": self.recorder.state()}

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Forget the evaluations since `state`, of rounds that are done again; what they cost is not forgotten."""
        self.recorder.restore(state.get("recorder", {"evaluations": [], "losses": []}))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` or `spent` counted."""
        self.meter.restore(state["traffic"])
        self._before = dict(state["seconds"])
        if "recorder" in state:
            self.recorder.restore(state["recorder"])
