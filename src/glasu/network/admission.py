"""The server's side of the handshake of training and prediction: which process of a party may take part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glasu.config import RunConfig
from glasu.errors import ConfigError
from glasu.network.compatibility import (
    SERVER,
    compare_settings,
    describe_builds,
    refuse_differences,
    refuse_missing_facts,
    refuse_settings,
)
from glasu.network.facts import Facts
from glasu.network.fencing import Fence
from glasu.network.handshake import SAME_VERSION, Code, Hello, Payload, Prepared, RefusalError, Welcome, read_payload
from glasu.network.log_lines import printable
from glasu.network.roster import RestartAttempt
from glasu.network.state_file import ServingRecord, StateFile
from glasu.records import to_plain


def refuse_other_purpose(server: Facts, party: Facts) -> None:
    """Refuse a dry run at a server that trains or predicts, and the other way round."""
    if "dry run" not in (server.purpose, party.purpose) or server.purpose == party.purpose:
        return
    if party.purpose == "dry run":
        why = f"a {server.purpose} is under way there; start glasu doctor at the server instead of glasu serve."
    else:
        why = f"this server runs glasu doctor; for a {party.purpose} start glasu serve there."
    raise RefusalError(Code.OTHER_PURPOSE, why)


class Admission:
    """Compares each process of a party with the run, with the server and with the connected parties."""

    def __init__(
        self,
        facts: Facts,
        config: RunConfig,
        roster: Sequence[str],
        state: StateFile[ServingRecord],
        rounds: Callable[[], Mapping[int, str]],
        resolve_config: Callable[[int], RunConfig],
    ) -> None:
        """Admit processes of the roster's parties.

        Args:
            facts: the server's.
            config: the settings that a welcome offers.
            roster: the parties in client order.
            state: remembers the admitted processes; its run id is the run's.
            rounds: returns the server's checkpoints and their digests.
            resolve_config: returns the resolved settings, given the number of nodes.
        """
        self._facts, self._config, self._roster = facts, config, tuple(roster)
        self._fence, self._state = Fence(state), state
        self._rounds, self._resolve_config = rounds, resolve_config
        self._stated: dict[str, Facts] = {}  # by party, of the admitted processes
        self._statements: dict[str, Prepared] = {}  # by party

    @property
    def run(self) -> str:
        """The id of the run."""
        return str(self._state.value.run)

    def admit(self, party: str, hello: Payload, *, closing: bool) -> Payload:
        """Admit a process, durably, and return its welcome, or raise RefusalError."""
        stated = read_payload(Hello, hello, f"the hello of party {party!r}")
        refuse_other_purpose(self._facts, stated.facts)
        if stated.process is None:
            raise RefusalError(Code.INVALID_PAYLOAD, f"its hello names no process; {SAME_VERSION}")
        self._fence.check(party, stated.process)
        self._check_run(stated)
        if closing:
            if stated.finished is None:
                raise RefusalError(Code.RUN_FINISHED, "this run is finished; --fresh at the server starts another.")
        else:
            self._check_start(stated)
            refuse_differences(party, stated.facts, self._others(party))
            self._check_checkpoints(stated)
        self._fence.admit(party, stated.process)
        self._stated[party] = stated.facts
        self._statements.pop(party, None)
        index = self._roster.index(party)
        return to_plain(Welcome(config=self._config.to_dict(), roster=self._roster, index=index, run=self.run))

    def prepare(self, party: str, statement: Payload) -> Sequence[str]:
        """Check what a party states when it is ready to run, or raise RefusalError; return warnings for the logs."""
        stated = read_payload(Prepared, statement, f"the statement of party {party!r}")
        refuse_differences(party, stated.facts, self._others(party))
        refuse_missing_facts(party, stated.facts, self._facts)
        self._check_settings(party, stated)
        known = {
            SERVER: self._facts,
            **{name: other.facts for name, other in self._statements.items() if name != party},
        }
        is_new = party not in self._statements
        self._stated[party], self._statements[party] = stated.facts, stated
        return describe_builds(party, stated.facts, known) if is_new else ()

    def collect_statements(self) -> dict[str, Prepared]:
        """Return the statements of all parties, in client order.

        Raises:
            RestartAttempt: a process came after the session had gathered the parties, and has stated nothing yet.
        """
        statements = dict(self._statements)
        if len(statements) < len(self._roster):
            raise RestartAttempt
        return {party: statements[party] for party in self._roster}

    def withdraw(self, party: str) -> None:
        """Forget the admitted process of a party."""
        self._stated.pop(party, None)
        self._statements.pop(party, None)
        self._fence.withdraw(party)

    def settle(self) -> None:
        """Note that an attempt begins with the admitted processes."""
        self._fence.settle()

    def _others(self, party: str) -> dict[str, Facts]:
        return {SERVER: self._facts, **{name: facts for name, facts in self._stated.items() if name != party}}

    def _check_run(self, hello: Hello) -> None:
        if hello.only not in (None, self.run):
            raise RefusalError(
                Code.UNWANTED_RUN,
                f"it was started for run {printable(hello.only, 64)} (--run), and this is run {self.run}. Check the "
                "address of the server and the id.",
            )
        if hello.run not in (None, self.run):
            raise RefusalError(
                Code.OTHER_RUN,
                f"its --out folder holds a part of run {printable(hello.run, 64)}, and this server serves run "
                f"{self.run}. Check the server's --out. To take part in the new run, choose another --out at this "
                "party, or start over there with --fresh.",
            )

    def _check_start(self, hello: Hello) -> None:
        saved = max(self._rounds(), default=0)
        if hello.fresh and saved:
            raise RefusalError(
                Code.RUN_STARTED,
                f"it wants to start over (--fresh), and this run is past round {saved}; nothing was removed. To "
                "continue, leave out --fresh at this party. To start over, start the server with --fresh, too.",
            )

    def _check_checkpoints(self, hello: Hello) -> None:
        if not set(hello.rounds) & set(self._rounds()):
            here, there = (", ".join(map(str, rounds)) or "none" for rounds in (self._rounds(), hello.rounds))
            raise RefusalError(
                Code.NO_COMMON_CHECKPOINT,
                f"its intact checkpoints are of rounds: {there}; the server's: {here}; none in common. Restore the "
                "--out folder that lost them, or start over with --fresh at the server and at every party.",
            )

    def _check_settings(self, party: str, stated: Prepared) -> None:
        assert stated.facts.nodes is not None  # refuse_missing_facts has checked it
        try:
            config = self._resolve_config(stated.facts.nodes)
        except ConfigError as error:  # no settings fit a graph of this size
            raise RefusalError(Code.INVALID_SETTINGS, error.public_message) from None
        if stated.digest == config.digest():
            return
        settings: Mapping[str, Any] = stated.settings
        differences = compare_settings({SERVER: config.flatten(), party: settings})
        refuse_settings(differences, f"it would run other settings: {{}}; {SAME_VERSION}", (SERVER, party))
        raise RefusalError(Code.DIFFERENT_SETTINGS, f"the digests of the settings differ; {SAME_VERSION}")
