"""What the server does with a process that does not fit the run: the policies `Refuse` and `Collect`.

policy     a difference                        the admitted process            used by
Refuse     raises RefusalError                 is recorded durably (fencing)   training, prediction, alignment
Collect    becomes a finding of the diagnosis  is not recorded                 dry run

Both policies use the rules in `compatibility.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from glasu.config import RunConfig, resolve
from glasu.errors import ConfigError
from glasu.network.compatibility import (
    THE_SERVER,
    compare_settings,
    describe_builds,
    refuse_differences,
    refuse_missing_facts,
    refuse_settings,
)
from glasu.network.facts import Facts, resolve_tags
from glasu.network.fencing import Fence
from glasu.network.handshake import SAME_VERSION, Code, HelloPayload, Process, RefusalError, StatementPayload
from glasu.network.log_lines import make_printable
from glasu.network.purposes import Purpose
from glasu.network.recorded_heads import RecordedHeads


@dataclass(frozen=True)
class ServedRun:
    """The run that a server offers to the parties."""

    purpose: Purpose
    facts: Facts  # the facts of the server
    config: RunConfig  # the settings that the welcome message offers to a party
    roster: tuple[str, ...]  # the parties in client order
    run: str  # the id of the run
    rounds: Callable[[], Mapping[int, str]]  # returns the server's checkpoints and their digests


class AdmissionPolicy:
    """Decides what the server does with a process that does not fit the run, and records admitted processes.

    The methods of this class admit every process and record nothing.
    """

    def admit(self, party: str, hello: HelloPayload, others: Mapping[str, Facts]) -> None:
        """Check the hello of a process with the same purpose, and record the process.

        Args:
            party: the party that connects.
            hello: what its process states.
            others: the facts of the server and of the other admitted parties, by name.
        """

    def admit_finished(self, party: str, hello: HelloPayload) -> None:
        """Admit a process to a run in which all parties have their results. The process must have its results."""

    def check_facts(self, party: str, facts: Facts, others: Mapping[str, Facts]) -> None:
        """Compare all facts of a prepared party with the facts of the server and of the other parties."""

    def check_statement(
        self, party: str, stated: StatementPayload, earlier: Mapping[str, StatementPayload]
    ) -> Sequence[str]:
        """Check the parts of a statement that are not facts; return warnings for the logs.

        Args:
            party: the party that sent the statement.
            stated: its statement.
            earlier: the statements of the parties that are prepared, by name. This party's previous statement may be
                among them.
        """
        return ()

    def withdraw(self, party: str) -> None:
        """Forget the admitted process of a party."""

    def record_attempt(self) -> None:
        """Record that an attempt begins with the admitted processes."""

    def read_clock(self) -> float | None:
        """Return the server's time to send in a welcome, or None to send no time."""
        return None  # a run does not depend on the clocks of the roles


class Collect(AdmissionPolicy):
    """Admit every process with the same purpose, without a fencing token, and write no state.

    The dry run compares the collected statements at its end (`compatibility.collect_findings`).
    """

    def read_clock(self) -> float:
        """Return the server's time, because every party of a dry run compares it with its own clock."""
        return time.time()


