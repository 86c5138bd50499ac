"""Recorder: what the evaluations of a run found, with the bytes and seconds spent until then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glasu.protocol.requests import Evaluated, Event, RoundDone
from glasu.report import SplitScores
from glasu.runtime.meter import Meter


class Recorder:
    """Gathers what the evaluations found, with the bytes and seconds spent until then."""

    def __init__(self, parties: Sequence[str | None], meter: Meter, elapsed: Callable[[], float]) -> None:
        """Expect evaluations of each of the parties, or of None: of all together."""
        self.meter, self.elapsed = meter, elapsed
        self.evaluations: dict[str | None, list[tuple[Evaluated, int, int, float]]] = {party: [] for party in parties}
        self.losses: dict[str | None, list[float]] = {party: [] for party in parties}

    def __call__(self, event: Event) -> None:
        """Note an event; clients that train alone may report from threads of their own."""
        if isinstance(event, Evaluated):
            spent = (self.meter.total, self.meter.exchanges, self.elapsed())
            self.evaluations[event.party].append((event, *spent))
        elif isinstance(event, RoundDone) and event.loss is not None:
            self.losses[event.party].append(event.loss)

    def state(self) -> dict[str, Any]:
        """Return everything noted so far as plain values."""
        return {
            "evaluations": [
                [party, dataclasses.asdict(event), moved, exchanges, seconds]
                for party, events in self.evaluations.items()
                for event, moved, exchanges, seconds in events
            ],
            "losses": [[party, losses] for party, losses in self.losses.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` noted; whatever was noted since is forgotten."""
        for events in self.evaluations.values():
            events.clear()
        for party, event, moved, exchanges, seconds in state["evaluations"]:
            self.evaluations[party].append((Evaluated(**event), moved, exchanges, seconds))
        for party, losses in state["losses"]:
            self.losses[party] = list(losses)

    def mean_losses(self) -> tuple[float, ...]:
        """Return the mean loss of every round, over the clients that trained in it."""
        rounds = range(max(len(losses) for losses in self.losses.values()))
        found = [[losses[index] for losses in self.losses.values() if index < len(losses)] for index in rounds]
        return tuple(sum(losses) / len(losses) for losses in found)

    def scores(self, split: str, *, alone: bool) -> SplitScores:
        """Return the scores of the selected model; the mean where every client was selected alone."""
        found = []
        for events in self.evaluations.values():
            chosen = [event for event, *_ in events if event.split == split and (split == "test" or event.improved)]
            found.append(chosen[-1])
        mean = {name: sum(event.metrics[name] for event in found) / len(found) for name in found[0].metrics}
        rounds = {event.round for event in found}
        return SplitScores(
            **mean,
            round=rounds.pop() if len(rounds) == 1 else None,
            per_client=tuple(event.metrics["accuracy"] for event in found) if alone else None,
        )

    def history(self) -> tuple[dict[str, Any], ...]:
        """Return one entry per evaluation; of clients alone the mean, a client that has stopped keeping its figures."""
        per_client = [
            [item for item in events if item[0].split == "validation"] for events in self.evaluations.values()
        ]
        entries = []
        for round_index in sorted({event.round for events in per_client for event, *_ in events}):
            found = [next(item for item in reversed(events) if item[0].round <= round_index) for events in per_client]
            entry: dict[str, Any] = {
                "round": round_index,
                "loss": sum(event.loss or 0.0 for event, *_ in found) / len(found),
            }
            for name in found[0][0].metrics:
                entry[f"val_{name}"] = sum(event.metrics[name] for event, *_ in found) / len(found)
            entry["bytes"] = max(moved for _, moved, _, _ in found)
            entry["exchanges"] = max(exchanges for _, _, exchanges, _ in found)
            entry["seconds"] = max(seconds for _, _, _, seconds in found)
            entries.append(entry)
        return tuple(entries)
