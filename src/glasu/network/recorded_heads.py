"""The ledger heads that a server records, in order to refuse a party whose ledger was truncated or replaced.

Every party also records the heads of the other parties in its own ledger (`Ledger.record_heads`), so this check does
not depend on the server alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from glasu.network.handshake import Code, RefusalError
from glasu.network.state_file import ServingRecord, StateFile
from glasu.privacy.ledger import LedgerHead, describe_truncation


class RecordedHeads:
    """The last heads of the parties' ledgers, in durable storage."""

    def __init__(self, state: StateFile[ServingRecord], scope: str) -> None:
        """Keep the heads in a state file.

        Args:
            state: the state file of the server.
            scope: the id of the training, during which no party may replace or truncate its ledger; empty in an
                alignment, where a party may begin another ledger.
        """
        self._state, self._scope = state, scope

    def check(self, party: str, head: LedgerHead) -> None:
        """Raise RefusalError if a head contradicts the head that the party stated before."""
        record = self._state.value
        before = record.ledgers.get(party)
        if before is None or (record.ledger_scope != self._scope and before.ledger != head.ledger):
            return
        if (not self._scope and before.ledger != head.ledger) or not (why := before.describe_contradiction(head)):
            return
        raise RefusalError(Code.CUT_LEDGER, describe_truncation(why))

    def keep(self, heads: Mapping[str, LedgerHead]) -> None:
        """Store the heads that parties state at the start of an attempt, or when they have finished."""
        record = self._state.value
        before = record.ledgers if record.ledger_scope == self._scope else {}
        self._state.update(ledger_scope=self._scope, ledgers={**before, **heads})
