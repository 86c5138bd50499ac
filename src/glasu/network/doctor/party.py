"""A party in a dry run: check its own machine and data, state counts and digests, and receive the verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.errors import GlasuError
from glasu.network.compatibility import compare_with_agreed, in_one_line, read_offered_config
from glasu.network.doctor.data import check_data, check_settings
from glasu.network.doctor.machine import check_connection, judge_clock, log_detail
from glasu.network.facts import party_facts
from glasu.network.findings import Finding, Verdict, sanitize_findings
from glasu.network.handshake import Payload, RefusalError
from glasu.network.join import PartyPurpose, join
from glasu.network.options import JoinOptions
from glasu.network.payloads import Hello, Prepared, Welcome, read_payload
from glasu.network.sanitize import printable
from glasu.records import to_plain

FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0  # seconds between attempts to connect
NOTICE_EVERY = 30.0  # seconds between two lines about an absent server


class DryRunParty(PartyPurpose[Verdict]):
    """A party in a dry run. It takes no incarnation and writes no state."""

    def __init__(
        self,
        options: JoinOptions,
        party: PartyData | None,
        own: Sequence[Finding] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        """Report the findings so far, and what the server's welcome lets this party check.

        Args:
            options: the kit and the server; nothing is written to the folder.
            party: None if the data could not be read, which is among the findings.
            own: findings so far.
            now: this machine's clock.
        """
        super().__init__(options, party)
        self.findings = [*own, *([] if party is None else check_data(party, options.log))]
        self._party, self._now = party, now
        self._facts = party_facts(party, "dry run")
        self._asked = math.nan  # when the hello was sent
        self._verdict: Verdict | None = None

    def hello(self) -> Payload:
        """Return the versions of this party; its data is part of the statement."""
        self._asked = self._now()
        return to_plain(Hello(facts=party_facts(None, "dry run"), process=None))

    def accept(self, offered: Welcome) -> None:
        """Check the clock and the settings that the server offers."""
        heard, options = self._now(), self.options
        if offered.now is not None:  # read between asking and hearing
            middle, uncertainty = (self._asked + heard) / 2, (heard - self._asked) / 2
            self.findings.append(judge_clock(middle - offered.now, uncertainty))
        try:
            config = read_offered_config(offered.config)
        except RefusalError as error:  # for example a choice of an extension that is not loaded here
            log_detail(options.log, "settings", str(error))
            self.findings.append(Finding("settings", "bad", "they cannot be read here; see that party's log"))
            return
        if options.expect is not None:
            self.findings.append(_compare_expected(config, options.expect))
        if self._party is not None:
            found, labels = check_settings(config, self._party, offered.roster, options)
            self.findings += found
            self._facts = party_facts(self._party, "dry run", **labels)

    def statement(self) -> Payload:
        """Return the facts and findings of this party."""
        return to_plain(Prepared(facts=self._facts, findings=tuple(self.findings)))

    def hear(self, farewell: Payload) -> None:
        """Take the verdict, as it may be printed."""
        verdict = read_payload(Verdict, farewell, "the verdict of the server")
        self._verdict = Verdict({printable(role): sanitize_findings(found) for role, found in verdict.findings.items()})

    def result(self) -> Verdict | None:
        """Return the verdict, once the server has sent it."""
        return self._verdict

    def reach_server(self, notice_every: float) -> None:
        """Try to reach the server, again and again while it may not have been started yet."""
        options, delay = self.options, FIRST_DELAY
        start, noticed = time.monotonic(), -math.inf
        while True:
            now = datetime.fromtimestamp(self._now(), UTC)
            finding, may_come = check_connection(options.kit, options.server, now)
            if not may_come or time.monotonic() - start + delay > options.wait:
                self.findings.append(finding)
                return
            if time.monotonic() - noticed >= notice_every:
                options.log.info("waiting for the server: %s", finding.said)
                noticed = time.monotonic()
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)


def visit(purpose: DryRunParty, notice_every: float = NOTICE_EVERY) -> Verdict:
    """Take part in a dry run and return the verdict; if the server cannot be reached, this party's own findings."""
    purpose.reach_server(notice_every)
    if purpose.findings[-1].level != "bad":
        try:
            return join(purpose)
        except GlasuError as error:
            purpose.findings.append(Finding("server", "bad", str(error).rstrip(".")))
    return Verdict({purpose.options.kit.name: tuple(purpose.findings)})


def _compare_expected(config: RunConfig, expect: RunConfig) -> Finding:
    """Compare the server's settings with those of --expect."""
    differences = compare_with_agreed(config, expect)
    if not differences:
        return Finding("agreed settings", "good", "the server's are those of --expect")
    listed = in_one_line(differences)
    return Finding("agreed settings", "bad", f"the server's differ from --expect: {listed}; agree on one run file")
