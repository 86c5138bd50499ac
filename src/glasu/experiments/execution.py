"""Run many runs, in this process or in several, and keep each result as soon as it is there."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from glasu.config import RunConfig, TrainConfig
from glasu.data.sources.catalog import Loaded, load
from glasu.errors import TrainingError
from glasu.experiments.plan import Run
from glasu.experiments.processes import end_with_the_parent, interrupts_blocked
from glasu.experiments.results import Result, result_of, store, stored
from glasu.runtime.simulation import SimulationOptions, simulate

Progress = Callable[[int, int, str], None]  # how many of how many are done, and the last of them in a line


def run_missing(out: Path, runs: Sequence[Run], jobs: int, progress: Progress = lambda done, total, line: None) -> None:
    """Run those whose results the folder does not hold; what diverged is told at the end, the rest is kept."""
    missing = [run for run in runs if stored(out, run) is None]
    done, failures = len(runs) - len(missing), []
    progress(done, len(runs), "runs were here already")
    for run, outcome in execute(missing, jobs):
        done += 1
        if isinstance(outcome, TrainingError):
            failures.append(f"{run.name}: {outcome}")
            progress(done, len(runs), failures[-1])
        else:
            store(out, run, outcome)
            progress(done, len(runs), outcome.summary())
    if failures:
        raise TrainingError(f"{len(failures)} of {len(runs)} runs failed; the first was {failures[0]}")


def execute(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, Result | TrainingError]]:
    """Run them and yield each as it ends."""
    if jobs == 1 or len(runs) < 2:
        for run in runs:
            yield run, _outcome(run, None)
        return
    with _processes(jobs) as pool:
        with interrupts_blocked():  # workers inherit it: Ctrl-C reaches all processes of a terminal, but ends us alone
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
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_the_parent)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise


def _outcome(run: Run, workers: int | None) -> Result | TrainingError:
    """Train, and return the result; a run that diverged is a result too."""
    train = run.config.train  # of which these keys decide what the parties hold
    asked = TrainConfig(method=train.method, labels=train.labels, task=train.task, seed=train.seed)
    loaded = _loaded(RunConfig(data=run.config.data, train=asked))
    try:
        options = SimulationOptions(workers=workers, notes=loaded.notes, clock=time.process_time)
        simulation = simulate(loaded.parties, run.config, options)
    except TrainingError as error:
        return error
    return result_of(run, simulation.report)


@functools.lru_cache(maxsize=2)
def _loaded(config: RunConfig) -> Loaded:
    return load(config)
