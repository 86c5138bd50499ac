"""A party's part of a private alignment: blind ids, and write alignment.parquet next to the tables."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from glasu.config import RunConfig
from glasu.data.alignment_file import CommonIds
from glasu.data.folders import read_normalized_ids
from glasu.errors import ProtocolError
from glasu.network.compatibility import read_offered_config
from glasu.network.control import ProposedAttempt, derive_attempt_run
from glasu.network.facts import Facts, collect_server_facts
from glasu.network.fencing import note_welcome
from glasu.network.handshake import ResultPayload, WelcomePayload
from glasu.network.join import PartyScriptWork
from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.network.options import JoinOptions
from glasu.network.party_setup import check_place
from glasu.network.purposes import ALIGNMENT
from glasu.network.session_ledger import LedgerScope
from glasu.privacy.blinding import Blinding
from glasu.privacy.release import Release
from glasu.protocol.alignment import DEFAULT_MAX_IDS, Alignment, SetLimits, client_alignment
from glasu.protocol.message_bytes import Head
from glasu.protocol.requests import Script
from glasu.protocol.state import Identity
from glasu.runtime.alignment_ledger import limit_sets, open_alignment_ledger
from glasu.runtime.output_dir import ALIGNING
from glasu.wire.message_key import ATTEMPTS


@dataclass(frozen=True)
class AlignedFolder:
    """The result of an alignment at one party."""

    party: str
    file: Path
    common: int
    ids: int  # number of the party's ids


class AlignmentParty(PartyScriptWork[AlignedFolder]):
    """One process of a party in an alignment. `options.out` is the folder with the party's tables."""

    purpose = ALIGNMENT

    def __init__(self, options: JoinOptions, max_ids: int = DEFAULT_MAX_IDS, secret: bytes | None = None) -> None:
        """Read the ids of the party.

        Args:
            options: the options of the command.
            max_ids: the maximum number of ids that this party accepts from another party.
            secret: bytes from which the scalars for blinding this party's ids are derived; None: new random bytes.
        """
        self.manifest, self.ids = read_normalized_ids(options.out)
        super().__init__(options, self.manifest.name, ALIGNING)
        self.blinding = Blinding(secrets.token_bytes(32) if secret is None else secret)
        self._max_ids = max_ids
        self._offered: tuple[WelcomePayload, RunConfig, SetLimits] | None = None
        self._aligned: AlignedFolder | None = None

    def facts(self) -> Facts:
        """Return the facts of this party. The only fact about its ids is how they were normalised."""
        return collect_server_facts(self.purpose, id_rules=str(self.manifest.id_rules))

    def accept(self, offered: WelcomePayload) -> None:
        """Check the roster and the settings of the server."""
        note_welcome(self.state)
        config = read_offered_config(offered.config)
        check_place(self.manifest.name, offered, config)
        if self._offered is None:
            others = ", ".join(name for name in offered.roster if name != self.manifest.name)
            self.options.log.info(
                "alignment of %d ids: the server and %s must stay online until it is done.", len(self.ids), others
            )
            policy = self.options.policy
            ledger = open_alignment_ledger(self.options.out, self.manifest.name, len(self.ids), policy)
            self.session_ledger.ledger = ledger
        limits = SetLimits(config.wire.chunk_rows, self._max_ids)
        self._offered = offered, config, limit_sets(limits, self.options.policy)

    def scope(self) -> LedgerScope:
        """Return the scope of the ledger entries. An alignment belongs to no training."""
        offered, config, _ = self._require_offer()
        return LedgerScope(offered.run, "", self.purpose.name, config.digest())

    def settings(self) -> RunConfig:
        """Return the settings that the server offered, for this party's statement."""
        return self._require_offer()[1]

    def _require_offer(self) -> tuple[WelcomePayload, RunConfig, SetLimits]:
        assert self._offered is not None  # the session calls `welcome` first
        return self._offered

    def check_limits(self, head: Head, size: int) -> None:
        """Refuse a message from the server that is too long for an alignment."""
        self._require_offer()[2].limit_messages().check(head, size)

    def begin(self, attempt: ProposedAttempt) -> Script[Alignment]:
        """Return the script of an attempt, with all parties of the roster."""
        offered, _, limits = self._require_offer()
        if attempt.present != offered.roster:
            raise ProtocolError(
                f"the server proposed an alignment of {make_printable(', '.join(attempt.present), MAX_REASON)}; "
                f"expected {', '.join(offered.roster)}."
            )
        run = derive_attempt_run(offered.run, attempt.number)
        identity = Identity(offered.roster, None, offered.index, run)
        identity.incarnation, identity.attempt = self.state.value.incarnation, attempt.number % ATTEMPTS
        release = Release({}, ledger=self.session_ledger.ledger)  # an alignment sends no tensor
        return client_alignment(identity, self.ids.tolist(), self.blinding, limits, release)

    def finish(self, result: Alignment) -> ResultPayload:
        """Write alignment.parquet."""
        roster, rules = self._require_offer()[0].roster, self.manifest.id_rules
        file = CommonIds.of(self.ids, result.rows, result.key, roster, rules).write(self.options.out)
        self._aligned = AlignedFolder(self.manifest.name, file, len(result.rows), len(self.ids))
        return ResultPayload(received=len(result.rows))

    def result(self) -> AlignedFolder | None:
        """Return the aligned folder, once its file is written."""
        return self._aligned
