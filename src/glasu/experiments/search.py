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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from glasu import __version__
from glasu.config import RunConfig
from glasu.errors import ConfigError, TrainingError
from glasu.experiments.space import Point, Space, format_point, label, read_space, require
from glasu.files import hold_folder, write_atomically
from glasu.model.task import Metric, task_of

if TYPE_CHECKING:
    from glasu.experiments.study import FinishedTrial

SEARCH_SAMPLERS = ("tpe", "grid", "random")
TRIALS = 40  # by default; a grid has all its points by default
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchResult:
    """The best trial of a search."""

    score: float  # best on validation, the mean over the seeds
    point: Point  # {"train.learning_rate": 0.01, ...}
    config: RunConfig  # the contents of best.toml
    best_file: Path
    trials: tuple[FinishedTrial, ...]

    def summary(self) -> str:
        """Return the search in one line."""
        metric = task_of(self.config.train).selected_by
        return (
            f"best of {_count_states(self.trials)}: validation {metric.title} {metric.format(self.score)} with "
            f"{format_point(self.point)}; see {self.best_file}"
        )


@dataclass(frozen=True)
class _Search:
    """The arguments of a search."""

    run_file: Path
    written: str  # its text when the search began
    overrides: tuple[str, ...]
    config: RunConfig
    space_name: str
    space: Space
    sampler: str
    trials: int
    seeds: int
    max_bytes: int | None
    out: Path


