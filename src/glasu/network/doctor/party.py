"""A party in a dry run: check its machine and data, state counts and digests, and receive the diagnosis."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.errors import GlasuError
from glasu.network.compatibility import compare_with_agreed, format_differences, read_offered_config
from glasu.network.doctor.data import check_data, check_settings
from glasu.network.doctor.machine import (
    check_connection,
    check_extras,
    check_joining_folder,
    explain_error,
    judge_clock,
)
from glasu.network.facts import Facts, LabelFacts, collect_party_facts
from glasu.network.findings import Diagnosis, Finding, sanitize_findings
from glasu.network.handshake import HelloPayload, Payload, RefusalError, StatementPayload, WelcomePayload, read_payload
from glasu.network.join import PartyWork, join
from glasu.network.log_lines import make_printable
from glasu.network.options import JoinOptions
from glasu.network.purposes import DRY_RUN
from glasu.pki.key_signing import find_kit_error
from glasu.records import to_plain


class DryRunParty(PartyWork[Diagnosis]):
    """A party in a dry run. It does not count its starts (no fencing) and writes no state."""

    purpose = DRY_RUN

    def __init__(
        self,
        options: JoinOptions,
        party: PartyData | None,
        own: Sequence[Finding] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        """Collect the findings that do not depend on the server. `accept` adds more.

        Args:
            options: the kit and the server; nothing is written to the folder.
            party: the party's data; None if it could not be read. In this case, `own` contains a finding about it.
            own: the findings of earlier checks.
            now: returns the time of this machine's clock.
        """
        super().__init__(options, None if party is None else party.name)
        folder = check_joining_folder(options, None if party is None else party.data_digest())
        self._own = (*own, *folder, *([] if party is None else check_data(party, options.log)))
        self.findings = list(self._own)
        self._party, self._now = party, now
        self._labels: LabelFacts = {}  # facts about labels, once the settings are known
        self._hello_at = math.nan  # when the hello was sent
        self._diagnosis: Diagnosis | None = None

    def hello(self) -> Payload:
        """Return the hello with the versions of this party. The facts about its data follow in the statement."""
        self._hello_at = self._now()
        return to_plain(HelloPayload(facts=collect_party_facts(None, self.purpose), process=None))

    def accept(self, offered: WelcomePayload) -> None:
        """Check the clock and the settings that the server offers."""
        received_at, options = self._now(), self.options
        self.findings = [*self._own, self.check_server()[0]]
        if offered.now is not None:  # the server read its clock between `_hello_at` and `received_at`
            middle, uncertainty = (self._hello_at + received_at) / 2, (received_at - self._hello_at) / 2
            self.findings.append(judge_clock(middle - offered.now, uncertainty))
        try:
            config = read_offered_config(offered.config)
        except RefusalError as error:  # for example, the settings name a choice from an extension not loaded here
            text = "this party cannot read them; see its log"
            self.findings.append(explain_error("settings", error, options.log, text))
            return
        if config.privacy.hides_parts:
            fault = find_kit_error(options.kit, offered.roster)
            text = fault or "this party made its key itself, and it has pinned the keys of the other parties"
            self.findings.append(Finding(config.privacy.secure_aggregation, "bad" if fault else "good", text))
        extras = check_extras(config, options.log)
        self.findings += extras
        if options.expect is not None:
            self.findings.append(self._compare_expected(config, options.expect))
        is_complete = all(finding.level != "bad" for finding in extras)  # otherwise no client can be built
        if self._party is not None and is_complete:
            found, self._labels = check_settings(config, self._party, offered, options)
            self.findings += found

    def _compare_expected(self, config: RunConfig, expect: RunConfig) -> Finding:
        """Compare the server's settings with the settings in --expect."""
        differences = compare_with_agreed(self.options.kit.name, expect, config)
        if not differences:
            return Finding("agreed settings", "good", "the server's settings equal --expect")
        text = f"the server's settings differ from --expect: {format_differences(differences)}; agree on one run file"
        return Finding("agreed settings", "bad", text)

    def facts(self) -> Facts:
        """Return the facts of this party."""
        return collect_party_facts(self._party, self.purpose, self.id_keys, **self._labels)

    def statement(self) -> Payload:
        """Return the facts and findings of this party."""
        return to_plain(StatementPayload(facts=self.facts(), findings=tuple(self.findings)))

    def take_goodbye(self, goodbye: Payload) -> None:
        """Store the diagnosis, with unprintable characters replaced."""
        diagnosis = read_payload(Diagnosis, goodbye, "the diagnosis of the server")
        self._diagnosis = Diagnosis(
            {make_printable(role): sanitize_findings(found) for role, found in diagnosis.findings.items()}
        )

    def result(self) -> Diagnosis | None:
        """Return the diagnosis, once the server has sent it."""
        return self._diagnosis

    def check_server(self) -> tuple[Finding, bool]:
        """Try to reach the server; return the finding, and whether waiting may help."""
        return check_connection(self.options.kit, self.options.server, datetime.fromtimestamp(self._now(), UTC))


def join_dry_run(work: DryRunParty) -> Diagnosis:
    """Take part in a dry run and return the diagnosis. If this fails, return only this party's own findings."""
    finding, may_come = work.check_server()
    if finding.level != "bad" or may_come:
        try:
            return join(work)
        except GlasuError as error:
            finding, _ = work.check_server()
            if finding.level != "bad":
                finding = Finding("server", "bad", str(error).rstrip("."))
    return Diagnosis({work.options.kit.name: (*work.findings, finding)})
