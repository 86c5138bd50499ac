"""The states of a peer and of a run. Tables list all transitions; only `StateMachine.advance` changes a state.

A peer's state describes the progress of its process. It does not depend on whether the peer has a stream at the moment.
Both sides use the same table: the server has one state machine per party, and a party has one for itself.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from glasu.errors import ProtocolError


class PeerState(enum.Enum):
    """The progress of a party's process."""

    AWAY = "away"  # no process of the party was admitted yet
    CONNECTED = "connected"  # a process was admitted and is building its model
    PREPARED = "prepared"  # the process has stated its settings and checkpoints
    COMPARING = "comparing"  # the process has the key shares of the other parties and makes HMACs of its ids
    PROPOSED = "proposed"  # the server has proposed an attempt to the process
    RUNNING = "running"  # the process has confirmed the attempt and exchanges messages
    FINISHED = "finished"  # the process has written its results
    CLOSED = "closed"  # the run is complete, and the server sends the goodbye to the process
    REFUSED = "refused"  # the process was refused or has declined the run; another process of the party may connect
    ABSENT = "absent"  # no connection for too long: the run continues without the party; a new process may connect
    FAILED = "failed"  # the process has reported a failure


class PeerEvent(enum.Enum):
    """Events that change a peer's state."""

    ADMIT = "admit"  # the server admits a new process
    PREPARE = "prepare"
    REGATHER = "regather"  # the server asks for a new statement
    COMPARE = "compare"  # the server asks for a new statement with HMACs of the ids
    PROPOSE = "propose"
    CONFIRM = "confirm"
    FINISH = "finish"
    CLOSE = "close"
    REFUSE = "refuse"  # the server refuses the process, or the process declines the run
    OMIT = "omit"  # the run continues without the party
    FAIL = "fail"


class RunState(enum.Enum):
    """The progress of a run, at the server."""

    GATHERING = "gathering"  # parties connect and prepare
    PROPOSED = "proposed"  # an attempt was proposed; not all parties have confirmed it
    RUNNING = "running"  # messages are exchanged
    FINISHING = "finishing"  # all messages are exchanged; parties write their results
    COMPLETE = "complete"  # every party has reported its results; the server writes its report
    RESTARTING = "restarting"  # the attempt is void because a party's process changed; the parties are gathered again
    CLOSED = "closed"  # the server sends the goodbye to the parties
    LEAVING = "leaving"  # this server process was interrupted; another server process can resume the run
    FAILED = "failed"


class RunEvent(enum.Enum):
    """Events that change the state of a run."""

    GATHER = "gather"
    PROPOSE = "propose"
    START = "start"  # every party has confirmed the attempt
    EXHAUST = "exhaust"  # the script has no more messages
    COMPLETE = "complete"  # every party has reported its results
    RESTART = "restart"  # a new process was admitted, a message was invalid, or a party is omitted
    CLOSE = "close"
    LEAVE = "leave"
    FAIL = "fail"


_P, _E = PeerState, PeerEvent
_ADMITTED = (_P.CONNECTED, _P.PREPARED, _P.COMPARING, _P.PROPOSED, _P.RUNNING, _P.FINISHED)
PEER_TRANSITIONS: dict[tuple[PeerState, PeerEvent], PeerState] = {
    (_P.CONNECTED, _E.PREPARE): _P.PREPARED,
    (_P.PREPARED, _E.COMPARE): _P.COMPARING,
    (_P.COMPARING, _E.PREPARE): _P.PREPARED,
    (_P.PREPARED, _E.PROPOSE): _P.PROPOSED,
    (_P.PROPOSED, _E.CONFIRM): _P.RUNNING,
    (_P.RUNNING, _E.FINISH): _P.FINISHED,
    # A statement or a failure that arrives after the end of the run changes nothing.
    (_P.CLOSED, _E.PREPARE): _P.CLOSED,
    (_P.CLOSED, _E.FAIL): _P.CLOSED,
    # An absent party has no process, so only a new process changes its state (ADMIT).
    (_P.ABSENT, _E.REFUSE): _P.ABSENT,
    (_P.ABSENT, _E.FAIL): _P.ABSENT,
    # A restarted process replaces the earlier one in any state.
    **{(state, _E.ADMIT): _P.CONNECTED for state in _P},
    # A party that is CONNECTED or COMPARING is not asked for another statement, because one is still due.
    **{(state, _E.REGATHER): _P.CONNECTED for state in (_P.PREPARED, _P.PROPOSED, _P.RUNNING, _P.FINISHED)},
    **{(state, _E.CLOSE): _P.CLOSED for state in (*_ADMITTED, _P.CLOSED)},
    **{(state, _E.REFUSE): _P.REFUSED for state in (_P.AWAY, *_ADMITTED, _P.CLOSED, _P.REFUSED, _P.FAILED)},
    **{(state, _E.FAIL): _P.FAILED for state in (_P.AWAY, *_ADMITTED, _P.REFUSED, _P.FAILED)},
    **{(state, _E.OMIT): _P.ABSENT for state in (_P.AWAY, *_ADMITTED, _P.REFUSED)},
}

