"""Turn results into one self-contained HTML page: tables, and learning curves over rounds, bytes and time."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from glasu.experiments.plan import Plan
from glasu.experiments.results import Result
from glasu.experiments.tables import Table, group_by_cell, mean
from glasu.html_report import COLOURS, PLOT, TICKS, render_page

AXES = {"round": "rounds", "bytes": "megabytes sent by all parties", "seconds": "CPU seconds"}
Curves = Mapping[str, Sequence[Result]]  # name -> one result per seed


def render(tables: Sequence[Table], results: Sequence[Result], origin: str, plan: Plan) -> str:
    """Return the page; `origin` names the command and versions."""
    body = "".join(_section(table) for table in tables)
    cells = group_by_cell(results)
    for dataset in dict.fromkeys(dataset for dataset, _, _ in cells):
        methods = {
            run.method: cells.get((dataset, run.method, run.setting)) for run in plan.list_cells("accuracy", [dataset])
        }
        body += _plots(f"{dataset}: validation accuracy of the methods", methods, list(AXES))
        backbones: dict[str, Sequence[Result] | None] = {
            run.config.model.backbone: cells.get((dataset, run.method, run.setting))
            for run in plan.list_cells("backbones", [dataset])
        }
        if sum(found is not None for found in backbones.values()) > 1:
            body += _plots(f"{dataset}: validation accuracy of the backbones", backbones, ["round", "seconds"])
    return render_page(
        "The paper's experiments",
        "Each figure is the mean over the seeds. Models are chosen on validation nodes; test nodes are used once, at "
        "the end.",
        body,
        f"{origin or 'No results yet'}. Bytes count encoded messages, evaluation included.",
    )


def _section(table: Table) -> str:
    head = _cells("th", table.headings, table.words)
    rows = "".join(f"<tr>{_cells('td', row, table.words)}</tr>" for row in table.rows)
    return (
        f"<h2>{html.escape(table.title)}</h2><p>{html.escape(table.note)}</p>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _cells(tag: str, texts: Sequence[str], words: int) -> str:
    kinds = [' class="words"'] * words + [""] * (len(texts) - words)
    return "".join(f"<{tag}{kind}>{html.escape(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True))


def _plots(title: str, found: Mapping[str, Sequence[Result] | None], axes: Sequence[str]) -> str:
    curves = {name: results for name, results in found.items() if results}
    if not curves:
        return ""
    plots = "".join(
        f"<div>{_figure(curves, axis).to_html(full_html=False, include_plotlyjs=False, config=PLOT)}</div>"
        for axis in axes
    )
    return f'<h2>{html.escape(title)}</h2><div class="plots">{plots}</div>'


def average_curves(results: Sequence[Result], axis: str) -> tuple[list[float], list[float]]:
    """Return positions and validation accuracies in per cent, averaged over the seeds."""
    at: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for result in results:
        for point in result.curve:
            position = getattr(point, axis) / (1e6 if axis == "bytes" else 1)
            at[point.round].append((position, 100 * point.val_accuracy))
    whole = [at[step] for step in sorted(at) if len(at[step]) == len(results)]  # evaluations that every seed has
    return [mean(x for x, _ in points) for points in whole], [mean(y for _, y in points) for points in whole]


def _figure(curves: Curves, axis: str) -> Any:
    figure = go.Figure()
    for index, (name, results) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        positions, accuracy = average_curves(results, axis)
        if axis == "bytes" and not results[0].row.bytes:
            line = {"color": colour, "width": 2, "dash": "dash"}
            figure.add_hline(max(accuracy), line=line, annotation_text=name, annotation_font_color=colour)
            continue
        line, marker = {"color": colour, "width": 2}, {"size": 4}
        figure.add_trace(go.Scatter(x=positions, y=accuracy, name=name, mode="lines+markers", line=line, marker=marker))
    logarithmic = {} if axis == "round" else {"type": "log", "tickvals": TICKS}
    figure.update_layout(
        template="simple_white",
        height=400,
        margin={"l": 60, "r": 10, "t": 40, "b": 50},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        xaxis={"title": AXES[axis], **logarithmic},
        yaxis={"title": "validation accuracy (%)"},
    )
    return figure
