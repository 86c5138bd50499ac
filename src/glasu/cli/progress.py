"""A live line per run: rounds done, loss, validation accuracy; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from glasu.protocol.messages import Evaluated, Event, RoundDone

if TYPE_CHECKING:
    from glasu.runtime.inprocess import Observer


def _describe(event: Evaluated) -> str:
    score = event.metrics.get("micro_f1", event.metrics["accuracy"])
    loss = "" if event.loss is None else f"loss {event.loss:.3f}, "
    who = f"{event.party}: " if event.party else ""
    return f"{who}{loss}{event.split} {100 * score:.1f} %"


@contextmanager
def shown(title: str, num_rounds: int, *, quiet: bool = False) -> Iterator[Observer]:
    """Show a run's progress on standard error while the block lasts; yields the observer of its events."""
    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:

        def write(event: Event) -> None:
            if isinstance(event, Evaluated):
                console.print(f"{title}: round {event.round}: {_describe(event)}", highlight=False)

        yield write
        return
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        task = progress.add_task(title, total=num_rounds, state="")

        def advance(event: Event) -> None:
            if isinstance(event, RoundDone):
                progress.update(task, completed=max(event.round + 1, progress.tasks[task].completed))
            else:
                progress.update(task, state=_describe(event))

        yield advance
