"""Run tasks one after the other in this process, or side by side in worker processes.

This process alone chooses tasks and writes results. A worker receives an argument and returns a result, ends when its
parent ends, and leaves Ctrl-C to its parent.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, Protocol

from glasu import registry
from glasu.errors import GlasuError, TrainingError

Report = Callable[..., bool]  # an interim result -> True to stop the task
Work = Callable[[Any, Report, int | None], Any]  # argument, report, clients that compute at the same time -> result


class Task(Protocol):
    """A task. Its methods are called in this process."""

    @property
    def name(self) -> str:
        """Describe the task in messages."""

    @property
    def argument(self) -> Any:
        """Return the argument of the work; it can be pickled."""

    def report(self, *values: Any) -> bool:
        """Record an interim result; return True to stop the task."""

    def finish(self, result: Any) -> None:
        """Record the result."""


def run_tasks(work: Work, begin: Callable[[], Task | None], jobs: int) -> None:
    """Run tasks until there are no more.

    Args:
        work: a function that can be pickled. It uses all cores if `jobs` is 1.
        begin: returns the next task, or None.
        jobs: number of worker processes; 1: run in this process.
    """
    if jobs > 1:
        _run_in_processes(work, begin, jobs)
        return
    while (task := begin()) is not None:
        task.finish(work(task.argument, task.report, None))


def _run_in_processes(work: Work, begin: Callable[[], Task | None], jobs: int) -> None:
    with _start_processes(work, jobs) as processes:
        tasks: dict[Connection, Task] = {}
        for connection in processes:
            _assign(connection, begin(), tasks)
        while tasks:
            ready = wait(list(tasks))
            for connection, task in [item for item in tasks.items() if item[0] in ready]:
                try:
                    kind, *content = connection.recv()
                except (EOFError, ConnectionError):
                    _raise_death(processes[connection], task)
                if kind == "error":
                    error, where = content
                    error.add_note(where)
                    raise error
                if kind == "report":
                    _send(connection, task.report(*content))
                else:
                    task.finish(*content)
                    del tasks[connection]
                    _assign(connection, begin(), tasks)


def _assign(connection: Connection, task: Task | None, tasks: dict[Connection, Task]) -> None:
    if task is not None:
        _send(connection, task.argument)
        tasks[connection] = task


def _send(connection: Connection, content: Any) -> None:
    with suppress(ConnectionError):  # the process died; the next recv() raises
        connection.send(content)


def _raise_death(process: BaseProcess, task: Task) -> NoReturn:
    process.join(10)
    raise TrainingError(
        f"the process of {task.name} died with exit code {process.exitcode}; if memory was short, use fewer --jobs. "
        "The same command continues from here."
    )


@contextmanager
def _start_processes(work: Work, jobs: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Start the workers, and end all of them with the block."""
    context = multiprocessing.get_context("spawn")  # a forked process has torch's locks but not its threads
    processes: dict[Connection, BaseProcess] = {}
    extensions = [extension.name for extension in registry.extensions()]
    try:
        for index in range(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, work, extensions), name=f"glasu-worker-{index}", daemon=True
            )
            processes[ours] = process
            with block_interrupts():
                process.start()
            theirs.close()
        yield processes
    finally:
        for connection, started in processes.items():
            if started.pid is not None:
                started.terminate()
                started.join()
            connection.close()


def _serve(connection: Connection, work: Work, extensions: Sequence[str]) -> None:
    """Work on every argument that arrives, until the parent closes the connection."""
    _end_with_parent()
    for name in extensions:  # this process was spawned, so it has none of its parent's
        registry.load_extension(name)
    report = functools.partial(_report, connection)
    with suppress(EOFError, ConnectionError):
        while True:
            argument = connection.recv()
            try:
                message: tuple[Any, ...] = ("done", work(argument, report, 1))
            except Exception as error:
                message = ("error", _make_picklable(error), traceback.format_exc())
            connection.send(message)


def _report(connection: Connection, *values: Any) -> bool:
    connection.send(("report", *values))
    return bool(connection.recv())


def _make_picklable(error: Exception) -> Exception:
    """Return errors of GLASU and the system unchanged; other errors may not survive pickling."""
    known = isinstance(error, (GlasuError, OSError, MemoryError))
    return error if known else RuntimeError(f"{type(error).__name__}: {error}")


def _end_with_parent() -> None:
    """End this process when its parent ends, also if the parent was killed."""

    def wait_for_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block SIGINT while processes start. They inherit the mask, so Ctrl-C in a terminal ends only their parent."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first process starts it, and that unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
