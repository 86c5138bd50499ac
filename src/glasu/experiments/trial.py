"""One trial of a search: train with each seed, record the validation scores, and stop bad runs early.

A trial does not use test scores: its runs end after the last evaluation on validation nodes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from glasu.config import RunConfig
from glasu.data.methods import find_method
from glasu.errors import ConfigError, DataError, TrainingError
from glasu.experiments.space import apply_point
from glasu.experiments.workers import load_once
from glasu.model.optimizer import find_schedule
from glasu.records import FlatSettings
from glasu.timing import Clock

if TYPE_CHECKING:  # a process that only waits for its workers does not load torch
    from glasu import Evaluated, Event, PartyData

MARKS = 10  # per run; a mark is a share of the run's rounds or bytes at which trials are compared: 10 %, 20 %, ...
Load = Callable[[RunConfig], "Sequence[PartyData]"]


@dataclass(frozen=True)
class Terms:
    """The settings that all trials of a search share."""

    config: RunConfig  # the keys that do not vary
    seeds: int = 1
    max_bytes: int | None = None  # byte limit per run; evaluations above it do not count


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    If a trial has several seeds, or parties that train alone, it has several best evaluations. Then `score` is their
    mean score, `best_round` their latest round, and `bytes` their largest number of bytes.
    """

    state: Literal["complete", "pruned", "failed"]  # failed: training diverged, or no evaluation was within the budget
    score: float | None = None  # best validation score; of a pruned trial, the best before it was stopped
    best_round: int | None = None
    bytes: int | None = None  # bytes sent up to the best evaluation
    num_rounds: int | None = None  # the configured number, or the number that fits into the byte limit with every seed
    seconds: float = 0.0
    note: str = ""  # reason for a failure
    marks: tuple[float, ...] = ()  # the score at each mark; run i has the marks i * MARKS ... (i + 1) * MARKS - 1


class _Evaluation(NamedTuple):
    round: int
    bytes: int
    score: float


class _RunEnded(BaseException):
    """Raised by an observer to end a run early. It is not an error."""


def load_parties_once(config: RunConfig) -> Sequence[PartyData]:
    """Return the parties of a run; each seed is loaded once."""
    return load_once(config).parties


def run_trial(
    terms: Terms,
    point: FlatSettings,
    goals: Mapping[int, float] | None = None,
    workers: int | None = None,
    *,
    load: Load = load_parties_once,
    clock: Clock = time.perf_counter,
) -> Outcome:
    """Train with the settings of one point of the space, once per seed.

    Args:
        terms: the settings that all trials share.
        point: the keys that vary.
        goals: {mark: score}. The trial is pruned at a mark if its best score so far is below the goal.
        workers: number of clients that compute at the same time.
        load: returns the parties of a run.
        clock: returns seconds.
    """
    start, runs, marks = clock(), list[_Run](), list[float]()

    def score(until: int | None = None) -> float:
        return sum(run.score(until) for run in runs) / len(runs)

    def should_stop(share: float) -> bool:
        new = MARKS * (len(runs) - 1) + int(share * MARKS + 1e-9) - len(marks)
        marks.extend([score()] * new)
        return new > 0 and max(marks) < (goals or {}).get(len(marks) - 1, -math.inf)

    def outcome(state: Literal["complete", "pruned", "failed"], until: int | None = None, note: str = "") -> Outcome:
        best = [] if state == "failed" else [item for run in runs for item in run.best(until)]
        return Outcome(
            state=state,
            score=score(until) if best else None,
            best_round=max((item.round for item in best), default=None),
            bytes=max((item.bytes for item in best), default=None),
            num_rounds=until or config.train.num_rounds,
            seconds=clock() - start,
            note=" ".join(note.split()),
            marks=tuple(marks),
        )

    try:
        config = apply_point(terms.config, point)
    except ConfigError as error:
        return Outcome("failed", seconds=clock() - start, note=str(error))
    for index in range(terms.seeds):
        seeded = config.replace(train={"seed": config.train.seed + index})
        parties = load(seeded)
        combines = find_method(seeded).averages
        evaluated = len(parties) if seeded.train.label_owner is None else 1  # parties with labels
        runs.append(_Run(evaluated, terms.max_bytes, should_stop, combines=combines))
        try:
            runs[-1].train(parties, seeded, workers)
        except TrainingError as error:
            return outcome("failed", note=str(error))
        if not runs[-1].evaluations:
            return outcome("failed", note=f"no evaluation within {terms.max_bytes} bytes")
        if runs[-1].pruned or (should_stop(1.0) and index + 1 < terms.seeds):
            return outcome("pruned")
    fits = min((run.last_round for run in runs if run.over_budget), default=None)
    if fits is not None and not find_schedule(config).is_constant:  # fewer rounds would change the learning rates
        return outcome("failed", note=f"its schedule of {config.train.num_rounds} rounds needs more bytes")
    return outcome("complete", until=fits)


