"""The ledger of a party in a session: state its head before every attempt, and record the other parties' heads.

The head of a ledger is its identity, its length and the last value of its hash chain. A party signs its head together
with the id of the run and a mark whether the run is finished. So the server can neither change a head nor forward a
head of another run. It can repeat an earlier head of the same run, unless the receiver has recorded a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from glasu.errors import ProtocolError
from glasu.network.control import ProposedAttempt
from glasu.network.signatures import SignedHead, refuse_unsigned, sign_statement
from glasu.privacy.ledger import End, Ledger, LedgerHead
from glasu.privacy.masking import Signer
from glasu.runtime.ledger_file import close_ledger


class LedgerScope(NamedTuple):
    """The run and the training to which a session's ledger entries belong."""

    run: str  # id of the run
    training: str  # id of the training; empty in an alignment
    purpose: str
    settings: str  # digest


class SessionLedger:
    """The ledger of one party. It also records the heads of the other parties' ledgers."""

    def __init__(self, name: str, signer: Signer) -> None:
        """Start with a ledger in memory. A purpose that sends messages replaces `ledger` with the ledger in its folder.

        Args:
            name: the name of this party.
            signer: signs the heads of this party, and checks the heads of the other parties.
        """
        self.name, self.ledger, self._signer = name, Ledger(), signer
        self._stated: SignedHead | None = None
        self._begun = ""  # the run whose start was recorded last in the ledger
        self._peers: tuple[str, ...] = ()  # the other parties of the last attempt

    def sign_head(self, scope: LedgerScope, *, is_last: bool = False) -> SignedHead:
        """Make the ledger durable, and return its signed head, which the server forwards to the other parties."""
        self.ledger.sync()
        head = self.ledger.head
        self._stated = SignedHead(
            head, sign_statement(self._signer, _describe_head(self.name, head, scope, is_last=is_last))
        )
        return self._stated

    def open_attempt(self, attempt: ProposedAttempt, scope: LedgerScope) -> None:
        """Check the heads of the other parties, and record them and the start of the run in this party's ledger.

        Raises:
            LedgerError: a ledger was truncated or replaced.
            ProtocolError: the server omitted or changed a head.
        """
        missing = [party for party in attempt.present if party not in attempt.ledgers]
        if missing or attempt.ledgers.get(self.name) != self._stated:
            raise ProtocolError(
                f"the server did not forward the ledger head of {', '.join(missing) or 'this party'} unchanged; the "
                "parties could not detect a truncated ledger."
            )
        self._peers = tuple(party for party in attempt.present if party != self.name)
        heads = self._check_signatures({party: attempt.ledgers[party] for party in self._peers}, scope, is_last=False)
        self.ledger.record_heads(heads, scope=scope.training, attempt=attempt.number)
        if self._begun != scope.run:
            self.ledger.begin(scope.purpose, scope.run, scope.settings)
            self._begun = scope.run
        self.ledger.sync()

    def record_last_heads(self, heads: Mapping[str, SignedHead], scope: LedgerScope) -> None:
        """Record the heads of the other parties at the end of a run.

        Raises:
            LedgerError: a ledger was truncated or replaced; nothing is recorded.
            ProtocolError: the server changed a head (nothing is recorded), or omitted a head (the others are recorded).
        """
        others = {party: heads[party] for party in self._peers if party in heads}
        self.ledger.record_heads(self._check_signatures(others, scope, is_last=True), scope=scope.training)
        if missing := [party for party in self._peers if party not in heads]:
            raise ProtocolError(
                f"the server did not forward the last ledger head of {', '.join(missing)}; this party cannot prove how "
                "long that ledger was at the end of the run. A server that was restarted after the end has no heads."
            )

    def _check_signatures(
        self, heads: Mapping[str, SignedHead], scope: LedgerScope, *, is_last: bool
    ) -> dict[str, LedgerHead]:
        """Return the heads of other parties. Refuse a head that its party has not signed for this run."""
        for party, signed in heads.items():
            parts = _describe_head(party, signed.head, scope, is_last=is_last)
            refuse_unsigned(self._signer, party, f"party {self.name!r}: the ledger head", signed.signature, parts)
        return {party: signed.head for party, signed in heads.items()}

    def close(self, *, finished: bool) -> None:
        """Close the file; `finished` is True if every party is finished."""
        if finished and self._begun:
            self.ledger.write(End())
        close_ledger(self.ledger)


def _describe_head(party: str, head: LedgerHead, scope: LedgerScope, *, is_last: bool) -> tuple[str, ...]:
    """Return the content that a party signs."""
    when = "end" if is_last else "attempt"
    return "ledger head", scope.run, when, party, head.ledger, str(head.length), head.chain
