"""Render reports of several runs as one self-contained HTML page: a table and learning curves."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from glasu.model.task import Task, task_of
from glasu.report import HistoryEntry, RunReport

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")  # Okabe and Ito
TICKS = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]
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
.key { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .5em; }
footer { color: #57606a; font-size: .85rem; margin-top: 2rem; }
"""


def list_headings(task: Task) -> tuple[str, ...]:
    """Return the headings of a table with one run per row."""
    return ("method", *(metric.title for metric in task.metrics), "MB", "exchanges", "seconds", "best at")


def format_row(report: RunReport) -> tuple[str, ...]:
    """Format the figures of a run in the order of `list_headings`, without the first."""
    metrics = task_of(report.config.train).metrics
    return (
        *(metric.format(report.test.metrics[metric.name]) for metric in metrics),
        f"{report.traffic.total_bytes / 1e6:.1f}",
        f"{report.traffic.exchanges}",
        f"{report.seconds.total:.1f}",
        "-" if report.validation.round is None else f"{report.validation.round}",
    )


def render_report(title: str, introduction: str, reports: Mapping[str, RunReport]) -> str:
    """Return the page.

    Args:
        title: the heading.
        introduction: one or two sentences about the runs.
        reports: name -> report, in display order; all of one task.
    """
    rounds = _draw_curves(reports, "round", "rounds")
    moved = _draw_curves(reports, "bytes", "megabytes sent by all parties")
    plots = "".join(
        f"<div>{figure.to_html(full_html=False, include_plotlyjs=False, config=PLOT)}</div>"
        for figure in (rounds, moved)
    )
    first = next(iter(reports.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    score = html.escape(task_of(first.config.train).selected_by.title)
    body = f"""{_render_table(reports)}
<h2>Validation {score} while training</h2>
<div class="plots">{plots}</div>
<p>Standalone and centralized training send no bytes. The right-hand plot shows their best validation {score} as dashed
lines.</p>
{_render_parties(reports)}"""
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


def _render_table(reports: Mapping[str, RunReport]) -> str:
    task = task_of(next(iter(reports.values())).config.train)
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in list_headings(task))
    rows = ""
    for colour, (name, report) in zip(_list_colours(reports), reports.items(), strict=True):
        key = f'<span class="key" style="background:{colour}"></span>{html.escape(name)}'
        rows += f"<tr><td>{key}</td>{''.join(f'<td>{cell}</td>' for cell in format_row(report))}</tr>"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _render_parties(reports: Mapping[str, RunReport]) -> str:
    """Render the data of each party, from the run with the most parties."""
    report = max(reports.values(), key=lambda item: len(item.parties))
    rows = "".join(
        f"<tr><td>{html.escape(party.name)}</td><td>{party.nodes:,}</td><td>{party.features or 0:,}</td>"
        f"<td>{party.edges or 0:,}</td></tr>"
        for party in report.parties
    )
    head = "<tr><th>party</th><th>nodes</th><th>features</th><th>edges</th></tr>"
    return f"<h2>Data of each party</h2><table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _list_colours(reports: Mapping[str, RunReport]) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(len(reports))]


def _draw_curves(reports: Mapping[str, RunReport], axis: str, label: str) -> Any:
    figure = go.Figure()
    metric = task_of(next(iter(reports.values())).config.train).selected_by
    unit, factor = (" %", 100) if metric.is_share else ("", 1)
    for colour, (name, report) in zip(_list_colours(reports), reports.items(), strict=True):
        scores = [factor * entry.metrics[metric.name] for entry in report.history]
        silent = axis == "bytes" and not report.traffic.messages
        if silent:
            figure.add_hline(max(scores), line={"color": colour, "width": 2, "dash": "dash"})
            continue
        figure.add_trace(
            go.Scatter(
                x=_list_positions(report.history, axis),
                y=scores,
                name=name,
                mode="lines+markers",
                line={"color": colour, "width": 2},
                marker={"size": 5},
                hovertemplate=f"%{{y:.1f}}{unit}<extra>" + html.escape(name) + "</extra>",
            )
        )
    figure.update_layout(
        template="simple_white",
        height=400,
        margin={"l": 60, "r": 10, "t": 10, "b": 50},
        showlegend=axis == "round",
        legend={"x": 0.98, "y": 0.02, "xanchor": "right", "yanchor": "bottom"},
        xaxis={"title": label, **({"type": "log", "tickvals": TICKS} if axis == "bytes" else {})},
        yaxis={"title": f"validation {metric.title}{' (%)' if unit else ''}"},
        hovermode="x unified" if axis == "round" else "closest",
    )
    return figure


def _list_positions(history: Sequence[HistoryEntry], axis: str) -> list[float]:
    return [entry.bytes / 1e6 if axis == "bytes" else entry.round for entry in history]
