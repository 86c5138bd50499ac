"""The ledger of a party in a session: its head is stated before every attempt, and the heads of the others are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from glasu.errors import ProtocolError
from glasu.network.control import ProposedAttempt
from glasu.privacy.ledger import End, Ledger, LedgerHead
from glasu.runtime.ledger_file import close_ledger


class LedgerScope(NamedTuple):
    """What the entries of a session belong to."""

    run: str  # id of the run
    training: str  # id of the training; empty in an alignment
    purpose: str
    settings: str  # digest


class SessionLedger:
    """The ledger of one party, and its memory of the others' ledgers."""

    def __init__(self, name: str) -> None:
        """Start without a file; a purpose with messages replaces `ledger` by the one in its folder."""
        self.name, self.ledger = name, Ledger()
        self._stated = self.ledger.head
        self._begun = ""  # the run of the last start in the ledger
        self._peers: tuple[str, ...] = ()  # the other parties of the last attempt

    def state_head(self) -> LedgerHead:
        """Make the ledger durable, and return its head, which the server passes to the other parties."""
        self.ledger.sync()
        self._stated = self.ledger.head
        return self._stated

    def open_attempt(self, attempt: ProposedAttempt, scope: LedgerScope) -> None:
        """Compare the ledgers of the other parties with the past, and enter them and the start in the own ledger.

        Raises:
            LedgerError: a ledger is shorter than before, or another one.
            ProtocolError: the server left out a ledger, or changed the head of this party's.
        """
        missing = [party for party in attempt.present if party not in attempt.ledgers]
        if missing or attempt.ledgers.get(self.name) != self._stated:
            raise ProtocolError(
                f"the server did not pass on the ledger of {', '.join(missing) or 'this party'} as it was stated; the "
                "parties would not notice if one of them cut its ledger."
            )
        self._peers = tuple(party for party in attempt.present if party != self.name)
        heads = {party: attempt.ledgers[party] for party in self._peers}
        self.ledger.remember(heads, scope=scope.training, attempt=attempt.number)
        if self._begun != scope.run:
            self.ledger.begin(scope.purpose, scope.run, scope.settings)
            self._begun = scope.run
        self.ledger.sync()

    def remember_last(self, heads: Mapping[str, LedgerHead], training: str) -> None:
        """Enter the heads of the other parties at the end of a run; raise LedgerError as `open_attempt` does."""
        self.ledger.remember({party: head for party, head in heads.items() if party in self._peers}, scope=training)

    def close(self, *, finished: bool) -> None:
        """Close the file; `finished`: every party is finished."""
        if finished and self._begun:
            self.ledger.write(End())
        close_ledger(self.ledger)
