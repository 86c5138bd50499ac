"""Search for settings by their validation score, optionally within a byte budget, and write the best as a run file."""

from __future__ import annotations

import csv
import functools
import importlib.util
import io
import json
import logging
import os
import shlex
import tomllib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from glasu import __version__
from glasu.config import RunConfig
from glasu.errors import ConfigError, TrainingError
from glasu.experiments.space import (
    Choices,
    Point,
    SearchSampler,
    Space,
    apply_point,
    format_point,
    label,
    read_space,
    require,
)
from glasu.files import hold_folder, write_atomically
from glasu.model.task import Metric, make_task
from glasu.records import FlatSettings, to_plain

if TYPE_CHECKING:
    from glasu.experiments.study import FinishedTrial, StartedTrial
    from glasu.experiments.trial import Outcome, Terms

TRIALS = 40  # default number of trials, except for a grid, which tries all its points
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a search. If the space contains the settings of the run file, they are trial 0, except in a grid."""

    run_file: Path  # the settings that do not vary
    out: Path  # folder for study.db, trials.csv and best.toml
    overrides: Sequence[str] = ()  # `section.key=value`, like the arguments of --set
    space: str | Path = "default"  # the keys that vary: a built-in name, or a TOML file
    sampler: str = SearchSampler.TPE.value  # a value of `SearchSampler`
    trials: int | None = None  # total number of trials; None: 40, or all points of a grid
    seeds: int = 1  # runs per trial
    max_bytes: int | None = None  # only evaluations within this number of bytes count
    jobs: int = 1  # number of trials that run at the same time, one process each

    def __post_init__(self) -> None:
        for name in ("trials", "seeds", "max_bytes", "jobs"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name.replace('_', '-')} {value}", "must be at least 1.")
        known = ", ".join(SearchSampler)
        require(self.sampler in list(SearchSampler), f"--sampler {self.sampler}", f"must be one of {known}.")


@dataclass(frozen=True)
class SearchResult:
    """The best trial of a search."""

    score: float  # best validation score of each seed, averaged over the seeds
    point: Point  # {"train.learning_rate": 0.01, ...}
    config: RunConfig  # the contents of best.toml
    best_file: Path
    trials: tuple[FinishedTrial, ...]

    def summary(self) -> str:
        """Return the search in one line."""
        metric = make_task(self.config.train).selected_by
        return (
            f"best of {_count_states(self.trials)}: validation {metric.title} {metric.format(self.score)} with "
            f"{format_point(self.point)}; see {self.best_file}"
        )


@dataclass(frozen=True)
class _Search:
    """The inputs of a search, after its files were read."""

    options: SearchOptions
    written: str  # the text of the run file when the search began
    config: RunConfig
    space: Space
    trials: int


def search(options: SearchOptions) -> SearchResult:
    """Search for the settings with the best validation score; the same call continues an earlier search.

    A trial trains once with each of the seeds s, s+1, ..., where s is the seed of the run file. The score of the trial
    is the mean of the best validation score of each training. Test nodes are not used. Bad trials are stopped early.
    Every finished trial is logged.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("glasu search needs optuna, which is not installed; pip install 'glasu[search]'.")
    config = RunConfig.from_toml(options.run_file, options.overrides)
    space, trials = read_space(options.space, config), options.trials
    if options.sampler == SearchSampler.GRID:
        rule = f"space {options.space} has ranges; give lists, or --sampler tpe."
        require(space.size is not None, "--sampler grid", rule)
        trials = min(trials or space.size or 0, space.size or 0)
    options.out.mkdir(parents=True, exist_ok=True)
    with hold_folder(options.out):
        written = options.run_file.read_text(encoding="utf-8")
        return _run(_Search(options, written, config, space, trials or TRIALS))


def _run(search: _Search) -> SearchResult:
    from glasu.experiments.study import Study, open_study
    from glasu.experiments.trial import Terms
    from glasu.experiments.workers import block_interrupts, run_tasks

    options, config, space = search.options, search.config, search.space
    metric = make_task(config.train).selected_by
    with open_study(options.out / "study.db", _list_settings(search)) as storage:
        study = Study(storage, space, SearchSampler(options.sampler), config.train.seed, space.point_of(config))
        finished = study.list_finished()
        work = functools.partial(_run_trial, Terms(config, options.seeds, options.max_bytes))
        left = search.trials - len(finished)
        tasks = iter(functools.partial(study.begin, search.trials), None) if left > 0 else iter(())
        with closing(run_tasks(work, tasks, min(options.jobs, left))) as results:
            for started, outcome in results:
                with block_interrupts():
                    trial = study.finish(started, outcome)
                    finished = study.list_finished()
                    best = _write(search, finished)
                log.info("%s", _describe(trial, len(finished), search.trials, best, metric))
    best = _write(search, finished)
    if best is None:
        notes = Counter(trial.outcome.note for trial in finished)
        raise TrainingError(
            f"none of {_count_states(finished)} was completed; most frequent reason: {notes.most_common(1)[0][0]}"
        )
    assert best.outcome.score is not None
    file = options.out / "best.toml"
    return SearchResult(best.outcome.score, best.point, RunConfig.from_toml(file), file, tuple(finished))


