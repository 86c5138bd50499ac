"""Render a table as HTML. This module imports neither plotly nor torch, because the page of an audit needs neither."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def render_table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Return a table. The first `words` columns hold text, the others numbers."""
    kinds = [' class="words"' if index < words else "" for index in range(len(headings))]

    def render_cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f"<{tag}{kind}>{html.escape(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    body = "".join(f"<tr>{render_cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{render_cells('th', headings)}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'
