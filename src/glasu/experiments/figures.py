"""Turn results into one self-contained HTML page: tables, and learning curves over rounds, bytes and time."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from glasu.experiments.plan import Plan
from glasu.experiments.results import RunResult
from glasu.experiments.tables import TextTable, group_by_cell
from glasu.html_report import draw_curves, render_page
from glasu.html_table import render_table

AXES = {"round": "rounds", "bytes": "megabytes sent by all parties", "seconds": "CPU seconds"}


def render(tables: Sequence[TextTable], results: Sequence[RunResult], origin: str, plan: Plan) -> str:
    """Return the page; `origin` names the command and versions."""
    body = "".join(_render_section(table) for table in tables)
    cells = group_by_cell(results)
    for dataset in dict.fromkeys(dataset for dataset, _, _ in cells):
        methods = {
            run.method: cells.get((dataset, run.method, run.setting)) for run in plan.list_cells("accuracy", [dataset])
        }
        body += _render_plots(f"{dataset}: validation accuracy of the methods", methods, list(AXES))
        backbones: dict[str, Sequence[RunResult] | None] = {
            run.config.model.backbone: cells.get((dataset, run.method, run.setting))
            for run in plan.list_cells("backbones", [dataset])
        }
        if sum(found is not None for found in backbones.values()) > 1:
            body += _render_plots(f"{dataset}: validation accuracy of the backbones", backbones, ["round", "seconds"])
    return render_page(
        "The paper's experiments",
        "Each figure is the mean over the seeds. Models are chosen on validation nodes; test nodes are used once, at "
        "the end.",
        body,
        f"{origin or 'No results yet'}. Bytes count encoded messages, evaluation included.",
    )


def _render_section(table: TextTable) -> str:
    title, note = html.escape(table.title), html.escape(table.note)
    return f"<h2>{title}</h2><p>{note}</p>{render_table(table.headings, table.rows, table.words)}"


def _render_plots(title: str, found: Mapping[str, Sequence[RunResult] | None], axes: Sequence[str]) -> str:
    named = {name: results for name, results in found.items() if results}
    if not named:
        return ""
    plots = "".join(
        draw_curves(
            {name: average_curves(results, axis) for name, results in named.items()},
            AXES[axis],
            "validation accuracy (%)",
            logarithmic=axis != "round",
        )
        for axis in axes
    )
    return f'<h2>{html.escape(title)}</h2><div class="plots">{plots}</div>'


def average_curves(results: Sequence[RunResult], axis: str) -> tuple[list[float], list[float]]:
    """Return the positions on the axis, and the validation accuracies in per cent; both are means over the seeds."""
    at: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for result in results:
        for point in result.curve:
            position = getattr(point, axis) / (1e6 if axis == "bytes" else 1)
            at[point.round].append((position, 100 * point.val_accuracy))
    whole = [at[step] for step in sorted(at) if len(at[step]) == len(results)]  # evaluations that every seed has
    return [fmean(x for x, _ in points) for points in whole], [fmean(y for _, y in points) for points in whole]
