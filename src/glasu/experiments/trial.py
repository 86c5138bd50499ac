"""One trial: train with each seed, follow the validation scores, and end each run where nothing more can count.

Test scores are no part of it: a run ends with its last validation, before its test.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.data.sources.catalog import load_parties
from glasu.errors import ConfigError, DataError, TrainingError
from glasu.experiments.outcome import MARKS, Outcome, Terms
from glasu.experiments.space import config_at
from glasu.model.metrics import SELECTED_BY
from glasu.protocol.requests import Evaluated, Event
from glasu.protocol.state import Selection
from glasu.runtime.simulation import SimulationOptions, simulate
from glasu.runtime.telemetry import TrafficCounter
from glasu.timing import Clock

Report = Callable[[Sequence[int], float], bool]  # marks that were reached, score so far -> whether to give up
Load = Callable[[RunConfig], Sequence[PartyData]]


class _Evaluation(NamedTuple):
    round: int
    bytes: int
    score: float


class _Enough(BaseException):
    """Leaves a run from its observer; as little an error as GeneratorExit is."""


def load_once() -> Load:
    """Return a `load_parties` that remembers the parties of each seed."""
    known: dict[int, list[PartyData]] = {}

    def load(config: RunConfig) -> list[PartyData]:
        if config.data_seed not in known:
            known[config.data_seed] = load_parties(config)
        return known[config.data_seed]

    return load


def run_trial(
    terms: Terms,
    point: Mapping[str, Any],
    load: Load,
    report: Report,
    workers: int | None = None,
    clock: Clock = time.perf_counter,
) -> Outcome:
    """Train at one point of the space with every seed.

    Args:
        terms: what all trials have in common.
        point: the keys that vary.
        load: gives the parties of a seed.
        report: is told the marks that the trial reached and its score so far: the mean of the bests of the seeds that
            have begun. Run i has the marks i * MARKS + 1 ... (i + 1) * MARKS. True ends the trial.
        workers: how many clients compute at once.
        clock: tells the seconds.
    """
    start, runs, reached = clock(), list[_Run](), 0

    def score(until: int | None = None) -> float:
        return sum(run.score(until) for run in runs) / len(runs)

    def gives_up(share: float) -> bool:
        nonlocal reached
        first, reached = reached + 1, MARKS * (len(runs) - 1) + int(share * MARKS + 1e-9)
        return first <= reached and report(range(first, reached + 1), score())

    def outcome(state: str, until: int | None = None, note: str = "") -> Outcome:
        best = [] if state == "failed" else [item for run in runs for item in run.best(until)]
        return Outcome(
            state=state,
            score=score(until) if best else None,
            best_round=max((item.round for item in best), default=None),
            bytes=max((item.bytes for item in best), default=None),
            num_rounds=until or config.train.num_rounds,
            seconds=clock() - start,
            note=" ".join(note.split()),
        )

    try:
        config = config_at(terms.config, point)
    except ConfigError as error:
        return Outcome("failed", seconds=clock() - start, note=str(error))
    for index in range(terms.seeds):
        seeded = config.replace(train={"seed": config.train.seed + index})
        parties = load(seeded)
        runs.append(_Run(seeded, len(parties), terms.max_bytes, gives_up))
        try:
            runs[-1].follow(parties, workers)
        except TrainingError as error:
            return outcome("failed", note=str(error))
        if not runs[-1].evaluations:
            return outcome("failed", note=f"no evaluation within {terms.max_bytes} bytes")
        if runs[-1].pruned or (gives_up(1.0) and index + 1 < terms.seeds):
            return outcome("pruned")
    fits = min((run.last_round for run in runs if run.over_budget), default=None)
    if fits is not None and config.train.schedule != "constant":  # fewer rounds would be other learning rates
        return outcome("failed", note=f"its schedule of {config.train.num_rounds} rounds needs more bytes")
    return outcome("complete", until=fits)


class _Run:
    """One run and its evaluations that count, of each party that trains alone or of all together."""

    def __init__(
        self, config: RunConfig, num_parties: int, max_bytes: int | None, gives_up: Callable[[float], bool]
    ) -> None:
        self.config, self.num_parties, self.max_bytes, self.gives_up = config, num_parties, max_bytes, gives_up
        self.traffic = TrafficCounter()
        self.evaluations: dict[str | None, list[_Evaluation]] = {}
        self.selections: dict[str | None, Selection] = {}
        self.pruned = self.over_budget = self.ended = False
        self._lock = threading.Lock()  # parties alone report from threads of their own

    def follow(self, parties: Sequence[PartyData], workers: int | None) -> None:
        """Train until nothing more can count."""
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges, TrainingError tells
                options = SimulationOptions(observer=self, workers=workers, traffic=self.traffic)
                simulate(parties, self.config, options)
        except _Enough:
            pass

    def best(self, until: int | None = None) -> list[_Evaluation]:
        """Return the best evaluation of each party, of rounds up to `until`; a tie keeps the earlier one."""
        return [
            max((item for item in items if until is None or item.round <= until), key=lambda item: item.score)
            for items in self.evaluations.values()
        ]

    def score(self, until: int | None = None) -> float:
        """Return the best validation score, the mean over parties that train alone."""
        best = self.best(until)
        return sum(item.score for item in best) / len(best)

    @property
    def last_round(self) -> int:
        return max(items[-1].round for items in self.evaluations.values())

    def __call__(self, event: Event) -> None:
        """Note an evaluation; leave the run where it is over."""
        with self._lock:
            if self.max_bytes is not None and self.traffic.total_bytes > self.max_bytes:
                self.over_budget = self.ended = True
            elif isinstance(event, Evaluated) and event.split == "validation" and not self.ended:
                self._note(event)
            if self.ended:
                raise _Enough

    def _note(self, event: Evaluated) -> None:
        train, party = self.config.train, event.party
        score = event.metrics[SELECTED_BY[train.task]]
        if math.isnan(score):
            raise DataError("a search compares validation scores, but there are no validation nodes; see data.split.")
        self.evaluations.setdefault(party, []).append(_Evaluation(event.round, self.traffic.total_bytes, score))
        self.selections[party] = self.selections.get(party, Selection()).after(score, event.round)
        training = [who for who, selection in self.selections.items() if not selection.stops(train)]
        behind = [who for who in training if self.evaluations[who][-1].round < event.round]
        if behind or len(self.evaluations) < (1 if party is None else self.num_parties):
            return  # the others are still at this round
        if event.round == train.num_rounds or not training:
            self.ended = True
            return
        share = event.round / train.num_rounds
        if self.max_bytes is not None:
            share = max(share, self.traffic.total_bytes / self.max_bytes)
        self.pruned = self.ended = self.gives_up(share)
