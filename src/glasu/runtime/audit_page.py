"""Render an audit as text for a terminal, and as one HTML page for a privacy officer. The page loads no other file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from glasu.html_table import render_table
from glasu.privacy.policy import RELEASE_KINDS
from glasu.report import align_columns
from glasu.runtime.audit import Audit, AuditCheck, AuditedLedger, AuditedRun, ReleaseTotal

if TYPE_CHECKING:
    from glasu.privacy.accounting import SpentEpsilon

HEADINGS = ("phase", "kind", "layer", "protection", "releases", "rows", "largest", "bytes", "first", "last")
WORDS = 4  # number of columns of HEADINGS that contain text
CHECK_MARKS = {"good": "OK", "note": "NOTE", "bad": "FAILED", "skipped": "SKIPPED"}
PAGE_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #d8dee4; vertical-align: top; }
td:not(.words) { white-space: nowrap; }
.words { text-align: left; } th { color: #57606a; font-weight: 600; white-space: nowrap; }
.wide { overflow-x: auto; } .mark { font-weight: 600; white-space: nowrap; }
.good { color: #116329; } .note, .skipped { color: #7d4e00; } .bad { color: #a40e26; }
.verdict { padding: .6rem 1rem; border-left: 4px solid currentColor; background: #f6f8fa; font-weight: 600; }
code { font-size: .85em; overflow-wrap: anywhere; } footer { color: #57606a; font-size: .85rem; margin-top: 2rem; }
@media print { body { max-width: none; } }
"""


def format_seconds_as_time(seconds: float | None) -> str:
    """Return a time in UTC, or a dash."""
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def describe_verdict(audit: Audit) -> str:
    """Return the result in one or two sentences."""
    failed, passed, skipped = audit.failures, audit.find("good"), audit.find("skipped")
    if failed:
        return f"{len(failed)} of {len(failed) + len(passed)} checks failed: do not rely on these ledgers."
    found = "1 check" if len(passed) == 1 else f"{len(passed)} checks"
    names = ", ".join(check.check for check in skipped)
    if skipped:
        return (
            f"{found} passed: no record before the last one was changed, moved or omitted. A record omitted at the end "
            f"of a ledger would not be noticed: there are no {names}."
        )
    return f"{found} passed: no record was changed, moved or omitted."


def describe_run(run: AuditedRun) -> str:
    """Return the heading of a run."""
    end = "finished" if run.finished else "not finished"
    processes = "1 process" if run.processes == 1 else f"{run.processes} processes"
    policy = "no policy" if not run.policy else f"policy SHA-256 {run.policy[:16]}"
    return f"{run.purpose}, run {run.run}: {end}, {processes}, {run.size:,} bytes in total, {policy}"


def list_total_cells(total: ReleaseTotal) -> tuple[str, ...]:
    """Return the cells of one row, in the order of HEADINGS."""
    layer = "-" if total.layer < 0 else str(total.layer)
    numbers = (total.releases, total.rows, total.largest, total.bytes)
    times = format_seconds_as_time(total.first), format_seconds_as_time(total.last)
    return total.phase, total.kind, layer, total.protection, *(f"{number:,}" for number in numbers), *times


def render_text(audit: Audit) -> str:
    """Return the audit as lines for a terminal."""
    lines = [f"{audit.folder}: {describe_verdict(audit)}", ""]
    for ledger in audit.ledgers:
        lines += [f"party {ledger.party}: {ledger.length} records in {ledger.file}"]
        for run in ledger.runs:
            lines += ["", f"  {describe_run(run)}"]
            lines += [f"    {line}" for line in align_columns([HEADINGS, *map(list_total_cells, run.totals)], WORDS)]
        if ledger.differential_privacy is not None:
            lines += ["", f"  differential privacy of all runs: {_describe_privacy(ledger.differential_privacy)}"]
        lines += [""]
    lines += [f"{CHECK_MARKS[check.level]:7}  {check.check}: {check.text}" for check in audit.checks]
    return "\n".join(lines)


def _describe_privacy(spent: SpentEpsilon) -> str:
    return f"{spent}. This holds if the party used a secret, as every party does in a run between machines."


def render_audit_page(audit: Audit, now: datetime, attacks: Sequence[Sequence[str]] = ()) -> str:
    """Return the HTML page.

    Args:
        audit: the findings.
        now: the time of the audit.
        attacks: the table of attacks; its first row contains the headings. If empty, the page has no such table.
    """
    attacked = ""
    if attacks:
        attacked = f"""<h2>Attacks</h2>
<p>The attacks read the recorded messages of the run. Only attacks whose names begin with "view of" compute the first
round again, with a dishonest server. A score is a leak only if it exceeds both chance and the score with the attacker's
own data. A better attack may recover more.</p>
{render_table(attacks[0], attacks[1:], WORDS)}
"""
    level = "bad" if audit.failures else "skipped" if audit.find("skipped") else "good"
    kinds = {total.kind: "" for ledger in audit.ledgers for run in ledger.runs for total in run.totals}
    meanings = [(kind, RELEASE_KINDS.get(kind, "see the documentation of this version")) for kind in kinds]
    when = f"{now.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>GLASU audit</title><style>{PAGE_STYLE}</style></head><body>
<h1>Data that left {html.escape(_list_parties(audit))}</h1>
<p>Folder <code>{html.escape(audit.folder)}</code>, audited on {when}.</p>
<p class="verdict {level}">{html.escape(describe_verdict(audit))}</p>
{_render_checks(audit.checks)}
<h2>Releases</h2>
<p>Every release was recorded in the ledger before its bytes were sent. The table lists the releases by phase, kind,
layer and protection. Protection <code>none</code> means that the server can read every number. Bytes do not include
message headers. If a round was repeated after a crash, its releases are counted each time. Times are in UTC.</p>
{"".join(map(_render_ledger, audit.ledgers))}
{attacked}<h2>Kinds of content</h2>
{render_table(("kind", "meaning"), meanings, 2)}
<footer>A hash chain proves that no record was changed, moved or omitted. It does not prove that no record was cut off
at the end. Only the heads that other parties recorded can prove this. A party that changes this program can release
data without an entry in the ledger.</footer>
</body></html>
"""


def _list_parties(audit: Audit) -> str:
    names = [ledger.party for ledger in audit.ledgers]
    return f"party {names[0]}" if len(names) == 1 else f"the parties {', '.join(names)}"


def _render_ledger(ledger: AuditedLedger) -> str:
    parts = [f"<h2>Party {html.escape(ledger.party)}</h2>"]
    parts += [f"<p>{ledger.length:,} records. Head <code>{html.escape(ledger.head or '-')}</code></p>"]
    for run in ledger.runs:
        parts += [f"<h3>{html.escape(describe_run(run))}</h3>"]
        parts += [
            render_table(HEADINGS, map(list_total_cells, run.totals), WORDS) if run.totals else "<p>No releases.</p>"
        ]
    if ledger.differential_privacy is not None:
        spent = html.escape(_describe_privacy(ledger.differential_privacy))
        parts += [f"<p>Differential privacy of all runs: {spent}</p>"]
    return "\n".join(parts)


def _render_checks(checks: Sequence[AuditCheck]) -> str:
    rows = "".join(
        f'<tr><td class="words mark {check.level}">{CHECK_MARKS[check.level]}</td>'
        f'<td class="words">{html.escape(check.check)}</td><td class="words">{html.escape(check.text)}</td></tr>'
        for check in checks
    )
    return f'<div class="wide"><table><tbody>{rows}</tbody></table></div>'
