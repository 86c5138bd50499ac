"""Sanitize text of a peer for terminals and logs: one line, printable, of limited length."""

from __future__ import annotations

from typing import Any

SENTENCES = 1200  # greatest length of a reason
MAX_LINES = 50  # of a table


def printable(text: Any, most: int = 300) -> str:
    """Return text without control characters, cut to `most` characters."""
    shown = str(text)
    cut = shown if len(shown) <= most else f"{shown[: most - 3]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def printable_lines(table: Any) -> list[str]:
    """Return the lines of a table as printable text; nothing if it is not a list."""
    return [printable(line) for line in table[:MAX_LINES]] if isinstance(table, list) else []
