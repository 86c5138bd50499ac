"""The optuna study of a search, in one SQLite file: choose the next trial, store results."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from glasu.errors import ConfigError, DataError
from glasu.experiments.space import Choices, Point, Range, SearchSampler, Space, format_point, label
from glasu.experiments.trial import MARKS, Outcome
from glasu.randomness import Stream
from glasu.records import FlatSettings, describe, read_record

STUDY_NAME = "glasu search"
FIRST_PRUNED = 5  # number of complete trials before a trial can be pruned
FIRST_GOAL = MARKS * 3 // 10 - 1  # the first mark at which a trial can be pruned: 30 % of its first run


@dataclass(frozen=True)
class StartedTrial:
    """A trial that has begun."""

    number: int
    point: Point
    goals: Mapping[int, float]  # see `run_trial`

    def __str__(self) -> str:
        return f"trial {self.number} ({format_point(self.point)})"


@dataclass(frozen=True)
class FinishedTrial:
    """A trial and its outcome."""

    number: int
    point: Point
    outcome: Outcome


class Study:
    """Numbers the trials 0, 1, ..., and draws each from a separate generator.

    The point of a trial is a function of its number and of the trials before it. So a search that was killed and
    continued has the same trials as an uninterrupted search. The trials that were running when it was killed are marked
    as failed in the file, and their numbers are assigned again.
    """

    def __init__(
        self, study: optuna.Study, space: Space, sampler: SearchSampler, seed: int, first: Point | None
    ) -> None:
        """Continue a study.

        Args:
            study: the result of `open_study`.
            space: the keys that vary.
            sampler: how the points are chosen.
            seed: seed of the draws.
            first: the point of trial 0; None: the sampler chooses.
        """
        self._study, self._space, self._sampler, self._seed, self._first = study, space, sampler, seed, first
        self._running: dict[int, optuna.Trial] = {}
        self._order = (
            Stream(seed, "grid").numpy().permutation(space.size or 0) if sampler is SearchSampler.GRID else None
        )

    def begin(self, trials: int) -> StartedTrial | None:
        """Begin the first trial of 0..trials-1 that is neither finished nor running, or return None."""
        finished = self.list_finished()
        taken = self._running.keys() | {trial.number for trial in finished}
        number = next((number for number in range(trials) if number not in taken), None)
        if number is None:
            return None
        point = self._choose(number)
        if point is not None:
            self._study.enqueue_trial({key: label(value) for key, value in point.items()})
        self._study.sampler = self._sampler_of(number)
        trial = self._study.ask({key: _make_distribution(values) for key, values in self._space.keys.items()})
        trial.set_user_attr("number", number)
        self._running[number] = trial
        return StartedTrial(number, self._decode(trial.params), _find_goals(finished))

    def finish(self, started: StartedTrial, outcome: Outcome) -> FinishedTrial:
        """Store the outcome of a trial. A failed trial counts as pruned, so that the sampler avoids its region."""
        trial = self._running.pop(started.number)
        for mark, score in enumerate(outcome.marks):
            trial.report(score, mark)
        trial.set_user_attr("outcome", dataclasses.asdict(outcome))
        if outcome.state == "complete":
            self._study.tell(trial, outcome.score)
        else:
            self._study.tell(trial, state=TrialState.PRUNED)
        return FinishedTrial(started.number, started.point, outcome)

    def list_finished(self) -> list[FinishedTrial]:
        """List the finished trials by number."""
        found = [
            FinishedTrial(
                trial.user_attrs["number"],
                self._decode(trial.params),
                read_record(Outcome, trial.user_attrs["outcome"], STUDY_NAME),
            )
            for trial in _list_ended(self._study)
        ]
        return sorted(found, key=lambda trial: trial.number)

    def _choose(self, number: int) -> Point | None:
        """Return the point of a trial that no sampler draws: trial 0, or a trial of a grid; None for other trials."""
        if self._order is not None:
            return self._space.point(int(self._order[number]))
        return self._first if number == 0 else None

    def _sampler_of(self, number: int) -> BaseSampler:
        seed = Stream(self._seed, "search", round=number).key() % 2**32
        return TPESampler(seed=seed) if self._sampler is SearchSampler.TPE else RandomSampler(seed)

    def _decode(self, params: Mapping[str, Any]) -> Point:
        return {key: values.decode(params[key]) for key, values in self._space.keys.items()}


def _find_goals(finished: list[FinishedTrial]) -> dict[int, float]:
    """Return the median score of the complete trials at every mark where a trial can be pruned."""
    complete = [trial.outcome.marks for trial in finished if trial.outcome.state == "complete"]
    if len(complete) < FIRST_PRUNED:
        return {}
    return {
        mark: statistics.median(scores[mark] for scores in complete) for mark in range(FIRST_GOAL, len(complete[0]))
    }


def _make_distribution(values: Choices | Range) -> BaseDistribution:
    if isinstance(values, Choices):
        return CategoricalDistribution(values.labels)
    if values.is_integer:
        return IntDistribution(int(values.low), int(values.high), log=values.log, step=int(values.step or 1))
    return FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def _list_ended(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


@contextmanager
def open_study(path: Path, settings: FlatSettings) -> Iterator[optuna.Study]:
    """Open or create the study in a file; refuse a file that contains a search with other settings.

    Args:
        path: the SQLite file.
        settings: all settings that decide the results, except the number of trials, as plain values.
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = None
    try:
        url = sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()
        storage = optuna.storages.RDBStorage(url)
        study = _load(storage)
        if not _list_ended(study):  # no results: a search with other settings may replace the study
            optuna.delete_study(study_name=STUDY_NAME, storage=storage)
            study = _load(storage)
            study.set_user_attr("settings", dict(settings))
        _refuse_other(path, study.user_attrs["settings"], settings)
        for _ in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):  # killed before the trial began
            study.ask()
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
        yield study
    except sqlalchemy.exc.DatabaseError as error:
        raise DataError(f"{path}: cannot be used as a study ({error.orig}); choose another --out.") from None
    finally:
        if storage is not None:
            storage.remove_session()
            storage.engine.dispose()
        optuna.logging.set_verbosity(verbosity)


def _load(storage: optuna.storages.RDBStorage) -> optuna.Study:
    return optuna.create_study(storage=storage, study_name=STUDY_NAME, direction="maximize", load_if_exists=True)


def _refuse_other(path: Path, before: FlatSettings, now: FlatSettings) -> None:
    for key in (*now, *before):
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"{path}: holds trials of a search with {key}={describe(before.get(key))}, "
                f"not {describe(now.get(key))}; "
                "choose another --out, or use the settings of that search."
            )
