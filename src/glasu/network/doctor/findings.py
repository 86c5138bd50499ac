"""What the doctor finds, and the verdict: everybody reads the same, and nothing private is in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from glasu.errors import ProtocolError
from glasu.network.sanitize import printable

EVERYBODY = "server/parties"  # whose findings only a comparison shows; no party can have this name
Level = Literal["good", "warning", "bad"]
MOST_FINDINGS = 50


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    level: Level
    said: str  # everybody reads it: counts, versions, dates; neither ids nor values
    detail: str = ""  # shown where it was found, and sent to nobody

    def to_dict(self) -> dict[str, str]:
        """Return what the others may know."""
        return {"check": self.check, "level": self.level, "said": self.said}


@dataclass(frozen=True)
class Verdict:
    """All findings by role, the server's first; the same at every role."""

    findings: Mapping[str, Sequence[Finding]]

    @property
    def is_ready(self) -> bool:
        return not self._count("bad")

    def _count(self, level: Level) -> int:
        return sum(finding.level == level for found in self.findings.values() for finding in found)

    def lines(self) -> list[str]:
        """Return one line per finding."""
        width = max(map(len, self.findings))
        return [
            f"{role:<{width}}  {finding.level:<7}  {finding.check}: {finding.said}"
            for role, found in self.findings.items()
            for finding in found
        ]

    def in_words(self) -> str:
        """Return the verdict as a sentence or two."""
        warnings = self._count("warning")
        noted = f" {warnings} warning{'s' * (warnings > 1)}, see above." if warnings else ""
        if self.is_ready:
            roles = ", ".join(role for role in self.findings if role not in ("server", EVERYBODY))
            return f"ready: the server and {roles} can train together.{noted}"
        bad = [
            f"{role}: {finding.check}: {finding.said}"
            for role, found in self.findings.items()
            for finding in found
            if finding.level == "bad"
        ]
        said = f"not ready, {len(bad)} problem{'s' * (len(bad) > 1)}: {'; '.join(bad)}"
        return f"{said}{'' if said.endswith('?') else '.'}{noted}"


def to_plain(findings: Mapping[str, Sequence[Finding]]) -> dict[str, list[dict[str, str]]]:
    """Return findings as JSON has them, without their details."""
    return {role: [finding.to_dict() for finding in found] for role, found in findings.items()}


def from_plain(found: Any) -> list[Finding]:
    """Read the findings of somebody else, or refuse them: few, short, printable."""
    try:
        if len(found) > MOST_FINDINGS:
            raise ValueError
        return [_read(item) for item in found]
    except (TypeError, KeyError, ValueError):
        raise ProtocolError("its findings cannot be read; do both sides run the same version of GLASU?") from None


def _read(item: Mapping[str, Any]) -> Finding:
    if item["level"] not in get_args(Level):
        raise ValueError
    return Finding(printable(item["check"]), item["level"], printable(item["said"]))


def read_facts(stated: Any) -> dict[str, Any]:
    """Read what somebody else states about itself, or refuse it: few facts, counts or short text."""
    if not isinstance(stated, dict) or len(stated) > MOST_FINDINGS:
        raise ProtocolError("it does not state what can be compared; do both sides run the same version of GLASU?")
    return {printable(name): fact if isinstance(fact, int) else printable(fact) for name, fact in stated.items()}


def told(findings: list[Finding], tell: Callable[[str], None]) -> list[Finding]:
    """Tell what is known here and nowhere else, and return the findings."""
    for finding in findings:
        if finding.detail:
            tell(f"{finding.check}, only here: {finding.detail}")
    return findings
