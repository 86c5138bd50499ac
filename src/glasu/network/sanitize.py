"""Text that somebody else sent, as it may stand on a terminal and in a log: one line, printable, not too long."""

from __future__ import annotations

from typing import Any

SENTENCES = 1200  # letters of a reason that is passed on
MOST_LINES = 50  # of a table


def printable(text: Any, most: int = 300) -> str:
    """Return text of a stranger without what a terminal would obey; what is longer is cut."""
    shown = str(text)
    cut = shown if len(shown) <= most else f"{shown[: most - 3]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def printable_lines(table: Any) -> list[str]:
    """Return the lines of a stranger's table; of what is none, nothing."""
    return [printable(line) for line in table[:MOST_LINES]] if isinstance(table, list) else []
