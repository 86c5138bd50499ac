"""The optuna study of a search: what is tried next, what was found; one SQLite file that outlives the process."""

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

from glasu.config_section import show_value
from glasu.errors import ConfigError, DataError
from glasu.experiments.outcome import MARKS, Outcome
from glasu.experiments.space import Choices, Point, Range, Space
from glasu.randomness import Stream

NAME = "glasu search"
PRUNER = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=MARKS * 3 // 10)


@dataclass(frozen=True)
class FinishedTrial:
    """A trial of a search, and what it found."""

    number: int
    point: Point
    outcome: Outcome


@dataclass(frozen=True)
class RunningTrial:
    """A trial that has begun; its study is told how it goes."""

    study: Study
    trial: optuna.Trial
    number: int
    point: Point

    def report(self, marks: Sequence[int], score: float) -> bool:
        """Note the score so far; True gives the trial up."""
        for mark in marks:
            self.trial.report(score, mark)
        return self.trial.should_prune()

    def finish(self, outcome: Outcome) -> None:
        """Note the end."""
        self.study.finish(self, outcome)


class Study:
    """Numbers the trials 0, 1, ..., and draws each from a generator of its own.

    What a trial tries is a function of its number and of the trials before it: a search that was killed goes on as if
    it had not been. Trials that were running then are marked as failed in the file, and their numbers are given again.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        sampler: str,
        seed: int,
        first: Point | None,
        observe: Callable[[FinishedTrial], None],
    ) -> None:
        """Go on with what the file holds.

        Args:
            study: as `opened` gives it.
            space: what varies.
            sampler: "tpe", "random" or "grid".
            seed: of the draws.
            first: what trial 0 tries; None leaves it to the sampler.
            observe: is told of every trial that ends.
        """
        self._study, self._space, self._sampler, self._seed, self._first = study, space, sampler, seed, first
        self._observe = observe
        self._running: set[int] = set()
        self._order = Stream(seed, "grid").numpy().permutation(space.size or 0) if sampler == "grid" else None

    def begin(self, trials: int) -> RunningTrial | None:
        """Begin the first trial of 0..trials-1 that is neither finished nor running, or return None."""
        taken = self._running | {trial.number for trial in self.finished()}
        number = next((number for number in range(trials) if number not in taken), None)
        if number is None:
            return None
        self._study.sampler = self._sampler_of(number)
        trial = self._study.ask({key: _distribution(values) for key, values in self._space.keys.items()})
        trial.set_user_attr("number", number)
        self._running.add(number)
        return RunningTrial(self, trial, number, self._decode(trial.params))

    def finish(self, running: RunningTrial, outcome: Outcome) -> None:
        """Note the end of a trial; one that failed counts as pruned to the sampler, which learns to stay away."""
        running.trial.set_user_attr("outcome", dataclasses.asdict(outcome))
        if outcome.state == "complete":
            self._study.tell(running.trial, outcome.score)
        else:
            self._study.tell(running.trial, state=TrialState.PRUNED)
        self._running.discard(running.number)
        self._observe(FinishedTrial(running.number, running.point, outcome))

    def finished(self) -> list[FinishedTrial]:
        """List the finished trials by number."""
        found = [
            FinishedTrial(
                trial.user_attrs["number"], self._decode(trial.params), Outcome(**trial.user_attrs["outcome"])
            )
            for trial in _ended(self._study)
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
            else values.exact(params[key])
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


def _ended(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


@contextmanager
def opened(path: Path, settings: Mapping[str, Any]) -> Iterator[optuna.Study]:
    """Open the study in a file, or make one; refuse a file of a search with other settings.

    Args:
        path: the SQLite file.
        settings: everything but the number of trials that decides what is found, as plain values.
    """
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = None
    try:
        url = sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()
        storage = optuna.storages.RDBStorage(url)
        study = _load(storage)
        if not _ended(study):  # nothing to lose, so other settings are welcome
            optuna.delete_study(study_name=NAME, storage=storage)
            study = _load(storage)
            study.set_user_attr("settings", dict(settings))
        _refuse_other(path, study.user_attrs["settings"], settings)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
        yield study
    except sqlalchemy.exc.DatabaseError as error:
        raise DataError(f"{path}: is not a study that can be used ({error.orig}); choose another --out.") from None
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
                f"{path}: holds trials of a search with {key}={show_value(before.get(key))}, "
                f"not {show_value(now.get(key))}; "
                "choose another --out, or give the settings it began with."
            )
