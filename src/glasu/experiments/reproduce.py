"""Reproduce the paper's tables: run what is missing, in several processes, and write tables and plots."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from glasu.config import RunConfig, TrainConfig
from glasu.data.datasets import Loaded, load
from glasu.data.files import write_atomically
from glasu.data.statistics import summary
from glasu.errors import GlasuError, TrainingError
from glasu.experiments.figures import render
from glasu.experiments.plan import TABLES, Run, plan
from glasu.experiments.results import Result, as_csv, curves_as_csv, result_of, store, stored
from glasu.experiments.tables import Table, as_markdown, tables
from glasu.runtime.simulation import simulate

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Reproduction:
    """What was asked for, and what came out."""

    results: tuple[Result, ...]
    tables: tuple[Table, ...]
    folder: Path


def reproduce(
    names: Sequence[str],
    out: Path,
    *,
    datasets: Sequence[str] | None = None,
    seeds: int = 5,
    jobs: int = 1,
    quick: bool = False,
    progress: Progress = lambda done, total, line: None,
) -> Reproduction:
    """Run the grids of some tables, as far as their results are not in the folder yet, and write what they show.

    Args:
        names: of the tables, see `plan.TABLES`.
        out: the folder for runs/, results.csv, curves.csv, tables.md and report.html.
        datasets: on which data sets; None: those of each table that are to be had.
        seeds: how many, from 0.
        jobs: how many runs at once, a process each.
        quick: a quarter of the rounds.
        progress: is told how many of how many runs are done, and what was the last of them, or the data, in a line.
    """
    wanted = available(names, datasets, lambda line: progress(0, 0, line))
    runs = {
        run.name: run for name in names for run in plan(name, _of(name, wanted, datasets), range(seeds), quick=quick)
    }
    missing = [run for run in runs.values() if stored(out, run) is None]
    done = len(runs) - len(missing)
    progress(done, len(runs), "runs were here already")
    failures = []
    for run, outcome in execute(missing, jobs):
        done += 1
        if isinstance(outcome, TrainingError):
            failures.append(f"{run.name}: {outcome}")
            progress(done, len(runs), failures[-1])
        else:
            store(out, run, outcome)
            progress(done, len(runs), outcome.summary())
    reproduction = write(out, wanted, seeds, quick=quick)
    if failures:
        raise TrainingError(f"{len(failures)} of {len(runs)} runs failed; the first was {failures[0]}")
    return reproduction


def _of(table: str, wanted: Sequence[str], asked: Sequence[str] | None) -> list[str]:
    """Return the data sets for a table: all that were asked for, else those of the table that are to be had."""
    return list(wanted) if asked is not None else [name for name in TABLES[table][1] if name in wanted]


def available(names: Sequence[str], datasets: Sequence[str] | None, tell: Callable[[str], None]) -> list[str]:
    """Load every data set once, tell its statistics, and return those to be had; one that was asked for must be."""
    usual = dict.fromkeys(dataset for name in names for dataset in TABLES[name][1])
    found = []
    for dataset in usual if datasets is None else dict.fromkeys(datasets):
        first = next(TABLES[names[0]][0]([dataset]))
        try:
            loaded = load(first.config)
        except GlasuError as error:
            if datasets is not None:
                raise
            tell(f"{dataset}: left out: {error}")
            continue
        for line in (summary(loaded.statistics, dataset), *loaded.notes):
            tell(line)
        found.append(dataset)
    return found


def write(out: Path, datasets: Sequence[str], seeds: int, *, quick: bool = False) -> Reproduction:
    """Write tables and plots of all results in the folder whose settings are those of today."""
    runs = {
        run.name: run
        for name, (_, usual) in TABLES.items()
        for run in plan(name, list(dict.fromkeys((*usual, *datasets))), range(max(seeds, 5)), quick=quick)
    }
    results = tuple(result for run in runs.values() if (result := stored(out, run)) is not None)
    made = tuple(tables(results))
    write_atomically(out / "results.csv", as_csv(results).encode())
    write_atomically(out / "curves.csv", curves_as_csv(results).encode())
    write_atomically(out / "tables.md", as_markdown(made).encode())
    write_atomically(out / "report.html", render(made, results).encode())
    return Reproduction(results, made, out)


def execute(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, Result | TrainingError]]:
    """Run them, in this process or in several, and yield each as it ends."""
    if jobs == 1 or len(runs) < 2:
        for run in runs:
            yield run, _outcome(run, None)
        return
    with _processes(jobs) as pool:
        futures: dict[Future[Result | TrainingError], Run] = {pool.submit(_outcome, run, 1): run for run in runs}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                raise TrainingError(
                    "a process died; if memory was short, fewer --jobs need less. The same command goes on from here."
                ) from None


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Start worker processes; whatever happens, none is left behind."""
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads half
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_ignore_interrupts)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends us


def _outcome(run: Run, workers: int | None) -> Result | TrainingError:
    """Train, and return the result; a run that diverged is a result too."""
    train = run.config.train  # of which these keys decide what the parties hold
    asked = TrainConfig(method=train.method, labels=train.labels, task=train.task, seed=train.seed)
    loaded = _loaded(RunConfig(data=run.config.data, train=asked))
    try:
        simulation = simulate(loaded.parties, run.config, workers=workers, clock=time.process_time)
    except TrainingError as error:
        return error
    return result_of(run, simulation.report)


@functools.lru_cache(maxsize=2)
def _loaded(config: RunConfig) -> Loaded:
    return load(config)
