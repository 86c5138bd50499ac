"""The server's part of a private alignment: forward blinded sets, compare them, and report counts. No torch here."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glasu.network.compatibility import prepare_config_for_network
from glasu.network.control import derive_attempt_run
from glasu.network.facts import collect_server_facts
from glasu.network.handshake import ResultPayload
from glasu.network.options import ServeOptions
from glasu.network.purposes import ALIGNMENT
from glasu.network.roster import Attempt
from glasu.network.serve import ServerScriptWork
from glasu.network.state_file import ServingRecord, StateFile, write_named
from glasu.privacy.blinding import load_group
from glasu.protocol.alignment import DEFAULT_MAX_IDS, Comparison, SetLimits, server_alignment
from glasu.protocol.requests import Script
from glasu.protocol.state import Identity
from glasu.report import JsonRecord, Seconds, Traffic
from glasu.runtime.checkpointing import START
from glasu.runtime.output_dir import ALIGNING
from glasu.runtime.report_builder import collect_cost
from glasu.wire.message_key import RUN_BYTES, SERVER


@dataclass(frozen=True)
class Overlap(JsonRecord):
    """The number of ids that these parties have and no other party has."""

    parties: tuple[str, ...]
    ids: int


@dataclass(frozen=True, kw_only=True)
class AlignmentReport(JsonRecord):
    """The content of a server's alignment.json: everything that the server learns from an alignment."""

    parties: tuple[str, ...]
    common: int  # ids that all parties have
    sizes: Mapping[str, int]  # by party: the number of its ids
    overlaps: tuple[Overlap, ...]
    traffic: Traffic
    seconds: Seconds
    versions: Mapping[str, str]

    def summary(self) -> str:
        """Return the result in one sentence."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        sent = self.traffic.bytes_to_clients / 1e6
        return f"aligned {self.common} common ids ({sizes}); {sent:.1f} MB sent to the parties."


def list_overlaps(names: Sequence[str], found: Comparison) -> tuple[Overlap, ...]:
    """Return the overlaps with the names of the parties. The largest groups of parties come first."""
    groups = sorted(found.overlaps.items(), key=lambda item: (-len(item[0]), item[0]))
    return tuple(Overlap(tuple(names[client] for client in group), count) for group, count in groups)


class AlignmentServer(ServerScriptWork[AlignmentReport]):
    """One server process of an alignment. It keeps no checkpoints: an interrupted alignment starts again."""

    purpose = ALIGNMENT

    def __init__(self, options: ServeOptions, max_ids: int = DEFAULT_MAX_IDS) -> None:
        """Check the settings and the installation.

        Args:
            options: the options of the command. Of the settings, only `wire.chunk_rows` is used.
            max_ids: the maximum number of ids that the server accepts from one party.
        """
        load_group()
        config = prepare_config_for_network(options.config, options.kit.roster)
        self.limits = SetLimits(config.wire.chunk_rows, max_ids)
        facts, run = collect_server_facts(self.purpose), secrets.token_hex(RUN_BYTES)
        super().__init__(options, facts, config, run, StateFile(options.out / ALIGNING, ServingRecord()))

    def plan(self, present: Sequence[str]) -> tuple[Attempt, Script[Comparison]]:
        """Plan an attempt with a new run id."""
        statements = self.admission.collect_statements(present)
        number = self.count_attempt()
        identity = Identity(tuple(statements), None, SERVER, derive_attempt_run(self.run, number))
        attempt = Attempt(number, 0, dict.fromkeys(statements, START), self.limits.limit_messages().check)
        return attempt, server_alignment(identity, self.limits)

    def finish(self, result: Comparison, finished: Sequence[ResultPayload]) -> AlignmentReport:
        """Write alignment.json."""
        roster = self.options.kit.roster
        report = AlignmentReport(
            **collect_cost(self.telemetry),
            parties=roster,
            common=result.common,
            sizes=dict(zip(roster, result.sizes, strict=True)),
            overlaps=list_overlaps(roster, result),
        )
        write_named(self.options.out / "alignment.json", report.to_json().encode())
        return report