class Refuse(AdmissionPolicy):
    """Refuse a process at the first difference, and record each admitted process durably."""

    def __init__(self, served: ServedRun, fence: Fence, recorded_heads: RecordedHeads) -> None:
        """Refuse processes that do not fit a run.

        Args:
            served: the run.
            fence: records the admitted processes.
            recorded_heads: records the heads of the parties' ledgers.
        """
        self._served, self._fence, self._recorded_heads = served, fence, recorded_heads

    def admit(self, party: str, hello: HelloPayload, others: Mapping[str, Facts]) -> None:
        """Record the process durably as the party's only one, or raise RefusalError."""
        process = self._check_process(party, hello)
        refuse_differences(party, hello.facts, others)
        self._check_rounds(hello)
        # The record must be durable before the welcome is sent. Otherwise a server that crashes after sending it could
        # admit an older process after its restart, and two processes of the party would take part in the run.
        self._fence.admit(party, process)

    def admit_finished(self, party: str, hello: HelloPayload) -> None:
        """Record the process durably if it has its results, or raise RefusalError."""
        process = self._check_process(party, hello)
        if hello.finished is None:
            raise RefusalError(Code.RUN_FINISHED, self._served.purpose.finished_answer)
        self._fence.admit(party, process)

    def check_facts(self, party: str, facts: Facts, others: Mapping[str, Facts]) -> None:
        """Raise RefusalError if a fact differs or is missing."""
        compared = resolve_tags({**others, party: facts})
        refuse_differences(party, compared.pop(party), compared)
        refuse_missing_facts(self._served.purpose, party, facts, self._served.facts)

    def check_statement(
        self, party: str, stated: StatementPayload, earlier: Mapping[str, StatementPayload]
    ) -> Sequence[str]:
        """Raise RefusalError if settings or ledger do not fit the run. Return warnings at a party's first statement."""
        self._check_settings(party, stated)
        if stated.ledger is None:
            raise RefusalError(Code.INVALID_PAYLOAD, f"its statement names no ledger; {SAME_VERSION}")
        self._recorded_heads.check(party, stated.ledger.head)
        if party in earlier:
            return ()
        known = {THE_SERVER: self._served.facts, **{name: each.facts for name, each in earlier.items()}}
        return describe_builds(party, stated.facts, known)

    def withdraw(self, party: str) -> None:
        """Forget the admitted process and restore the previous one, unless an attempt has begun."""
        self._fence.withdraw(party)

    def record_attempt(self) -> None:
        """Make the admitted processes final."""
        self._fence.record_attempt()

    def _check_process(self, party: str, hello: HelloPayload) -> Process:
        """Return the process if it is the newest one of the party and belongs to this run."""
        run = self._served.run
        if hello.process is None:
            raise RefusalError(Code.INVALID_PAYLOAD, f"its hello names no process; {SAME_VERSION}")
        self._fence.check(party, hello.process)
        if hello.only not in (None, run):
            raise RefusalError(
                Code.UNWANTED_RUN,
                f"it was started for run {make_printable(hello.only, 64)} (--run), but this is run {run}. Check the "
                "address of the server and the id of the run.",
            )
        if hello.run not in (None, run):
            raise RefusalError(
                Code.OTHER_RUN,
                f"its --out folder holds a part of run {make_printable(hello.run, 64)}, but this server serves run "
                f"{run}. Check the server's --out. To take part in the new run, choose another --out at this party, or "
                "start over there with --fresh.",
            )
        return hello.process

    def _check_rounds(self, hello: HelloPayload) -> None:
        own = self._served.rounds()
        if hello.fresh and (saved := max(own, default=0)):
            raise RefusalError(
                Code.RUN_STARTED,
                f"it wants to start over (--fresh), but this run is past round {saved}; nothing was removed. To "
                "continue, remove --fresh at this party. To start over, start the server with --fresh as well.",
            )
        if not set(hello.rounds) & set(own):
            here, there = (", ".join(map(str, rounds)) or "none" for rounds in (own, hello.rounds))
            raise RefusalError(
                Code.NO_COMMON_CHECKPOINT,
                f"it has no intact checkpoint in common with the server (rounds at the party: {there}; at the server: "
                f"{here}). Restore the --out folder that lost its checkpoints, or start over with --fresh at the "
                "server and at every party.",
            )

    def _check_settings(self, party: str, stated: StatementPayload) -> None:
        nodes = stated.facts.nodes  # None in an alignment, whose settings do not depend on the number of nodes
        offered = self._served.config
        try:
            config = offered if nodes is None else resolve(offered, nodes)[0]
        except ConfigError as error:  # the settings do not fit a graph of this size
            raise RefusalError(Code.INVALID_SETTINGS, error.public_message) from None
        if stated.digest == config.digest():
            return
        differences = compare_settings({THE_SERVER: config.flatten(), party: stated.settings})
        refuse_settings(differences, f"it would run with different settings: {{}}; {SAME_VERSION}")
        raise RefusalError(Code.DIFFERENT_SETTINGS, f"the digests of the settings differ; {SAME_VERSION}")
