"""The server's side of the handshake: decide which process of a party is admitted to the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glasu.errors import GlasuError
from glasu.network.admission_policy import AdmissionPolicy, ServedRun
from glasu.network.compatibility import THE_SERVER, refuse_differences
from glasu.network.facts import Facts, list_pairs_without_tags
from glasu.network.handshake import (
    SAME_VERSION,
    Code,
    HelloPayload,
    Payload,
    RefusalError,
    StatementPayload,
    WelcomePayload,
    read_payload,
)
from glasu.network.id_keys import IdShare
from glasu.network.roster import RestartAttempt
from glasu.protocol.presence import check_present
from glasu.records import to_plain


class Admission:
    """Decides which processes are admitted, and keeps their facts and statements.

    If a process differs from the run, the server or another party, the policy decides what happens. Under every policy,
    a process must have the same purpose as the server, and must compare its ids when the server asks.
    """

    def __init__(self, served: ServedRun, policy: AdmissionPolicy) -> None:
        """Admit processes of the roster's parties.

        Args:
            served: the run that the server's welcome message offers to a party.
            policy: `Refuse`, or `Collect` in a dry run.
        """
        self._served, self._policy = served, policy
        self._stated: dict[str, Facts] = {}  # facts of the admitted processes, by party
        self.statements: dict[str, StatementPayload] = {}  # by party
        # The party that was asked to compare its ids, and the key shares that it received for this.
        self._asked: tuple[str, dict[str, IdShare]] = ("", {})

    def admit(self, party: str, hello: Payload) -> Payload:
        """Admit a process and return its welcome, or raise RefusalError. The policy may record the process durably."""
        stated = self._read_hello(party, hello)
        self._policy.admit(party, stated, self._others(party))
        return self._welcome(party, stated.facts)

    def admit_finished(self, party: str, hello: Payload) -> Payload:
        """Do the same when all parties have their results."""
        stated = self._read_hello(party, hello)
        self._policy.admit_finished(party, stated)
        return self._welcome(party, stated.facts)

    def prepare(self, party: str, statement: Payload) -> Sequence[str]:
        """Check the statement of a party that is ready to run. Return warnings for the logs, or raise RefusalError."""
        stated = read_payload(StatementPayload, statement, f"the statement of party {party!r}")
        self._policy.check_facts(party, stated.facts, self._others(party))
        self._refuse_missing_tags(party, stated.facts)
        lines = self._policy.check_statement(party, stated, self.statements)
        self._stated[party], self.statements[party] = stated.facts, stated
        return lines

    def collect_statements(self, present: Sequence[str]) -> dict[str, StatementPayload]:
        """Return the statements of the present parties, in the same order.

        Raises:
            RestartAttempt: a statement is missing, because a process connected after the parties were gathered.
        """
        statements = dict(self.statements)
        if not statements.keys() >= set(present):
            raise RestartAttempt
        return {party: statements[party] for party in present}

    def withdraw(self, party: str) -> None:
        """Forget the admitted process of a party."""
        self._stated.pop(party, None)
        self.statements.pop(party, None)
        self._policy.withdraw(party)

    def find_comparison(self, prepared: Sequence[str]) -> tuple[str, Mapping[str, IdShare]] | None:
        """Return the party to ask for HMACs next, and the key shares of the prepared parties; None if none is missing.

        The party is the first prepared party that lacks the HMACs for another prepared party.
        """
        known = {name: facts for name, facts in self._stated.items() if name in prepared}
        pairs = list_pairs_without_tags(known)
        if not pairs:
            return None
        self._asked = pairs[0][0], {name: facts.share for name, facts in known.items() if facts.share is not None}
        return self._asked

    def record_attempt(self) -> None:
        """Record that an attempt begins with the admitted processes."""
        self._policy.record_attempt()

    def find_absence_error(self, present: Sequence[str]) -> str | None:
        """If the present parties cannot continue alone, return the reason as a sentence, otherwise None."""
        if self._served.purpose.absence_error is not None:
            return self._served.purpose.absence_error
        try:
            check_present(self._served.config, self._served.roster, present)
        except GlasuError as error:
            return f"{error.public_message[:1].upper()}{error.public_message[1:]}"
        return None

    def _read_hello(self, party: str, hello: Payload) -> HelloPayload:
        stated = read_payload(HelloPayload, hello, f"the hello of party {party!r}")
        refuse_differences(party, stated.facts, {THE_SERVER: self._served.facts}, ("purpose",))
        return stated

    def _welcome(self, party: str, facts: Facts) -> Payload:
        """Keep the facts of an admitted process, and return its welcome."""
        self._stated[party], served = facts, self._served
        self.statements.pop(party, None)
        return to_plain(
            WelcomePayload(
                config=served.config.to_dict(given=True),
                roster=served.roster,
                index=served.roster.index(party),
                run=served.run,
                now=self._policy.read_clock(),
            )
        )

    def _others(self, party: str) -> dict[str, Facts]:
        own = self._served.facts
        return {THE_SERVER: own, **{name: facts for name, facts in self._stated.items() if name != party}}

    def _refuse_missing_tags(self, party: str, facts: Facts) -> None:
        """Refuse a party that was sent public keys to compare ids, if its statement lacks the HMACs for one key."""
        asked, shares = self._asked
        if asked != party or shares.get(party) != facts.share:
            return
        self._asked = "", {}
        stated = {(tag.party, tag.share) for tag in facts.id_tags}
        if missing := [name for name, share in shares.items() if name != party and (name, share.key) not in stated]:
            listed = ", ".join(missing)
            raise RefusalError(Code.DIFFERENT_FACTS, f"it does not compare its ids with {listed}; {SAME_VERSION}")
