"""Fencing: at most one process of each party takes part in a run.

In joining.json, a party counts the starts of its command and lists the random names of its processes. The server
records the process that it admitted last. It admits a new process only if the folder of the new process lists the
recorded process as an earlier one.

The rule "the highest count wins" would not be enough: every start in a second folder of the party increases the count
of that folder, even if the server refuses the process. So the second folder would win in the end.

If the folder is copied, the copy may take over the run once. After that, the original folder is refused, because it
does not list the process that ran in the copy.
"""

from __future__ import annotations

import dataclasses
import secrets

from glasu.network.handshake import Code, Process, RefusalError
from glasu.network.state_file import JoiningRecord, ServingRecord, StateFile

MAX_STARTS = 256  # number of names to keep in each list: of started processes, and of admitted processes


def count_start(state: StateFile[JoiningRecord]) -> None:
    """Count a start of a party's command, and choose a name for the process. Both are durable on return."""
    starts = (*state.value.starts, secrets.token_hex(8))[-MAX_STARTS:]
    state.update(incarnation=state.value.incarnation + 1, starts=starts)


def note_welcome(state: StateFile[JoiningRecord], *, begun: bool = False) -> None:
    """Record that the server welcomed this process, so that its name stays in the list after many later starts.

    Args:
        state: the state file of the party.
        begun: whether an attempt begins with this process. If so, the server restores no earlier process any more.
    """
    process = state.value.starts[-1]
    before = () if begun else tuple(name for name in state.value.admitted if name != process)
    # before[0] is the process of the last attempt. It stays in the list, because `Fence.withdraw` may restore it.
    state.update(admitted=(*before[:1], *before[1:][-MAX_STARTS:], process))


def describe_process(record: JoiningRecord) -> Process:
    """Return the fencing token of the current process."""
    *before, process = record.starts
    return Process(incarnation=record.incarnation, name=process, before=(*record.admitted, *before))


class Fence:
    """Records, for each party, the process that the server admitted last.

    The record is durable, so a restarted server still refuses other processes.
    """

    def __init__(self, state: StateFile[ServingRecord]) -> None:
        """Read and write the processes in `state`."""
        self._state = state
        self._replaced: dict[str, Process | None] = {}  # the processes that `withdraw` restores, by party

    def check(self, party: str, process: Process) -> None:
        """Raise RefusalError if a process must not be admitted."""
        known = self._state.value.processes.get(party)
        if known is None or known.name == process.name:
            return
        if known.name not in process.before or known.incarnation >= process.incarnation:
            raise RefusalError(
                Code.SECOND_PROCESS,
                f"another process of party {party!r} takes part, or has taken part, in this run (start "
                f"{known.incarnation} of its folder; this is start {process.incarnation} of another folder). Stop one "
                "process and continue with the --out folder of the other. If that folder is lost, start over with "
                "--fresh at the server.",
            )

    def admit(self, party: str, process: Process) -> None:
        """Admit this process as the party's only one. The change is durable."""
        known = self._state.value.processes
        before = known.get(party)
        if before is None or before.name != process.name:
            admitted = dataclasses.replace(process, before=())
            self._state.update(processes={**known, party: admitted})
            self._replaced[party] = before

    def record_attempt(self) -> None:
        """Record that an attempt begins with the admitted processes. From then on, they cannot be withdrawn."""
        self._replaced.clear()

    def withdraw(self, party: str) -> None:
        """Forget a process that was admitted after the last attempt began, and restore the process before it."""
        if party in self._replaced:
            known, before = dict(self._state.value.processes), self._replaced.pop(party)
            known.pop(party, None)
            self._state.update(processes=known if before is None else {**known, party: before})
