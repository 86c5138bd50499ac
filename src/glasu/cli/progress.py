"""Show the progress of a run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from glasu.protocol.requests import CandidateStarted, Evaluated, Evaluating, Event, RoundDone, WarmStepDone

if TYPE_CHECKING:
    from glasu.runtime.simulation_events import Observer
    from glasu.timing import Clock

_WRITING = threading.Lock()  # held while lines are written; parties and logs write from several threads
QUIET_SECONDS = 30.0  # seconds between two progress lines of one long operation, if there is no terminal


def describe_evaluation(event: Evaluated) -> str:
    """Return the result of an evaluation as one line."""
    metric = event.selected_by
    loss = "" if event.loss is None else f"loss {event.loss:.3f}, "
    who = f"{event.party}: " if event.party else "ensemble: " if event.ensemble else ""
    return f"{who}{loss}{event.split} {metric.title} {metric.format(event.metrics[metric.name])}"


def describe_progress(event: Evaluating | WarmStepDone) -> str:
    """Return the progress of an evaluation or of a warm start as one line."""
    if isinstance(event, WarmStepDone):
        return f"{event.party}: warm step {event.step}/{event.num_steps}, loss {event.loss:.3f}"
    return f"{event.party}: evaluating, {100 * event.share:.0f} % done"


class LineTimer:
    """Measures the time since the last line, so that a slow run writes a line at regular intervals."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.restart()

    def restart(self) -> None:
        """Reset the timer after a line was written."""
        self.last = self.clock()

    def is_over(self) -> bool:
        """Return whether another line is due."""
        return self.clock() - self.last > QUIET_SECONDS


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to standard error. Several threads may print at the same time; every line stays whole."""
    with _WRITING:
        for line in lines:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


@contextmanager
def show_progress(
    title: str, num_rounds: int, *, about: Iterable[str] = (), quiet: bool = False
) -> Iterator[Observer | None]:
    """Show the progress of a run on standard error during the block; yield the observer for its events.

    Args:
        title: the name of the run.
        num_rounds: T.
        about: lines about the data. They are shown with the first event, so a refused run prints only an error.
        quiet: show nothing.
    """
    console, introduction = Console(stderr=True), iter(about)
    if quiet:
        yield None
        return
    if not console.is_terminal:
        patience = LineTimer(time.monotonic)

        def write(event: Event) -> None:
            print_lines(introduction)
            if isinstance(event, Evaluated):
                patience.restart()
                print_lines([f"{title}: round {event.round}: {describe_evaluation(event)}"])
            elif isinstance(event, Evaluating) and patience.is_over():
                patience.restart()
                print_lines([f"{title}: round {event.round}: {describe_progress(event)}"])
            elif isinstance(event, WarmStepDone) and patience.is_over():
                patience.restart()
                print_lines([f"{title}: {describe_progress(event)}"])

        yield write
        return
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        task = progress.add_task(title, total=num_rounds, state="")

        def advance(event: Event) -> None:
            print_lines(introduction)  # printed above the progress bar, which redirects standard error
            if isinstance(event, CandidateStarted) and event.restarts:
                progress.reset(task, total=event.num_rounds)
            elif isinstance(event, CandidateStarted):
                progress.update(task, total=event.num_rounds)
            elif isinstance(event, RoundDone):
                progress.update(task, completed=max(event.round + 1, progress.tasks[task].completed))
            elif isinstance(event, Evaluating | WarmStepDone):
                progress.update(task, state=describe_progress(event))
            elif isinstance(event, Evaluated):
                progress.update(task, state=describe_evaluation(event))

        yield advance
