"""The findings of a dry run, and the diagnosis. Every role receives the same text, so it contains nothing private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.records import Length

TOGETHER = "server/parties"  # used as the role for findings about several roles; no party can have this name
Level = Literal["good", "warning", "bad"]
MAX_FINDINGS = 50


@dataclass(frozen=True)
class Finding:
    """The result of one check. It may contain counts, versions and dates, but no ids and no values of the data."""

    check: Annotated[str, Length(200)]
    level: Level
    text: Annotated[str, Length(4000)]


Findings = Annotated[tuple[Finding, ...], Length(MAX_FINDINGS)]


@dataclass(frozen=True)
class Diagnosis:
    """All findings by role; the server is the first role. Every role receives the same diagnosis."""

    findings: Mapping[str, Findings]

    @property
    def is_ready(self) -> bool:
        return not self._select("bad")

    def _select(self, level: Level) -> list[tuple[str, Finding]]:
        pairs = [(role, finding) for role, found in self.findings.items() for finding in found]
        return [(role, finding) for role, finding in pairs if finding.level == level]

    def lines(self) -> list[str]:
        """Return one line per finding."""
        width = max(map(len, self.findings))
        return [
            f"{role:<{width}}  {finding.level:<7}  {finding.check}: {finding.text}"
            for role, found in self.findings.items()
            for finding in found
        ]

    def summary(self, what: str = "train together") -> str:
        """Return the diagnosis in one or two sentences. `what` is what the roles are ready to do."""
        bad, warnings = self._select("bad"), len(self._select("warning"))
        noted = f" {warnings} warning{'s' * (warnings > 1)}, see above." if warnings else ""
        if not bad:
            roles = ", ".join(role for role in self.findings if role not in ("server", TOGETHER))
            return f"ready: the server and {roles} can {what}.{noted}"
        listed = "; ".join(f"{role}: {finding.check}: {finding.text}" for role, finding in bad)
        text = f"not ready, {len(bad)} problem{'s' * (len(bad) > 1)}: {listed}"
        return f"{text}{'' if text.endswith('?') else '.'}{noted}"


def sanitize_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings of another role with unprintable characters replaced and long texts cut."""
    return tuple(
        Finding(make_printable(each.check), each.level, make_printable(each.text, MAX_REASON)) for each in findings
    )
