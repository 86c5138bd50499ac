"""A live line per run: rounds done, loss, validation accuracy; plain lines where there is no terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from glasu.protocol.requests import Evaluated, Evaluating, Event, RoundDone

if TYPE_CHECKING:
    from glasu.runtime.simulation import Observer
    from glasu.timing import Clock

SILENCE = 30.0  # seconds between two lines about one long evaluation, where there is no terminal


def describe(event: Evaluated) -> str:
    """Say what an evaluation found."""
    score = event.metrics.get("micro_f1", event.metrics["accuracy"])
    loss = "" if event.loss is None else f"loss {event.loss:.3f}, "
    who = f"{event.party}: " if event.party else ""
    return f"{who}{loss}{event.split} {100 * score:.1f} %"


def so_far(event: Evaluating) -> str:
    """Say how far an evaluation is."""
    return f"{event.party}: evaluating, {100 * event.share:.0f} % done"


class Patience:
    """Tells when the last line is so long ago that somebody may wonder whether the run is alive."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.begin()

    def begin(self) -> None:
        """Note that a line was written just now."""
        self.last = self.clock()

    def is_over(self) -> bool:
        """Tell whether it is time for a line."""
        return self.clock() - self.last > SILENCE


def say(lines: Iterable[str], console: Console | None = None) -> None:
    """Print lines on standard error, each whole and as it is."""
    console = console or Console(stderr=True)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def log_shown(command: str) -> Iterator[None]:
    """Write the library's log lines for people to standard error while the block lasts."""
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: say([f"{command}: {record.getMessage()}"])  # type: ignore[method-assign]
    logger = logging.getLogger("glasu")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def counted(title: str, *, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Show on standard error how many things are done; yields a function (done, total, the last one in words)."""
    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        yield lambda done, total, line: say([f"{done}/{total} {line}" if total else line], console)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task(title)

        def advance(done: int, total: int, line: str) -> None:
            progress.update(task, completed=done, total=total or None)
            say([line], progress.console)

        yield advance


@contextmanager
def shown(title: str, num_rounds: int, *, about: Iterable[str] = (), quiet: bool = False) -> Iterator[Observer]:
    """Show a run's progress on standard error while the block lasts; yields the observer of its events.

    Args:
        title: of the run.
        num_rounds: T.
        about: lines on the data, shown with the first event: a run that is refused says one line only.
        quiet: show nothing.
    """
    console, introduction = Console(stderr=True, quiet=quiet), iter(about)
    if not console.is_terminal:
        patience = Patience(time.monotonic)

        def write(event: Event) -> None:
            say(introduction, console)
            if isinstance(event, Evaluated):
                patience.begin()
                console.print(f"{title}: round {event.round}: {describe(event)}", highlight=False)
            elif isinstance(event, Evaluating) and patience.is_over():
                patience.begin()
                console.print(f"{title}: round {event.round}: {so_far(event)}", highlight=False)

        yield write
        return
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        task = progress.add_task(title, total=num_rounds, state="")

        def advance(event: Event) -> None:
            say(introduction, progress.console)
            if isinstance(event, RoundDone):
                progress.update(task, completed=max(event.round + 1, progress.tasks[task].completed))
            elif isinstance(event, Evaluating):
                progress.update(task, state=so_far(event))
            else:
                progress.update(task, state=describe(event))

        yield advance
