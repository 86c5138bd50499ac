"""Run tasks one after the other in this process, or in parallel in worker processes.

Only this process chooses tasks and stores results. A worker receives a task and returns a result. A worker does not
receive Ctrl-C; it ends when its parent ends.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, TypeVar

from glasu import registry
from glasu.config import RunConfig, TrainConfig
from glasu.errors import TrainingError

if TYPE_CHECKING:
    from glasu.data.sources.catalog import LoadedParties

Job = TypeVar("Job")
Output = TypeVar("Output")
KEPT_DATASETS = 4  # loaded data sets that are kept in memory; two seeds of a data set count as two


def run_tasks(
    work: Callable[[Job, int | None], Output], tasks: Iterator[Job], jobs: int
) -> Generator[tuple[Job, Output], None, None]:
    """Yield every task with its result, in the order in which the tasks finish.

    Args:
        work: a function that can be pickled. Its second argument is the number of clients that compute at the same
            time; None: one per core.
        tasks: the next task is taken when a worker is free, after the caller has seen all earlier results.
        jobs: number of worker processes; 1: run in this process.
    """
    if jobs <= 1:
        for task in tasks:
            yield task, work(task, None)
        return
    running: dict[Future[Output], Job] = {}
    try:
        with _start_pool(jobs) as pool:
            while True:
                with block_interrupts():  # a new task may start a process
                    for task in tasks:
                        running[pool.submit(work, task, 1)] = task
                        if len(running) == jobs:
                            break
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    yield running.pop(future), result
    except BrokenProcessPool:
        unfinished = ", ".join(map(str, running.values() or [task]))  # none runs if the pool refused the first task
        raise TrainingError(
            f"a process died; {unfinished} did not finish. If memory was short, use fewer --jobs. The same command "
            "continues from here."
        ) from None


@contextmanager
def _start_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Start the workers, and end all of them at the end of the block."""
    extensions = [extension.name for extension in registry.extensions()]
    context = multiprocessing.get_context("spawn")  # a forked process would have torch's locks but not its threads
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, context, _prepare_worker, (extensions,))
    try:
        yield pool
    finally:
        for worker in set(multiprocessing.active_children()) - before:
            worker.terminate()
        pool.shutdown(cancel_futures=True)


def _prepare_worker(extensions: Sequence[str]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in extensions:  # a spawned process has not loaded the extensions of its parent
        registry.load_extension(name)


def _end_with_parent() -> None:
    """End this process when its parent ends, even if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block. Processes that start in the block never receive Ctrl-C.

    Processes inherit the signal mask, so Ctrl-C in a terminal ends only their parent. The mask is not enough for the
    parent: any of its threads can receive a signal, and SQLAlchemy logs a traceback if it arrives during a query.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first new process would start it, and that unblocks SIGINT
    arrived: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # not SIGTERM, which ends the new processes
    try:
        yield
    finally:
        # SIGINT last: its handler raises KeyboardInterrupt, and the rest of this block would not run.
        signal.signal(signal.SIGTERM, handlers[signal.SIGTERM])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handlers[signal.SIGINT])
        if arrived:
            signal.raise_signal(arrived[0])


def load_once(config: RunConfig) -> LoadedParties:
    """Load the parties of a run. If several runs in this process use the same data, they share the loaded parties."""
    train = config.train
    keys = TrainConfig(method=train.method, labels=train.labels, task=train.task, seed=train.seed)
    return _load(RunConfig(data=config.data, train=keys))


@functools.lru_cache(maxsize=KEPT_DATASETS)
def _load(config: RunConfig) -> LoadedParties:
    from glasu.data.sources.catalog import load_data

    return load_data(config)
