"""The optuna study of a search, in one SQLite file: choose the next trial, store results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from glasu.experiments.space import Choices, Point, Range, Space, format_point
from glasu.experiments.trial import MARKS, Outcome
from glasu.randomness import Stream
from glasu.records import describe

NAME = "glasu search"
PRUNER = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=MARKS * 3 // 10)


@dataclass(frozen=True)
class FinishedTrial:
    """A trial and its outcome."""

    number: int
    point: Point
    outcome: Outcome


@dataclass(frozen=True)
class RunningTrial:
    """A trial that has begun: a task for `workers.run_tasks`."""

    study: Study
    trial: optuna.Trial
    number: int
    argument: Point

    @property
    def name(self) -> str:
        return f"trial {self.number} ({format_point(self.argument)})"

    def report(self, marks: Sequence[int], score: float) -> bool:
        """Store the score so far; return True to stop the trial."""
        for mark in marks:
            self.trial.report(score, mark)
        return self.trial.should_prune()

    def finish(self, outcome: Outcome) -> None:
        """Store the outcome."""
        self.study.finish(self, outcome)


class Study:
    """Numbers the trials 0, 1, ..., and draws each from a separate generator.

    The point of a trial is a function of its number and of the trials before it, so a search that was killed continues
    without a trace. Trials that were running are marked as failed in the file, and their numbers are assigned again.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        sampler: str,
        seed: int,
        first: Point | None,
        on_finish: Callable[[FinishedTrial], None],
    ) -> None:
        """Continue a study.

        Args:
            study: from `open_study`.
            space: the keys that vary.
            sampler: "tpe", "random" or "grid".
            seed: seed of the draws.
            first: the point of trial 0; None: the sampler chooses.
            on_finish: called with every finished trial.
        """
        self._study, self._space, self._sampler, self._seed, self._first = study, space, sampler, seed, first
        self._on_finish = on_finish
        self._running: set[int] = set()
        self._order = Stream(seed, "grid").numpy().permutation(space.size or 0) if sampler == "grid" else None

    def begin(self, trials: int) -> RunningTrial | None:
        """Begin the first trial of 0..trials-1 that is neither finished nor running, or return None."""
        taken = self._running | {trial.number for trial in self.list_finished()}
        number = next((number for number in range(trials) if number not in taken), None)
        if number is None:
            return None
        self._study.sampler = self._sampler_of(number)
        trial = self._study.ask({key: _distribution(values) for key, values in self._space.keys.items()})
        trial.set_user_attr("number", number)
        self._running.add(number)
        return RunningTrial(self, trial, number, self._decode(trial.params))

    def finish(self, running: RunningTrial, outcome: Outcome) -> None:
        """Store the outcome of a trial. A failed trial counts as pruned, so that the sampler avoids its region."""
        running.trial.set_user_attr("outcome", dataclasses.asdict(outcome))
        if outcome.state == "complete":
            self._study.tell(running.trial, outcome.score)
        else:
            self._study.tell(running.trial, state=TrialState.PRUNED)
        self._running.discard(running.number)
        self._on_finish(FinishedTrial(running.number, running.argument, outcome))

    def list_finished(self) -> list[FinishedTrial]:
        """List the finished trials by number."""
        found = [
            FinishedTrial(
                trial.user_attrs["number"], self._decode(trial.params), Outcome(**trial.user_attrs["outcome"])
            )
            for trial in _list_ended(self._study)
        ]
        return sorted(found, key=lambda trial: trial.number)

    def _sampler_of(self, number: int) -> BaseSampler:
        if self._order is not None:
            return _Fixed(self._space, self._space.point(int(self._order[number])))
        if number == 0 and self._first is not None:
            return _Fixed(self._space, self._first)
        seed = Stream(self._seed, "search", round=number).key() % 2**32
        return RandomSampler(seed) if self._sampler == "random" else TPESampler(seed=seed)

    def _decode(self, params: Mapping[str, Any]) -> Point:
        return {
            key: values.values[values.labels.index(params[key])]
            if isinstance(values, Choices)
            else values.round_to_step(params[key])
            for key, values in self._space.keys.items()
        }


class _Fixed(BaseSampler):
    """Draws one given point."""

    def __init__(self, space: Space, point: Point) -> None:
        self.space, self.point = space, point

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        values, value = self.space.keys[param_name], self.point[param_name]
        return values.labels[values.values.index(value)] if isinstance(values, Choices) else value


def _distribution(values: Choices | Range) -> BaseDistribution:
    if isinstance(values, Choices):
        return CategoricalDistribution(values.labels)
    if values.is_integer:
        return IntDistribution(int(values.low), int(values.high), log=values.log, step=int(values.step or 1))
    return FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def _list_ended(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


@contextmanager
def open_study(path: Path, settings: Mapping[str, Any]) -> Iterator[optuna.Study]:
    """Open or create the study in a file; refuse the file of a search with other settings.

    Args:
        path: the SQLite file.
        settings: everything except the number of trials that decides the results, as plain values.
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = None
    try:
        url = sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()
        storage = optuna.storages.RDBStorage(url)
        study = _load(storage)
        if not _list_ended(study):  # no results: other settings may replace it
            optuna.delete_study(study_name=NAME, storage=storage)
            study = _load(storage)
            study.set_user_attr("settings", dict(settings))
        _refuse_other(path, study.user_attrs["settings"], settings)
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
    return optuna.create_study(
        storage=storage, study_name=NAME, direction="maximize", pruner=PRUNER, load_if_exists=True
    )


def _refuse_other(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in (*now, *before):
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"{path}: holds trials of a search with {key}={describe(before.get(key))}, "
                f"not {describe(now.get(key))}; "
                "choose another --out, or use the settings of that search."
            )