def search(
    run_file: str | Path,
    out: str | Path,
    *,
    overrides: Sequence[str] = (),
    space: str | Path = "default",
    sampler: str = "tpe",
    trials: int | None = None,
    seeds: int = 1,
    max_bytes: int | None = None,
    jobs: int = 1,
) -> SearchResult:
    """Search for the settings with the best validation score; the same call continues an earlier search.

    A trial trains with seeds s, s+1, ..., where s is the seed of the run file. Its score is the mean of their best
    validation scores (accuracy, or micro F1 of a multi-label task). Test nodes are not used. Bad trials are stopped
    early. Every finished trial is logged.

    Args:
        run_file: the settings that do not vary. If the space contains them, they are the first trial (except of a
            grid, whose order is random).
        out: folder for study.db, trials.csv and best.toml.
        overrides: `section.key=value`, as for --set.
        space: the keys that vary: a built-in name, or a TOML file.
        sampler: "tpe", "random", or "grid": every point once, in random order.
        trials: total number of trials; by default 40, or all points of a grid.
        seeds: runs per trial.
        max_bytes: only evaluations within this number of bytes count.
        jobs: number of trials at the same time, one process each.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("glasu search needs optuna, which is not installed; pip install 'glasu[search]'.")
    for name, value in (("trials", trials), ("seeds", seeds), ("max-bytes", max_bytes), ("jobs", jobs)):
        require(value is None or value >= 1, f"--{name} {value}", "must be at least 1.")
    require(sampler in SEARCH_SAMPLERS, f"--sampler {sampler}", f"must be one of {', '.join(SEARCH_SAMPLERS)}.")
    run_file, out = Path(run_file), Path(out)
    config = RunConfig.from_toml(run_file, overrides)
    found = read_space(space, config)
    if sampler == "grid":
        require(found.size is not None, "--sampler grid", f"space {space} has ranges; give lists, or --sampler tpe.")
        trials = min(trials or found.size or 0, found.size or 0)
    options = _Search(
        run_file=run_file,
        written=run_file.read_text(encoding="utf-8"),
        overrides=tuple(overrides),
        config=config,
        space_name=str(space),
        space=found,
        sampler=sampler,
        trials=trials or TRIALS,
        seeds=seeds,
        max_bytes=max_bytes,
        out=out,
    )
    out.mkdir(parents=True, exist_ok=True)
    with hold_folder(out):
        return _run(options, jobs)


def _run(options: _Search, jobs: int) -> SearchResult:
    from glasu.experiments.study import Study, open_study
    from glasu.experiments.trial import Terms, run_trial
    from glasu.experiments.workers import run_tasks

    def on_finish(trial: FinishedTrial) -> None:
        finished = study.list_finished()
        best = _write(options, finished)
        log.info("%s", _describe(trial, len(finished), options.trials, best, task_of(options.config.train).selected_by))

    with open_study(options.out / "study.db", _settings(options)) as storage:
        first = options.space.point_of(options.config)
        study = Study(storage, options.space, options.sampler, options.config.train.seed, first, on_finish)
        work = functools.partial(run_trial, Terms(options.config, options.seeds, options.max_bytes))
        left = options.trials - len(study.list_finished())
        if left > 0:
            run_tasks(work, functools.partial(study.begin, options.trials), min(jobs, left))
        finished = study.list_finished()
    best = _write(options, finished)
    if best is None:
        notes = Counter(trial.outcome.note for trial in finished)
        raise TrainingError(
            f"none of {_count_states(finished)} was completed; most often: {notes.most_common(1)[0][0]}"
        )
    assert best.outcome.score is not None
    file = options.out / "best.toml"
    return SearchResult(best.outcome.score, best.point, RunConfig.from_toml(file), file, tuple(finished))


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


def _flat(config: RunConfig) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in config.to_dict().items() for key, value in keys.items()}


def _settings(options: _Search) -> dict[str, Any]:
    """Return the settings that decide the trials, as plain values; the location of the data does not."""
    run = _flat(options.config)
    del run["data.root"]
    space = {f"space {key}": values for key, values in options.space.to_plain().items()}
    more = {"sampler": options.sampler, "seeds": options.seeds, "max_bytes": options.max_bytes}
    plain: dict[str, Any] = json.loads(json.dumps({**run, **space, **more}))
    return plain


def _count_states(trials: Sequence[FinishedTrial]) -> str:
    states = Counter(trial.outcome.state for trial in trials)
    return f"{len(trials)} trials ({', '.join(f'{count} {state}' for state, count in sorted(states.items()))})"


def _write(options: _Search, trials: Sequence[FinishedTrial]) -> FinishedTrial | None:
    """Write trials.csv and best.toml; return the best complete trial, if there is one.

    Of equal scores the fewest bytes win, then the earlier trial.
    """
    write_atomically(options.out / "trials.csv", _table(options.space, trials).encode())
    complete = [trial for trial in trials if trial.outcome.state == "complete"]
    if not complete:
        return None
    best = min(complete, key=lambda trial: (-(trial.outcome.score or 0.0), trial.outcome.bytes or 0, trial.number))
    write_atomically(options.out / "best.toml", (_origin(options, trials, best) + _run_file(options, best)).encode())
    return best


def _table(space: Space, trials: Sequence[FinishedTrial]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["trial", "state", "validation", *space.keys, "best_round", "bytes", "seconds", "note"])
    for trial in trials:
        found, values = trial.outcome, [label(value) for value in trial.point.values()]
        cost = [found.best_round, found.bytes, round(found.seconds, 2)]
        table.writerow([trial.number, found.state, found.score, *values, *cost, found.note])
    return text.getvalue()


def _origin(options: _Search, trials: Sequence[FinishedTrial], best: FinishedTrial) -> str:
    """Return the comment at the head of best.toml: command and result."""
    words = [
        "glasu",
        "search",
        options.run_file.name,
        "--space",
        Path(options.space_name).name,
        "--sampler",
        options.sampler,
    ]
    words += ["--trials", str(options.trials), "--seeds", str(options.seeds)]
    words += ["--max-bytes", str(options.max_bytes)] if options.max_bytes is not None else []
    words += [word for override in options.overrides for word in ("--set", override)]
    seeds = range(options.config.train.seed, options.config.train.seed + options.seeds)
    found = best.outcome
    lines = [
        f"Found by glasu {__version__}: {shlex.join(words)}",
        f"Trial {best.number} of {_count_states(trials)}: mean validation score {found.score} over seeds "
        f"{', '.join(str(seed) for seed in seeds)},",
        f"best by round {found.best_round}, after {found.bytes} bytes. Test nodes were not used.",
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _run_file(options: _Search, best: FinishedTrial) -> str:
    """Return the settings as TOML: the keys of the run file and of --set, and those of the best trial."""
    written = options.written
    keys = {f"{section}.{key}" for section, items in tomllib.loads(written).items() for key in items}
    keys |= {override.partition("=")[0].strip() for override in options.overrides} | set(best.point)
    settings = {**_flat(options.config), **best.point}
    if best.outcome.num_rounds != settings["train.num_rounds"]:  # fewer fit into the budget
        keys.add("train.num_rounds")
        settings["train.num_rounds"] = best.outcome.num_rounds
    sections: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, _, key = path.partition(".")
        if path in keys:
            sections.setdefault(section, {})[key] = value
    data, given = sections.get("data", {}), "\n".join([written, *options.overrides])
    if "root" in data:
        data["root"] = _keep_form(data["root"], options.out, given)
    if "parties" in data:
        data["parties"] = [_keep_form(folder, options.out, given) for folder in data["parties"]]
    return tomli_w.dumps(sections)


def _keep_form(path: str, out: Path, given: str) -> str:
    """Return an absolute path of the user unchanged, and any other path relative to the folder of best.toml."""
    return path if path in given else os.path.relpath(path, out.resolve())
