"""Run trials one after the other in this process, or side by side in processes of their own.

The study stays with this process alone: workers are sent points and send back scores, so nothing is asked twice, and a
worker that outlives a killed search writes nowhere.
"""

from __future__ import annotations

import functools
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, Protocol

from glasu.errors import GlasuError, TrainingError
from glasu.experiments.outcome import Outcome, Terms
from glasu.experiments.processes import end_with_the_parent, interrupts_blocked
from glasu.experiments.space import Point, label


class Trial(Protocol):
    """A trial that has begun."""

    @property
    def point(self) -> Point: ...

    def report(self, marks: Sequence[int], score: float) -> bool:
        """Note the score so far; True gives the trial up."""

    def finish(self, outcome: Outcome) -> None:
        """Note the end."""


Begin = Callable[[], Trial | None]  # the next trial, or None: there are enough


def run_here(terms: Terms, begin: Begin) -> None:
    """Run trials one after the other; the clients of a run compute at once."""
    from glasu.experiments.trial import load_once, run_trial

    load = load_once()
    while (trial := begin()) is not None:
        trial.finish(run_trial(terms, trial.point, load, trial.report))


def run_in_processes(terms: Terms, begin: Begin, jobs: int) -> None:
    """Run trials side by side, one per process; a process that fails ends the search."""
    with _processes(terms, jobs) as processes:
        trials: dict[Connection, Trial] = {}
        for connection in processes:
            _give(connection, begin(), trials)
        while trials:
            ready = wait(list(trials))
            for connection, trial in [item for item in trials.items() if item[0] in ready]:
                try:
                    kind, *content = connection.recv()
                except (EOFError, ConnectionError):
                    _died(processes[connection], trial)
                if kind == "error":
                    error, where = content
                    error.add_note(where)
                    raise error
                if kind == "report":
                    _send(connection, trial.report(*content))
                else:
                    trial.finish(*content)
                    del trials[connection]
                    _give(connection, begin(), trials)


def _give(connection: Connection, trial: Trial | None, trials: dict[Connection, Trial]) -> None:
    if trial is not None:
        _send(connection, trial.point)
        trials[connection] = trial


def _send(connection: Connection, content: Any) -> None:
    with suppress(ConnectionError):  # the process has died; receiving from it will tell
        connection.send(content)


def _died(process: BaseProcess, trial: Trial) -> NoReturn:
    process.join(10)
    where = ", ".join(f"{key}={label(value)}" for key, value in trial.point.items())
    raise TrainingError(
        f"the process of a trial died with exit code {process.exitcode} ({where}); where memory was short, fewer "
        "--jobs need less. The same command goes on from here."
    )


@contextmanager
def _processes(terms: Terms, jobs: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Start the workers; whatever happens, none is left behind."""
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads half
    processes: dict[Connection, BaseProcess] = {}
    try:
        for index in range(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, terms), name=f"glasu-search-{index}", daemon=True)
            processes[ours] = process
            with interrupts_blocked():
                process.start()
            theirs.close()
        yield processes
    finally:
        for connection, started in processes.items():
            if started.pid is not None:
                started.terminate()
                started.join()
            connection.close()


def _work(connection: Connection, terms: Terms) -> None:
    """Do what comes in until the other side ends it."""
    end_with_the_parent()
    from glasu.experiments.trial import load_once, run_trial

    load, report = load_once(), functools.partial(_ask, connection)
    with suppress(EOFError, ConnectionError):  # the other side has left
        while True:
            point = connection.recv()
            try:
                message: tuple[Any, ...] = ("done", run_trial(terms, point, load, report, workers=1))
            except Exception as error:
                message = ("error", _sendable(error), traceback.format_exc())
            connection.send(message)


def _ask(connection: Connection, marks: Sequence[int], score: float) -> bool:
    connection.send(("report", marks, score))
    return bool(connection.recv())


def _sendable(error: Exception) -> Exception:
    """Return an error of ours or of the system; of others, which may not survive the way, what they say."""
    ours = isinstance(error, (GlasuError, OSError, MemoryError))
    return error if ours else RuntimeError(f"{type(error).__name__}: {error}")