class _Run:
    """One run and its evaluations. Parties that train alone have separate evaluations."""

    def __init__(
        self, num_evaluated: int, max_bytes: int | None, should_stop: Callable[[float], bool], *, combines: bool = False
    ) -> None:
        self.combines = combines  # whether only the combined prediction of the parties counts
        self.num_evaluated, self.max_bytes, self.should_stop = num_evaluated, max_bytes, should_stop
        self.evaluations: dict[str | None, list[_Evaluation]] = {}
        self.trained: set[str | None] = set()
        self.pruned = self.over_budget = self.ended = False
        self._lock = threading.Lock()  # parties that train alone report from several threads

    def train(self, parties: Sequence[PartyData], config: RunConfig, workers: int | None) -> None:
        """Train until the run is over or stopped."""
        import numpy as np

        from glasu import train

        def observe(event: Event) -> None:
            with self._lock:
                self._observe(event, config.train.num_rounds)

        with suppress(_RunEnded), np.errstate(over="ignore", invalid="ignore"):  # divergence raises TrainingError
            train(parties, config, observer=observe, workers=workers)

    def best(self, until: int | None = None) -> list[_Evaluation]:
        """Return the best evaluation of each party up to a round; among equal evaluations, the earliest."""
        return [
            max((item for item in items if until is None or item.round <= until), key=lambda item: item.score)
            for items in self.evaluations.values()
        ]

    def score(self, until: int | None = None) -> float:
        """Return the best validation score; if parties train alone, the mean of their best scores."""
        best = self.best(until)
        return sum(item.score for item in best) / len(best)

    @property
    def last_round(self) -> int:
        return max(items[-1].round for items in self.evaluations.values())

    def _observe(self, event: Event, num_rounds: int) -> None:
        """Record an evaluation; raise `_RunEnded` if the run is over."""
        from glasu import Evaluated, RoundDone

        if not self.ended and isinstance(event, RoundDone | Evaluated):
            if self.max_bytes is not None and event.bytes > self.max_bytes:
                self.over_budget = self.ended = True
            # If parties combine their predictions, only the combined evaluation counts.
            elif isinstance(event, Evaluated) and event.split == "validation" and not (self.combines and event.party):
                self._record(event, num_rounds)
        if self.ended:
            raise _RunEnded

    def _record(self, event: Evaluated, num_rounds: int) -> None:
        score, party = event.metrics[event.selected_by.name], event.party
        if math.isnan(score):
            raise DataError(
                "a search compares validation scores, and the data has no validation nodes; see data.split."
            )
        self.evaluations.setdefault(party, []).append(_Evaluation(event.round, event.bytes, score))
        if event.last:
            self.trained.add(party)
        training = [items for who, items in self.evaluations.items() if who not in self.trained]
        behind = any(items[-1].round < event.round for items in training)
        if behind or len(self.evaluations) < (1 if party is None else self.num_evaluated):
            return  # other parties have not finished this round
        share = event.round / num_rounds
        if self.max_bytes is not None:
            share = max(share, event.bytes / self.max_bytes)
        self.pruned = bool(training) and self.should_stop(share)
        self.ended = self.pruned or not training
