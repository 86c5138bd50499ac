"""Fencing: at most one process of each party takes part in a run.

A party counts the starts of its command in joining.json and gives every process a random name. The server remembers
the process that it admitted last and admits another one only if that one lists the remembered process among the
earlier starts in the same folder. A counter alone would not be enough: a second folder that is refused and started
again would count up until it is the highest. A copied folder may take over once; the folder it was copied from does
not list the copy among its starts and stays out.
"""

from __future__ import annotations

import dataclasses
import secrets

from glasu.network.handshake import Code, Process, RefusalError
from glasu.network.state_file import JoiningRecord, ServingRecord, StateFile

REMEMBERED = 256  # earlier starts to remember, without those that a server has welcomed


def count_start(state: StateFile[JoiningRecord]) -> None:
    """Count a start of a party's command and name the process; both are durable before any peer learns of it."""
    starts = (*state.value.starts, secrets.token_hex(8))[-REMEMBERED:]
    state.update(incarnation=state.value.incarnation + 1, starts=starts)


def note_welcome(state: StateFile[JoiningRecord], *, begun: bool = False) -> None:
    """Remember that the server welcomed this process, so that later starts cannot push its name out of the list.

    Args:
        state: the party's.
        begun: an attempt begins with this process, so the server no longer remembers an earlier one.
    """
    process = state.value.starts[-1]
    before = () if begun else tuple(name for name in state.value.met if name != process)
    state.update(met=(*before[:1], *before[1:][-REMEMBERED:], process))


def describe_process(record: JoiningRecord) -> Process:
    """Return the fencing token of the present process."""
    *before, process = record.starts
    return Process(incarnation=record.incarnation, name=process, before=(*record.met, *before))


class Fence:
    """The process of each party that the server admitted last. Durable, so a restarted server keeps others out."""

    def __init__(self, state: StateFile[ServingRecord]) -> None:
        """Keep the processes in `state`."""
        self._state = state
        self._replaced: dict[str, Process | None] = {}  # what `withdraw` restores, by party

    def check(self, party: str, process: Process) -> None:
        """Raise RefusalError if a process must not be admitted."""
        known = self._state.value.processes.get(party)
        if known is None or known.name == process.name:
            return
        if known.name not in process.before or known.incarnation >= process.incarnation:
            raise RefusalError(
                Code.SECOND_PROCESS,
                f"another process of party {party!r} takes part, or has taken part, in this run (its start "
                f"{known.incarnation}; this is start {process.incarnation} of another folder). Stop one of them and "
                "continue with the --out folder of the other. If that folder is lost, start over with --fresh at the "
                "server.",
            )

    def admit(self, party: str, process: Process) -> None:
        """Make this process the party's, durably."""
        known = self._state.value.processes
        before = known.get(party)
        if before is None or before.name != process.name:
            admitted = dataclasses.replace(process, before=())
            self._state.update(processes={**known, party: admitted})
            self._replaced[party] = before

    def settle(self) -> None:
        """Note that an attempt begins with the admitted processes; none of them can be withdrawn any more."""
        self._replaced.clear()

    def withdraw(self, party: str) -> None:
        """Forget an admitted process that did not take part, and restore the one before it."""
        if party in self._replaced:
            known, before = dict(self._state.value.processes), self._replaced.pop(party)
            known.pop(party, None)
            self._state.update(processes=known if before is None else {**known, party: before})
