"""The tables of states: every state can be reached and left, and nothing but an event of the table changes one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glasu.errors import ProtocolError
from glasu.network.states import (
    PEER_TRANSITIONS,
    RUN_TRANSITIONS,
    PeerEvent,
    PeerState,
    RunEvent,
    RunState,
    make_peer_machine,
    make_run_machine,
)

TABLES = {
    "peer": (PEER_TRANSITIONS, PeerState, PeerEvent, make_peer_machine),
    "run": (RUN_TRANSITIONS, RunState, RunEvent, make_run_machine),
}
LAST = {RunState.FAILED, RunState.LEAVING}  # the process ends


@pytest.mark.parametrize("name", TABLES)
def test_every_state_and_event_of_a_table_is_used(name):
    table, states, events, start = TABLES[name]
    assert {event for _, event in table} == set(events)
    assert {state for state, _ in table} == set(states)
    reached, new = set(), {start().state}
    while new:
        reached |= new
        new = {after for (state, _), after in table.items() if state in reached} - reached
    assert reached == set(states)


def test_a_restarted_process_can_always_take_part_again():
    assert all(PEER_TRANSITIONS[state, PeerEvent.ADMIT] is PeerState.CONNECTED for state in PeerState)


def test_an_absent_party_takes_part_again_only_with_a_process_that_is_admitted():
    into = {state for (state, event), after in PEER_TRANSITIONS.items() if after is PeerState.ABSENT and state != after}
    assert into == set(PeerState) - {PeerState.ABSENT, PeerState.CLOSED, PeerState.FAILED}
    out = {
        event for (state, event), after in PEER_TRANSITIONS.items() if state is PeerState.ABSENT and after is not state
    }
    assert out == {PeerEvent.ADMIT}


def test_a_new_process_voids_an_attempt_and_nothing_else():
    changed = {
        state for (state, event), after in RUN_TRANSITIONS.items() if event is RunEvent.RESTART and after != state
    }
    assert changed == {RunState.PROPOSED, RunState.RUNNING, RunState.FINISHING}


def test_a_run_is_closed_only_after_all_results_are_there_or_before_any_attempt():
    closable = {state for state, event in RUN_TRANSITIONS if event is RunEvent.CLOSE}
    assert closable == {RunState.COMPLETE, RunState.GATHERING}
    assert RUN_TRANSITIONS[RunState.COMPLETE, RunEvent.RESTART] is RunState.COMPLETE
    assert {state for (state, _), after in RUN_TRANSITIONS.items() if after is RunState.COMPLETE} == {
        RunState.FINISHING,
        RunState.COMPLETE,
    }


def test_no_peer_is_running_that_has_not_confirmed_a_proposal():
    into = {(state, event) for (state, event), after in PEER_TRANSITIONS.items() if after is PeerState.RUNNING}
    assert into == {(PeerState.PROPOSED, PeerEvent.CONFIRM)}
    into = {(state, event) for (state, event), after in PEER_TRANSITIONS.items() if after is PeerState.PROPOSED}
    assert into == {(PeerState.PREPARED, PeerEvent.PROPOSE)}


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
def test_an_event_that_cannot_happen_now_is_refused_and_changes_nothing(name, data):
    table, _, events, start = TABLES[name]
    machine = start()
    for event in data.draw(st.lists(st.sampled_from(list(events)), max_size=30)):
        before = machine.state
        assert machine.allows(event) == ((before, event) in table)
        if machine.allows(event):
            assert machine.advance(event) is machine.state is table[before, event]
        else:
            with pytest.raises(ProtocolError, match="cannot follow the state"):
                machine.advance(event)
            assert machine.state is before


class Run(RuleBasedStateMachine):
    """A server and three parties that follow the tables, and the invariants that hold between them.

    Threads of gRPC admit, refuse and fail parties at any time. The thread of the run takes its steps in order, and the
    preconditions depend on its position only: it does not know which state the run has by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run, self.peers, self.position = make_run_machine(), [make_peer_machine() for _ in range(3)], "gather"

    def present(self):
        """Return the parties that take part, as `Roster.present` does."""
        return [peer for peer in self.peers if peer.state is not PeerState.ABSENT]

    def is_void(self) -> bool:
        """Return whether the thread of the run has to gather again, as `Roster.check` does."""
        if self.run.state is RunState.RESTARTING:
            self.position = "gather"
        return self.position == "gather"

    @rule(index=st.integers(0, 2))
    def admit(self, index):
        if self.run.state not in LAST:
            self.peers[index].advance(PeerEvent.ADMIT)
            if self.run.allows(RunEvent.RESTART):
                self.run.advance(RunEvent.RESTART)

    @rule(index=st.integers(0, 2), event=st.sampled_from([PeerEvent.PREPARE, PeerEvent.CONFIRM, PeerEvent.FINISH]))
    def speak(self, index, event):
        if self.peers[index].allows(event):
            self.peers[index].advance(event)

    @precondition(lambda self: self.position in ("gather", "close"))  # again where a result is invalid
    @rule()
    def gather(self):
        self.position = "propose"
        self.run.advance(RunEvent.GATHER)
        for peer in self.peers:
            if peer.allows(PeerEvent.REGATHER):
                peer.advance(PeerEvent.REGATHER)

    @precondition(lambda self: self.position == "propose")
    @rule()
    def propose(self):
        if not self.is_void() and all(peer.state is PeerState.PREPARED for peer in self.present()):
            self.position = "start"
            self.run.advance(RunEvent.PROPOSE)
            for peer in self.present():
                peer.advance(PeerEvent.PROPOSE)

    @precondition(lambda self: self.position == "start")
    @rule()
    def start(self):
        if not self.is_void() and all(peer.state in (PeerState.RUNNING, PeerState.FINISHED) for peer in self.present()):
            self.position = "exhaust"
            self.run.advance(RunEvent.START)

    @precondition(lambda self: self.position == "exhaust")
    @rule()
    def exhaust(self):
        if not self.is_void():
            self.position = "complete"
            self.run.advance(RunEvent.EXHAUST)

    @precondition(lambda self: self.position == "complete")
    @rule()
    def complete(self):
        if not self.is_void() and all(peer.state is PeerState.FINISHED for peer in self.present()):
            self.position = "close"
            self.run.advance(RunEvent.COMPLETE)

    @precondition(lambda self: self.position in ("propose", "start", "complete"))  # it waits for parties
    @rule(index=st.integers(0, 2))
    def omit(self, index):
        peer = self.peers[index]
        if not self.is_void() and peer.allows(PeerEvent.OMIT) and len(self.present()) > 1:
            peer.advance(PeerEvent.OMIT)
            self.run.advance(RunEvent.RESTART)

    @precondition(lambda self: self.position == "close")
    @rule()
    def close(self):
        assert not self.is_void()
        self.position = "end"
        self.run.advance(RunEvent.CLOSE)
        for peer in self.peers:
            if peer.allows(PeerEvent.CLOSE):
                peer.advance(PeerEvent.CLOSE)

    @rule(index=st.integers(0, 2))
    def refuse(self, index):
        self.peers[index].advance(PeerEvent.REFUSE)
        if self.run.allows(RunEvent.RESTART):
            self.run.advance(RunEvent.RESTART)

    @precondition(lambda self: self.position in ("close", "end"))  # earlier, it fails the run
    @rule(index=st.integers(0, 2))
    def fail(self, index):
        self.peers[index].advance(PeerEvent.FAIL)

    @invariant()
    def messages_flow_only_between_those_who_confirmed(self):
        if self.run.state in (RunState.RUNNING, RunState.FINISHING):
            assert all(peer.state in (PeerState.RUNNING, PeerState.FINISHED) for peer in self.present())

    @invariant()
    def somebody_takes_part(self):
        assert self.present()

    @invariant()
    def nobody_waits_for_a_proposal_that_was_withdrawn(self):
        if self.run.state is RunState.GATHERING:
            assert not any(peer.state in (PeerState.PROPOSED, PeerState.RUNNING) for peer in self.peers)


TestRun = Run.TestCase
