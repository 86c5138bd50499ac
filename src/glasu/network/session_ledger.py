"""The ledger of a party in a session: it states its head before every attempt, and records the heads of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from glasu.errors import ProtocolError
from glasu.network.control import ProposedAttempt
from glasu.privacy.ledger import End, Ledger, LedgerHead
from glasu.runtime.ledger_file import close_ledger


class LedgerScope(NamedTuple):
    """The run and the training that the ledger entries of a session belong to."""

    run: str  # id of the run
    training: str  # id of the training; empty in an alignment
    purpose: str
    settings: str  # digest


class SessionLedger:
    """The ledger of one party, which also records the heads of the others' ledgers."""

    def __init__(self, name: str) -> None:
        """Start without a file; a purpose with messages replaces `ledger` with the one in its folder."""
        self.name, self.ledger = name, Ledger()
        self._stated = self.ledger.head
        self._begun = ""  # the run of the last start in the ledger
        self._peers: tuple[str, ...] = ()  # the other parties of the last attempt

    def state_head(self) -> LedgerHead:
        """Make the ledger durable, and return its head, which the server forwards to the other parties."""
        self.ledger.sync()
        self._stated = self.ledger.head
        return self._stated

    def open_attempt(self, attempt: ProposedAttempt, scope: LedgerScope) -> None:
        """Compare the heads of the other parties with earlier ones; record them and the start in this party's ledger.

        Raises:
            LedgerError: a ledger was truncated or replaced.
            ProtocolError: the server omitted a head, or changed the head of this party.
        """
        missing = [party for party in attempt.present if party not in attempt.ledgers]
        if missing or attempt.ledgers.get(self.name) != self._stated:
            raise ProtocolError(
                f"the server did not forward the ledger head of {', '.join(missing) or 'this party'} unchanged; the "
                "parties could not detect a truncated ledger."
            )
        self._peers = tuple(party for party in attempt.present if party != self.name)
        heads = {party: attempt.ledgers[party] for party in self._peers}
        self.ledger.record_heads(heads, scope=scope.training, attempt=attempt.number)
        if self._begun != scope.run:
            self.ledger.begin(scope.purpose, scope.run, scope.settings)
            self._begun = scope.run
        self.ledger.sync()

    def record_last_heads(self, heads: Mapping[str, LedgerHead], training: str) -> None:
        """Record the heads of the other parties at the end of a run; raise LedgerError as `open_attempt` does."""
        self.ledger.record_heads({party: head for party, head in heads.items() if party in self._peers}, scope=training)

    def close(self, *, finished: bool) -> None:
        """Close the file; `finished` is True if every party is finished."""
        if finished and self._begun:
            self.ledger.write(End())
        close_ledger(self.ledger)
