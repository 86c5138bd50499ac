"""Render reports of several runs as one self-contained HTML page: a table and learning curves."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from glasu.data.methods import has_server
from glasu.html_table import render_table
from glasu.model.task import Task, make_task
from glasu.report import RunReport, find_best_party

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")  # Okabe and Ito
TICKS = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]
BEST_PARTY = "best party"  # a longer name would widen the table of the demo to more than 80 columns
Curve = tuple[Sequence[float], Sequence[float]]  # positions and values
PLOT = {"displayModeBar": False, "responsive": True}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #d8dee4; }
th:first-child, td:first-child, .words { text-align: left; } th { color: #57606a; font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1rem; }
.wide { overflow-x: auto; }
.plots > div { min-width: 0; overflow: hidden; }
footer { color: #57606a; font-size: .85rem; margin-top: 2rem; }
"""


def list_headings(task: Task) -> tuple[str, ...]:
    """Return the headings of a table with one run per row."""
    return ("method", *(metric.title for metric in task.metrics), "MB", "exchanges", "seconds", "best at")


def format_row(report: RunReport) -> tuple[str, ...]:
    """Format the results of a run in the order of `list_headings`, without the first column."""
    metrics, scores = make_task(report.config.train).metrics, report.test.metrics
    return (
        # A server has no scores if the parties keep them.
        *(metric.format(scores[metric.name]) if metric.name in scores else "-" for metric in metrics),
        f"{report.traffic.total_bytes / 1e6:.1f}",
        f"{report.traffic.exchanges}",
        f"{report.seconds.total:.1f}",
        "-" if report.validation.round is None else f"{report.validation.round}",
    )


def format_rows(reports: Mapping[str, RunReport]) -> list[tuple[str, ...]]:
    """Format the rows of a table, one per run. After a run in which parties train alone, add a row for the best party.

    The best party has the best score on the validation nodes, by its model or by label propagation. The row contains
    only the first metric of the task, because the other metrics of the party are not known.
    """
    rows = []
    for name, report in reports.items():
        rows.append((name, *format_row(report)))
        best = find_best_party(report)
        if best is not None and len(report.parties) > 1 and not has_server(report.config):
            task = make_task(report.config.train)
            dashes = ["-"] * (len(list_headings(task)) - 2)
            rows.append((BEST_PARTY, task.metrics[0].format(best.test), *dashes))
    return rows


def render_report(title: str, introduction: str, reports: Mapping[str, RunReport]) -> str:
    """Return the page.

    Args:
        title: the heading.
        introduction: one or two sentences about the runs.
        reports: name -> report, in display order. All runs have the same task.
    """
    first = next(iter(reports.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    task = make_task(first.config.train)
    score = html.escape(task.selected_by.title)
    rows = format_rows(reports)
    curves = {name: _list_scores(report) for name, report in reports.items()}
    rounds = {name: ([entry.round for entry in report.history], curves[name]) for name, report in reports.items()}
    moved = {name: ([entry.bytes / 1e6 for entry in report.history], curves[name]) for name, report in reports.items()}
    title_of_scores = f"validation {task.selected_by.title}{' (%)' if task.selected_by.is_share else ''}"
    plots = draw_curves(rounds, "rounds", title_of_scores)
    plots += draw_curves(moved, "megabytes sent by all parties", title_of_scores, logarithmic=True)
    body = f"""{render_table(list_headings(task), rows)}
<h2>Validation {score} while training</h2>
<div class="plots">{plots}</div>
<p>Standalone and centralized training send no bytes. The right-hand plot shows their best validation {score} as dashed
lines.</p>
{_render_privacy(reports)}{_render_parties(reports)}"""
    footer = f"{versions}. Bytes count encoded messages, including evaluation."
    return render_page(title, introduction, body, footer)


def render_page(title: str, introduction: str, body: str, footer: str) -> str:
    """Return a complete HTML page with this body; it includes the plotting library."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>
<body><h1>{html.escape(title)}</h1><p>{html.escape(introduction)}</p>
{body}
<script>window.dispatchEvent(new Event("resize"))</script>
<footer>{html.escape(footer)}</footer>
</body></html>
"""


def draw_curves(curves: Mapping[str, Curve], x_title: str, y_title: str, *, logarithmic: bool = False) -> str:
    """Return a plot. A curve whose positions are all 0 becomes a dashed line at its largest value.

    Args:
        curves: name -> positions and values.
        x_title: title of the axis of positions.
        y_title: title of the axis of values.
        logarithmic: whether the axis of positions is logarithmic.
    """
    figure = go.Figure()
    for index, (name, (positions, values)) in enumerate(curves.items()):
        if not values:  # the report of a server whose parties keep the scores
            continue
        line = {"color": COLOURS[index % len(COLOURS)], "width": 2}
        if any(positions):
            figure.add_trace(go.Scatter(x=positions, y=values, name=name, mode="lines+markers", line=line))
        else:
            dashed = {**line, "dash": "dash"}
            figure.add_hline(max(values), line=dashed, annotation_text=name, annotation_font_color=line["color"])
    figure.update_layout(
        template="simple_white",
        height=400,
        margin={"l": 60, "r": 10, "t": 40, "b": 50},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        xaxis={"title": x_title, **({"type": "log", "tickvals": TICKS} if logarithmic else {})},
        yaxis={"title": y_title},
    )
    return f"<div>{figure.to_html(full_html=False, include_plotlyjs=False, config=PLOT)}</div>"


def _list_scores(report: RunReport) -> list[float]:
    """Return the validation scores, as per cent if they are shares."""
    metric = make_task(report.config.train).selected_by
    return [(100 if metric.is_share else 1) * entry.metrics[metric.name] for entry in report.history]


def _render_privacy(reports: Mapping[str, RunReport]) -> str:
    """Render the differential privacy of the runs with noise; return an empty string if no run has noise."""
    found = {name: report.privacy.differential_privacy for name, report in reports.items()}
    lines = [f"<p>{html.escape(f'{name}: {spent}')}</p>" for name, spent in found.items() if spent is not None]
    return f"<h2>Differential privacy</h2>{''.join(lines)}" if lines else ""


def _render_parties(reports: Mapping[str, RunReport]) -> str:
    """Render the data of each party, from the run with the most parties."""
    report = max(reports.values(), key=lambda item: len(item.parties))
    rows = [
        (party.name, f"{party.nodes:,}", f"{party.features or 0:,}", f"{party.edges or 0:,}")
        for party in report.parties
    ]
    return f"<h2>Data of each party</h2>{render_table(('party', 'nodes', 'features', 'edges'), rows)}"
