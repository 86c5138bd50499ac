"""A party in a dry run: check its own machine and data, report counts and digests, and receive the verdict."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.errors import GlasuError, ProtocolError
from glasu.network.client_session import ClientSession
from glasu.network.compatibility import compare_with_agreed, in_one_line, read_offered_config
from glasu.network.connection import Dialing
from glasu.network.doctor.data import check_data, check_settings
from glasu.network.doctor.machine import check_connection, judge_clock, log_detail
from glasu.network.findings import Finding, PartyReport, Verdict, sanitize_findings
from glasu.network.handshake import Hello, Payload, RefusalError, Welcome, read_payload
from glasu.network.log_lines import printable
from glasu.network.party_setup import party_facts
from glasu.pki.kit import Kit
from glasu.protocol.message_bytes import Head
from glasu.records import to_plain

FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0  # seconds between attempts to connect


@dataclass(frozen=True, kw_only=True)
class VisitOptions:
    """How one party takes part in a dry run."""

    party: PartyData | None  # None: the data could not be read, which is among the findings
    kit: Kit
    server: str  # host:port
    out: Path  # folder of the run; nothing is written there
    expect: RunConfig | None = None  # the settings that were agreed on
    wait: float = 600.0  # seconds to wait for the server and for the others
    max_memory: int | None = None  # bytes that the server's settings may require; None: half of this machine's
    notice_every: float = 30.0  # seconds between two lines about an absent server
    now: Callable[[], float] = time.time  # this machine's clock

    @property
    def log(self) -> logging.Logger:
        return logging.getLogger(f"glasu.party.{self.kit.name}")


class DryRunParty:
    """The party's side of the handshake of a dry run. It takes no incarnation and writes no state."""

    def __init__(self, options: VisitOptions, findings: list[Finding]) -> None:
        """Report `findings`, and what the server's welcome lets this party check."""
        self._options, self.findings = options, findings
        self._facts = party_facts(options.party, "dry run")
        self._asked = math.nan  # when the hello was sent

    def hello(self) -> Payload:
        """Return the versions of this party; its data is part of the report."""
        self._asked = self._options.now()
        return to_plain(Hello(facts=party_facts(None, "dry run"), process=None))

    def welcome(self, welcome: Payload) -> None:
        """Check the clock and the settings that the server offers."""
        heard = self._options.now()
        offered = read_payload(Welcome, welcome, "the server's welcome")
        if offered.now is not None:  # read between asking and hearing
            middle, uncertainty = (self._asked + heard) / 2, (heard - self._asked) / 2
            self.findings.append(judge_clock(middle - offered.now, uncertainty))
        options = self._options
        try:
            config = read_offered_config(offered.config)
        except RefusalError as error:  # for example a choice of an extension that is not loaded here
            log_detail(options.log, "settings", str(error))
            self.findings.append(Finding("settings", "bad", "they cannot be read here; see that party's log"))
            return
        if options.expect is not None:
            self.findings.append(_compare_expected(config, options.expect))
        if options.party is not None:
            found, labels = check_settings(
                config, options.party, offered.roster, options.out, options.log, options.max_memory
            )
            self.findings += found
            self._facts = party_facts(options.party, "dry run", **labels)

    def statement(self) -> Payload:
        """Return the report of this party."""
        return to_plain(PartyReport(facts=self._facts, findings=tuple(self.findings)))


def visit(options: VisitOptions, own: list[Finding]) -> Verdict:
    """Take part in a dry run and return the verdict; if the server cannot be reached, this party's own findings.

    Args:
        options: the party and the server.
        own: findings so far.
    """
    name = options.kit.name
    findings = [*own, *([] if options.party is None else check_data(options.party, options.log))]
    findings.append(_reach_server(options))
    if findings[-1].level == "bad":
        return Verdict({name: tuple(findings)})
    role = DryRunParty(options, findings)
    session = ClientSession(Dialing(options.kit, options.server, options.wait, options.log), role)
    try:
        session.open()
        session.prepare(_refuse_message)
        if session.await_attempt() is not None:
            raise ProtocolError("the server started a run in a dry run.")
        verdict = read_payload(Verdict, session.farewell, "the verdict of the server")
        return Verdict({printable(role): sanitize_findings(found) for role, found in verdict.findings.items()})
    except GlasuError as error:
        return Verdict({name: (*role.findings, Finding("server", "bad", str(error).rstrip(".")))})
    finally:
        session.close()


def _refuse_message(head: Head, size: int) -> None:
    raise ProtocolError("the server sent a message of a run in a dry run.")


def _reach_server(options: VisitOptions) -> Finding:
    """Try to reach the server, again and again while it may not have been started yet."""
    start, delay, noticed = time.monotonic(), FIRST_DELAY, -math.inf
    while True:
        now = datetime.fromtimestamp(options.now(), UTC)
        finding, may_come = check_connection(options.kit, options.server, now)
        if not may_come or time.monotonic() - start + delay > options.wait:
            return finding
        if time.monotonic() - noticed >= options.notice_every:
            options.log.info("waiting for the server: %s", finding.said)
            noticed = time.monotonic()
        time.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY)


def _compare_expected(config: RunConfig, expect: RunConfig) -> Finding:
    """Compare the server's settings with those of --expect."""
    differences = compare_with_agreed(config, expect)
    if not differences:
        return Finding("agreed settings", "good", "the server's are those of --expect")
    listed = in_one_line(differences)
    return Finding("agreed settings", "bad", f"the server's differ from --expect: {listed}; agree on one run file")
