"""The server's side of the handshake: it decides which process of a party may take part."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from glasu.config import RunConfig, resolve
from glasu.errors import ConfigError, GlasuError
from glasu.network.compatibility import (
    THE_SERVER,
    compare_settings,
    describe_builds,
    refuse_differences,
    refuse_missing_facts,
    refuse_settings,
)
from glasu.network.facts import Facts, list_pairs_without_tags, resolve_tags
from glasu.network.fencing import Fence
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
from glasu.network.log_lines import make_printable
from glasu.network.roster import RestartAttempt
from glasu.network.witness import Witness
from glasu.protocol.presence import check_present
from glasu.records import to_plain

FINISHED_ANSWERS = {  # by purpose: the answer to a process that connects when all parties have their results
    "training": "this run is finished; --fresh at the server starts another.",
    "prediction": "this prediction is complete; to predict again, start `glasu serve --predict` and all parties.",
    "alignment": "this alignment is complete; to align again, start `glasu serve --align` and all parties.",
}


class Admission:
    """Compares each process of a party with the run, with the server and with the connected parties.

    Without a fence the policy is `collect`: every process with the same purpose is admitted, regardless of its facts.
    """

    def __init__(
        self,
        facts: Facts,
        config: RunConfig,
        roster: Sequence[str],
        run: str,
        fence: Fence | None,
        rounds: Callable[[], Mapping[int, str]],
        witness: Witness | None = None,
    ) -> None:
        """Admit processes of the roster's parties.

        Args:
            facts: the facts of the server.
            config: the settings that a welcome offers.
            roster: the parties in client order.
            run: the id of the run.
            fence: records the admitted processes; None in a dry run.
            rounds: returns the server's checkpoints and their digests.
            witness: records the heads of the parties' ledgers; None in a dry run.
        """
        self._facts, self._config, self._roster, self._run = facts, config, tuple(roster), run
        self._fence, self._rounds, self._witness = fence, rounds, witness
        self._stated: dict[str, Facts] = {}  # facts of the admitted processes, by party
        self.statements: dict[str, StatementPayload] = {}  # by party
        # The party that compares its ids now, and the shares with which it does so.
        self._asked: tuple[str, dict[str, IdShare]] = ("", {})

    def admit(self, party: str, hello: Payload, *, closing: bool) -> Payload:
        """Admit a process and return its welcome, or raise RefusalError. The admission is durable."""
        stated = read_payload(HelloPayload, hello, f"the hello of party {party!r}")
        refuse_differences(party, stated.facts, {THE_SERVER: self._facts}, ("purpose",))
        if self._fence is not None:
            if stated.process is None:
                raise RefusalError(Code.INVALID_PAYLOAD, f"its hello names no process; {SAME_VERSION}")
            self._fence.check(party, stated.process)
            self._check_run(stated)
            if not closing:
                refuse_differences(party, stated.facts, self._others(party))
                self._check_rounds(stated)
            elif stated.finished is None:
                raise RefusalError(Code.RUN_FINISHED, FINISHED_ANSWERS[self._facts.purpose])
            # Durable before the welcome is sent: a server that crashed after sending it would otherwise admit an older
            # process, and two processes of the party would take part in the run.
            self._fence.admit(party, stated.process)
        self._stated[party] = stated.facts
        self.statements.pop(party, None)
        return to_plain(
            WelcomePayload(
                config=self._config.to_dict(given=True),
                roster=self._roster,
                index=self._roster.index(party),
                run=self._run,
                now=time.time() if self._fence is None else None,
            )
        )

    def prepare(self, party: str, statement: Payload) -> Sequence[str]:
        """Check the statement of a party that is ready to run; return warnings for the logs, or raise RefusalError."""
        stated = read_payload(StatementPayload, statement, f"the statement of party {party!r}")
        lines: Sequence[str] = ()
        if self._fence is not None:
            others = resolve_tags({**self._others(party), party: stated.facts})
            refuse_differences(party, others.pop(party), others)
            refuse_missing_facts(party, stated.facts, self._facts)
        self._refuse_missing_tags(party, stated.facts)
        if self._fence is not None:
            self._check_settings(party, stated)
            if stated.ledger is None:
                raise RefusalError(Code.INVALID_PAYLOAD, f"its statement names no ledger; {SAME_VERSION}")
            if self._witness is not None:
                self._witness.check(party, stated.ledger.head)
            if party not in self.statements:
                known = {THE_SERVER: self._facts, **{name: each.facts for name, each in self.statements.items()}}
                lines = describe_builds(party, stated.facts, known)
        self._stated[party], self.statements[party] = stated.facts, stated
        return lines

    def collect_statements(self, present: Sequence[str]) -> dict[str, StatementPayload]:
        """Return the statements of the parties of an attempt, in the same order.

        Raises:
            RestartAttempt: a process connected after the session had gathered the parties; its statement is missing.
        """
        statements = dict(self.statements)
        if not statements.keys() >= set(present):
            raise RestartAttempt
        return {party: statements[party] for party in present}

    def withdraw(self, party: str) -> None:
        """Forget the admitted process of a party."""
        self._stated.pop(party, None)
        self.statements.pop(party, None)
        if self._fence is not None:
            self._fence.withdraw(party)

    def find_comparison(self, prepared: Sequence[str]) -> tuple[str, Mapping[str, IdShare]] | None:
        """Return the first party, in the order of admission, that lacks an HMAC for another party, and all shares."""
        known = {name: facts for name, facts in self._stated.items() if name in prepared}
        pairs = list_pairs_without_tags(known)
        if not pairs:
            return None
        self._asked = pairs[0][0], {name: facts.share for name, facts in known.items() if facts.share is not None}
        return self._asked

    def settle(self) -> None:
        """Record that an attempt begins with the admitted processes."""
        if self._fence is not None:
            self._fence.settle()

    def find_absence_error(self, present: Sequence[str]) -> str | None:
        """Return the reason why these parties cannot continue without the others; None if they can."""
        if self._facts.purpose != "prediction":
            return f"{'An' if self._facts.purpose == 'alignment' else 'A'} {self._facts.purpose} needs all parties."
        try:
            check_present(self._config, self._roster, present)
        except GlasuError as error:
            return f"{error.public_message[:1].upper()}{error.public_message[1:]}"
        return None

    def _others(self, party: str) -> dict[str, Facts]:
        return {THE_SERVER: self._facts, **{name: facts for name, facts in self._stated.items() if name != party}}

    def _refuse_missing_tags(self, party: str, facts: Facts) -> None:
        """Refuse a party that received the shares of the others but states no HMAC for one of them."""
        asked, shares = self._asked
        if asked != party or shares.get(party) != facts.share:
            return
        self._asked = "", {}
        stated = {(tag.party, tag.share) for tag in facts.id_tags}
        if missing := [name for name, share in shares.items() if name != party and (name, share.key) not in stated]:
            listed = ", ".join(missing)
            raise RefusalError(Code.DIFFERENT_FACTS, f"it does not compare its ids with {listed}; {SAME_VERSION}")

    def _check_run(self, hello: HelloPayload) -> None:
        if hello.only not in (None, self._run):
            raise RefusalError(
                Code.UNWANTED_RUN,
                f"it was started for run {make_printable(hello.only, 64)} (--run), and this is run {self._run}. Check "
                "the address of the server and the id.",
            )
        if hello.run not in (None, self._run):
            raise RefusalError(
                Code.OTHER_RUN,
                f"its --out folder holds a part of run {make_printable(hello.run, 64)}, and this server serves run "
                f"{self._run}. Check the server's --out. To take part in the new run, choose another --out at this "
                "party, or start over there with --fresh.",
            )

    def _check_rounds(self, hello: HelloPayload) -> None:
        own = self._rounds()
        if hello.fresh and (saved := max(own, default=0)):
            raise RefusalError(
                Code.RUN_STARTED,
                f"it wants to start over (--fresh), and this run is past round {saved}; nothing was removed. To "
                "continue, remove --fresh at this party. To start over, start the server with --fresh as well.",
            )
        if not set(hello.rounds) & set(own):
            here, there = (", ".join(map(str, rounds)) or "none" for rounds in (own, hello.rounds))
            raise RefusalError(
                Code.NO_COMMON_CHECKPOINT,
                f"its intact checkpoints are of rounds: {there}; the server's: {here}; none in common. Restore the "
                "--out folder that lost them, or start over with --fresh at the server and at every party.",
            )

    def _check_settings(self, party: str, stated: StatementPayload) -> None:
        nodes = stated.facts.nodes  # None in an alignment, whose settings do not depend on the number of nodes
        try:
            config = self._config if nodes is None else resolve(self._config, nodes)[0]
        except ConfigError as error:  # no settings fit a graph of this size
            raise RefusalError(Code.INVALID_SETTINGS, error.public_message) from None
        if stated.digest == config.digest():
            return
        differences = compare_settings({THE_SERVER: config.flatten(), party: stated.settings})
        refuse_settings(differences, f"it would run other settings: {{}}; {SAME_VERSION}")
        raise RefusalError(Code.DIFFERENT_SETTINGS, f"the digests of the settings differ; {SAME_VERSION}")
