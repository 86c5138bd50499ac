"""The server of a dry run: collect the reports of all parties, compare them, and send one verdict. No torch here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from glasu.config import RunConfig
from glasu.errors import AbsenceError
from glasu.network.admission import refuse_other_purpose
from glasu.network.compatibility import collect_findings, config_for_network
from glasu.network.doctor.machine import check_disk
from glasu.network.facts import Facts, server_facts
from glasu.network.findings import TOGETHER, Finding, PartyReport, Verdict, sanitize_findings
from glasu.network.handshake import Hello, Payload, Welcome, read_payload
from glasu.network.options import Listening, ServeOptions
from glasu.network.server_session import ServerSession
from glasu.network.transport import Listener
from glasu.records import to_plain
from glasu.report import versions

DRY_RUN = "dry-run"  # stands for the id of a run
DISK_BYTES = 64 << 20  # checkpoints of the server hold histories, and the report is small
GOODBYE_SECONDS = 2.0  # for the parties to receive the verdict


class DryRunHandshake:
    """Admits every party of the roster and keeps its report. It takes no part in fencing and writes no state."""

    def __init__(self, facts: Facts, config: RunConfig, roster: Sequence[str], now: Callable[[], float]) -> None:
        self._facts, self._config, self._roster, self._now = facts, config, tuple(roster), now
        self.reports: dict[str, PartyReport] = {}

    def admit(self, party: str, hello: Payload, *, closing: bool) -> Payload:
        """Welcome a party whose purpose is a dry run, too."""
        stated = read_payload(Hello, hello, f"the hello of party {party!r}")
        refuse_other_purpose(self._facts, stated.facts)
        index, config = self._roster.index(party), self._config.to_dict()
        return to_plain(Welcome(config=config, roster=self._roster, index=index, run=DRY_RUN, now=self._now()))

    def prepare(self, party: str, statement: Payload) -> Sequence[str]:
        """Keep the report of a party."""
        self.reports[party] = read_payload(PartyReport, statement, f"the report of party {party!r}")
        return ()

    def withdraw(self, party: str) -> None:
        """Forget the report of a party."""
        self.reports.pop(party, None)

    def settle(self) -> None:
        """A dry run has no attempt."""


def examine(options: ServeOptions, own: Sequence[Finding], now: Callable[[], float] = time.time) -> Verdict:
    """Wait for the reports of all parties, or for `options.wait` seconds; return the verdict that all receive.

    Args:
        options: as for `serve`.
        own: findings at the server so far.
        now: the server's clock, in seconds.
    """
    roster = options.kit.roster
    facts = server_facts(versions(), "dry run")
    handshake = DryRunHandshake(facts, config_for_network(options.config, roster), roster, now)
    session = ServerSession(roster, handshake, DRY_RUN, wait=options.wait, log=options.log, on_invalid_message="wait")
    with Listener(session.host, options.kit, options.listen) as listener:
        listener.start()
        options.emit(Listening(listener.port))
        try:
            session.gather()
        except AbsenceError as error:
            options.log.info("%s", error)
        verdict = judge(facts, [*own, check_disk(options.out, DISK_BYTES)], dict(handshake.reports), roster)
        session.dismiss(GOODBYE_SECONDS, to_plain(verdict))
    return verdict


def judge(facts: Facts, own: Sequence[Finding], reports: dict[str, PartyReport], roster: Sequence[str]) -> Verdict:
    """Return the findings of all roles, and of the comparison between them."""
    absent = (Finding("presence", "bad", "no report; is glasu doctor running there, and what does it say?"),)
    findings = {"server": tuple(own)}
    for name in roster:
        findings[name] = sanitize_findings(reports[name].findings) if name in reports else absent
    stated = {name: reports[name].facts for name in roster if name in reports}
    return Verdict({**findings, TOGETHER: tuple(collect_findings(facts, stated))})
