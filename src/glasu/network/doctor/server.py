"""The server of a dry run: collect and compare the parties' statements, and send one diagnosis. Torch is not loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from glasu.errors import AbsenceError
from glasu.network.admission_policy import Collect, ServedRun
from glasu.network.compatibility import collect_findings, prepare_config_for_network
from glasu.network.doctor.machine import check_disk, check_server_folder
from glasu.network.facts import collect_server_facts
from glasu.network.findings import TOGETHER, Diagnosis, Finding, sanitize_findings
from glasu.network.handshake import Payload
from glasu.network.options import ServeOptions
from glasu.network.purposes import DRY_RUN, Purpose
from glasu.network.serve import ServerPerformer, ServerWork
from glasu.network.server_session import ServerSession
from glasu.records import to_plain

NO_RUN = "dry-run"  # used instead of a run id
DISK_BYTES = 64 << 20  # enough for the report and the server's checkpoints, which contain only histories
ABSENT = Finding("presence", "bad", "no report; is glasu doctor running there, and what does it print?")


class DryRunServer(ServerWork[Diagnosis]):
    """The server of a dry run. It collects differences, fences no processes, begins no attempt and writes no state."""

    goodbye_seconds = 2.0

    def __init__(self, options: ServeOptions, own: Sequence[Finding], purpose: Purpose = DRY_RUN) -> None:
        """Check the server's folder and disk; `own` are the findings at the server so far."""
        config = prepare_config_for_network(options.config, options.kit.roster)
        self._purpose, self._facts = purpose, collect_server_facts(purpose)
        self._own = (*own, *check_server_folder(options, config), check_disk(options.out, DISK_BYTES))
        options = dataclasses.replace(options, on_invalid_message="wait")
        served = ServedRun(purpose, self._facts, config, options.kit.roster, NO_RUN, self.list_checkpoints)
        super().__init__(options, served, Collect())

    def run_session(self, session: ServerSession, perform: ServerPerformer) -> Diagnosis:
        """Wait at most `options.wait` seconds for the statements of all parties, and return the diagnosis."""
        try:
            session.gather()
        except AbsenceError as error:
            self.options.log.info("%s", error)
        statements, roster = dict(self.admission.statements), self.options.kit.roster
        findings: dict[str, tuple[Finding, ...]] = {"server": self._own}
        for name in roster:
            findings[name] = sanitize_findings(statements[name].findings) if name in statements else (ABSENT,)
        stated = {name: statements[name].facts for name in roster if name in statements}
        return Diagnosis({**findings, TOGETHER: tuple(collect_findings(self._purpose, self._facts, stated))})

    def build_goodbye(self, report: Diagnosis) -> Payload:
        """Return the diagnosis, which every party receives."""
        return to_plain(report)