def _run_trial(terms: Terms, started: StartedTrial, workers: int | None) -> Outcome:
    from glasu.experiments.trial import run_trial

    return run_trial(terms, started.point, started.goals, workers)


def _describe(trial: FinishedTrial, done: int, planned: int, best: FinishedTrial | None, metric: Metric) -> str:
    """Return a finished trial as one line."""
    found = trial.outcome
    score = "-" if found.score is None else metric.format(found.score)
    leader = "" if best is None or best.outcome.score is None else f", best {metric.format(best.outcome.score)}"
    cost = f", {found.bytes / 1e6:.1f} MB" if found.bytes else ""
    reason = f": {found.note}" if found.note else ""
    return (
        f"trial {trial.number} ({done} of {planned}) {found.state}: validation {metric.title} {score}{leader}"
        f"{cost}, {found.seconds:.1f} s; {format_point(trial.point)}{reason}"
    )


def _list_settings(search: _Search) -> FlatSettings:
    """Return the settings that decide the trials, as plain values. They do not include `data.root`."""
    run = {**search.config.flatten(), "data.parties": search.config.data.parties}
    space = {
        f"space {key}": list(values.ends) if isinstance(values, Choices) else to_plain(values)
        for key, values in search.space.keys.items()
    }
    more = {"sampler": search.options.sampler, "seeds": search.options.seeds, "max_bytes": search.options.max_bytes}
    plain: FlatSettings = json.loads(json.dumps({**run, **space, **more}))
    return plain


def _count_states(trials: Sequence[FinishedTrial]) -> str:
    states = Counter(trial.outcome.state for trial in trials)
    return f"{len(trials)} trials ({', '.join(f'{count} {state}' for state, count in sorted(states.items()))})"


def _write(search: _Search, trials: Sequence[FinishedTrial]) -> FinishedTrial | None:
    """Write trials.csv and best.toml; return the best complete trial, if there is one.

    If trials have equal scores, the trial with the fewest bytes is best. If the bytes are also equal, it is the first.
    """
    write_atomically(search.options.out / "trials.csv", _format_table(search.space, trials).encode())
    complete = [trial for trial in trials if trial.outcome.state == "complete"]
    if not complete:
        return None
    best = min(complete, key=lambda trial: (-(trial.outcome.score or 0.0), trial.outcome.bytes or 0, trial.number))
    write_atomically(
        search.options.out / "best.toml",
        (_describe_origin(search, trials, best) + _format_run_file(search, best)).encode(),
    )
    return best


def _format_table(space: Space, trials: Sequence[FinishedTrial]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["trial", "state", "validation", *space.keys, "best_round", "bytes", "seconds", "note"])
    for trial in trials:
        found, values = trial.outcome, [label(value) for value in trial.point.values()]
        cost = [found.best_round, found.bytes, round(found.seconds, 2)]
        table.writerow([trial.number, found.state, found.score, *values, *cost, found.note])
    return text.getvalue()


def _describe_origin(search: _Search, trials: Sequence[FinishedTrial], best: FinishedTrial) -> str:
    """Return the comment at the head of best.toml: command and result."""
    options = search.options
    words = [options.run_file.name, "--space", Path(str(options.space)).name, "--sampler", options.sampler]
    words += ["--trials", str(search.trials), "--seeds", str(options.seeds)]
    words += ["--max-bytes", str(options.max_bytes)] if options.max_bytes is not None else []
    words += [word for override in options.overrides for word in ("--set", override)]
    seeds = range(search.config.train.seed, search.config.train.seed + options.seeds)
    found = best.outcome
    lines = [
        f"Found by glasu {__version__}: glasu search {shlex.join(words)}",
        f"Trial {best.number} of {_count_states(trials)}: mean validation score {found.score} over seeds "
        f"{', '.join(str(seed) for seed in seeds)},",
        f"best by round {found.best_round}, after {found.bytes} bytes. Test nodes were not used.",
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _format_run_file(search: _Search, best: FinishedTrial) -> str:
    """Return the settings as TOML: the keys of the run file, of --set and of the best trial."""
    written = search.written
    keys = {f"{section}.{key}" for section, items in tomllib.loads(written).items() for key in items}
    keys |= {override.partition("=")[0].strip() for override in search.options.overrides} | set(best.point)
    keys.add("train.preset")  # its value is "none"; otherwise a preset would choose the keys that are not in this file
    config = apply_point(search.config, best.point)
    if best.outcome.num_rounds != config.train.num_rounds:  # fewer rounds fit into the byte budget
        keys.add("train.num_rounds")
        config = config.replace(train={"num_rounds": best.outcome.num_rounds})
    sections: dict[str, dict[str, Any]] = {}
    for section, items in config.to_dict().items():
        if used := {key: value for key, value in items.items() if f"{section}.{key}" in keys}:
            sections[section] = used
    data, given = sections.get("data", {}), "\n".join([written, *search.options.overrides])
    if "root" in data:
        data["root"] = _keep_form(data["root"], search.options.out, given)
    if "parties" in data:
        data["parties"] = [_keep_form(folder, search.options.out, given) for folder in data["parties"]]
    return tomli_w.dumps(sections)


def _keep_form(path: str, out: Path, given: str) -> str:
    """If the user gave the path in absolute form, keep it. Otherwise, make it relative to the folder of best.toml."""
    return path if path in given else os.path.relpath(path, out.resolve())