_R, _V = RunState, RunEvent
_UNDER_WAY = (_R.PROPOSED, _R.RUNNING, _R.FINISHING)
_OPEN = (_R.GATHERING, *_UNDER_WAY, _R.RESTARTING, _R.COMPLETE)
RUN_TRANSITIONS: dict[tuple[RunState, RunEvent], RunState] = {
    (_R.GATHERING, _V.PROPOSE): _R.PROPOSED,
    (_R.PROPOSED, _V.START): _R.RUNNING,
    (_R.RUNNING, _V.EXHAUST): _R.FINISHING,
    (_R.FINISHING, _V.COMPLETE): _R.COMPLETE,
    (_R.COMPLETE, _V.CLOSE): _R.CLOSED,
    (_R.GATHERING, _V.CLOSE): _R.CLOSED,  # the server was restarted after the run had ended
    (_R.GATHERING, _V.RESTART): _R.GATHERING,
    (_R.RESTARTING, _V.RESTART): _R.RESTARTING,
    # The server has all results, so a new process does not void the attempt: the process waits for the end of the run.
    # Only an invalid result returns the run to GATHERING (by the event GATHER).
    (_R.COMPLETE, _V.RESTART): _R.COMPLETE,
    **{(state, _V.GATHER): _R.GATHERING for state in _OPEN},
    **{(state, _V.RESTART): _R.RESTARTING for state in _UNDER_WAY},
    **{(state, _V.LEAVE): _R.LEAVING for state in (*_OPEN, _R.CLOSED, _R.LEAVING)},
    (_R.FAILED, _V.LEAVE): _R.FAILED,
    **{(state, _V.FAIL): _R.FAILED for state in (*_OPEN, _R.CLOSED, _R.LEAVING, _R.FAILED)},
}

StateT = TypeVar("StateT", bound=enum.Enum)
EventT = TypeVar("EventT", bound=enum.Enum)


class StateMachine(Generic[StateT, EventT]):
    """A state that only events can change. A table lists the allowed transitions."""

    def __init__(self, start: StateT, table: Mapping[tuple[StateT, EventT], StateT]) -> None:
        self._state, self._table = start, table

    @property
    def state(self) -> StateT:
        return self._state

    def allows(self, event: EventT) -> bool:
        """Return whether the table allows the event in the current state."""
        return (self._state, event) in self._table

    def advance(self, event: EventT) -> StateT:
        """Apply an event, or raise ProtocolError if the table does not allow it in the current state."""
        if not self.allows(event):
            raise ProtocolError(f"'{event.value}' cannot follow the state '{self._state.value}'.")
        self._state = self._table[self._state, event]
        return self._state


def make_peer_machine() -> StateMachine[PeerState, PeerEvent]:
    """Return the machine of a party that has not connected yet."""
    return StateMachine(PeerState.AWAY, PEER_TRANSITIONS)


def make_run_machine() -> StateMachine[RunState, RunEvent]:
    """Return the machine of a run whose parties have not connected yet."""
    return StateMachine(RunState.GATHERING, RUN_TRANSITIONS)
