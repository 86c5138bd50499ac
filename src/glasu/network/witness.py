"""The memory of a server about the parties' ledgers: a party whose ledger became shorter, or another one, is refused.

Every party keeps the same memory in its own ledger (`Ledger.remember`), so this does not depend on the server alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from glasu.network.handshake import Code, RefusalError
from glasu.network.state_file import ServingRecord, StateFile
from glasu.privacy.ledger import LedgerHead, describe_cut


class Witness:
    """The last heads of the parties' ledgers, durably."""

    def __init__(self, state: StateFile[ServingRecord], scope: str) -> None:
        """Keep the heads in a state file.

        Args:
            state: of the server.
            scope: the training that all parties take part in; in it no party may change its ledger. Empty in an
                alignment, whose parties may begin another ledger.
        """
        self._state, self._scope = state, scope

    def check(self, party: str, head: LedgerHead) -> None:
        """Raise RefusalError if a ledger contradicts the head that its party showed before."""
        record = self._state.value
        before = record.ledgers.get(party)
        if before is None or (record.ledger_scope != self._scope and before.ledger != head.ledger):
            return
        if (not self._scope and before.ledger != head.ledger) or not (why := before.describe_contradiction(head)):
            return
        raise RefusalError(Code.CUT_LEDGER, describe_cut(why))

    def keep(self, heads: Mapping[str, LedgerHead]) -> None:
        """Remember the heads that parties state at the start of an attempt, or when they have finished."""
        record = self._state.value
        before = record.ledgers if record.ledger_scope == self._scope else {}
        self._state.update(ledger_scope=self._scope, ledgers={**before, **heads})
