"""Parties that stay away: the session continues without them where the handshake allows it, and takes them back."""

from __future__ import annotations

import numpy as np
import pytest

from glasu.errors import AbsenceError
from glasu.network.handshake import ResultPayload
from glasu.network.roster import Attempt, RestartAttempt
from glasu.network.states import PeerState, RunState
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Joint, Partial
from glasu.protocol.requests import Receive
from support.controls import hello
from support.raw_party import STATEMENT, ServerHarness, wait_for
from support.roles import Role
from support.toy_run import ToyServerHandshake, key

WAIT = 600.0


class WaitingHarness(ServerHarness):
    """A server whose clock stands still until it is set; `needs` are the parties without which nobody continues."""

    def __init__(self, names="abc", needs="a"):
        self.now = 0.0
        super().__init__(
            names,
            handshake=ToyServerHandshake(needs=needs),
            wait=WAIT,
            clock=lambda: self.now,
            on_invalid_message="wait",
        )

    def state(self, name):
        return self.session.roster.peers[name].state

    def prepare(self, name):
        party = self.connect(name)
        party.send_control("Statement", payload=STATEMENT)
        wait_for(lambda: self.state(name) is PeerState.PREPARED)
        return party

    def gather(self):
        """Gather the parties that are there when the time of the others is over."""
        role = Role("gathering", self.session.gather)
        self.now += WAIT
        return role

    def begin(self, number, parties, present):
        """Begin an attempt with these parties, which confirm it."""
        attempt = Attempt(number, 0, dict.fromkeys(present, "start"), self.toy.check_limits)
        role = Role("beginning", lambda: self.session.begin_attempt(attempt))
        for party in parties:
            wait_for(lambda party=party: number in [each["number"] for each in proposals(party)])
            party.send_control("Confirmation", attempt=number, digest="start")
        role.outcome(20)


def proposals(party):
    return [control.fields for control in party.controls() if control.kind == "ProposedAttempt"]


def partial(client, attempt=1):
    return encode(Partial(key(0, 0, client, attempt), np.full((1, 4), float(client), np.float32)))


def test_parties_without_a_connection_for_too_long_are_absent_and_the_attempt_names_the_others():
    harness = WaitingHarness()
    a, c = harness.prepare("a"), harness.prepare("c")
    assert harness.gather().outcome(20) == ("a", "c")
    assert harness.state("b") is PeerState.ABSENT
    assert "continuing without b: no connection for 600 s." in harness.log
    assert harness.handshake.withdrawn == ["b"]
    harness.begin(1, [a, c], "ac")
    assert [each["present"] for each in proposals(a) + proposals(c)] == [["a", "c"], ["a", "c"]]


def test_no_message_is_awaited_from_an_absent_party_and_none_is_sent_to_it():
    harness = WaitingHarness()
    a, c = harness.prepare("a"), harness.prepare("c")
    harness.gather().outcome(20)
    harness.begin(1, [a, c], "ac")
    a.send_message(partial(0))
    c.send_message(partial(1))  # the second client of this attempt
    found = harness.session.receive(Receive((Partial,), key(0, 0)))
    assert [message.key.client for message in found] == [0, 1]
    harness.session.broadcast(Joint(key(0, 0), np.zeros((1, 4), np.float32)))
    assert harness.session.roster.peers["b"].channel.outbox.held == 0
    a.send_control("PartyResult", attempt=1, payload={"received": 1})
    c.send_control("PartyResult", attempt=1, payload={"received": 3})
    assert harness.session.collect_results() == {"a": ResultPayload(received=1), "c": ResultPayload(received=3)}


def test_the_place_of_an_absent_party_among_the_clients_is_not_kept():
    harness = WaitingHarness()
    a, c = harness.prepare("a"), harness.prepare("c")
    harness.gather().outcome(20)
    harness.begin(1, [a, c], "ac")
    c.send_message(partial(2))  # its place among all parties
    assert "expected attempt and client (1, 1), got (1, 2)" in c.last_word().fields["reason"]


def test_where_the_others_cannot_continue_the_run_fails_and_says_why():
    harness = WaitingHarness(needs="b")
    harness.prepare("a")
    with pytest.raises(AbsenceError, match=r"waited 600 s for b, c to join; .* All are needed\. Start the missing"):
        harness.gather().outcome(20)


def test_a_party_that_is_lost_in_an_attempt_is_awaited_and_then_the_next_attempt_is_without_it():
    harness = WaitingHarness()
    parties = [harness.prepare(name) for name in "abc"]
    harness.gather().outcome(20)
    harness.begin(1, parties, "abc")
    a, b, c = parties
    a.send_message(partial(0))
    b.end()
    harness.now += WAIT - 1
    receiving = Role("receiving", lambda: harness.session.receive(Receive((Partial,), key(0, 0))))
    c.send_message(partial(2))
    receiving.join(1.5)
    assert receiving.is_alive()
    harness.now += 1
    assert isinstance(receiving.error(20), RestartAttempt)
    assert harness.session.roster.run.state is RunState.RESTARTING
    gathering = Role("gathering", harness.session.gather)
    for party in (a, c):
        wait_for(lambda party=party: any(control.kind == "StatementRequest" for control in party.controls()))
        party.send_control("Statement", payload=STATEMENT)
    assert gathering.outcome(20) == ("a", "c")  # its time was over: it is not awaited again
    harness.begin(2, [a, c], "ac")


def test_an_absent_process_that_returns_passes_the_handshake_and_takes_part_in_the_next_attempt():
    harness = WaitingHarness()
    b = harness.prepare("b")
    wait_for(b.controls)  # another thread of the raw party reads the welcome
    server = b.controls()[0].fields["server"]
    b.end()
    a, c = harness.prepare("a"), harness.prepare("c")
    harness.gather().outcome(20)
    harness.begin(1, [a, c], "ac")
    back = harness.connect("b", hello(server=server))  # the process that was there before
    wait_for(back.controls)
    assert back.controls()[0].fields["resumed"] is False
    with pytest.raises(RestartAttempt):
        harness.session.receive(Receive((Partial,), key(0, 0)))
    gathering = Role("gathering", harness.session.gather)
    for party in (a, back, c):
        party.send_control("Statement", payload=STATEMENT)
    assert gathering.outcome(20) == ("a", "b", "c")


def test_an_attempt_planned_without_a_party_that_has_come_meanwhile_does_not_begin():
    harness = WaitingHarness()
    harness.prepare("a")
    harness.prepare("c")
    assert harness.gather().outcome(20) == ("a", "c")
    harness.prepare("b")
    with pytest.raises(RestartAttempt):
        harness.session.begin_attempt(Attempt(1, 0, dict.fromkeys("ac", "start"), harness.toy.check_limits))


def test_a_returned_party_cannot_confirm_or_finish_the_attempt_that_began_without_it():
    for kind, fields in (("Confirmation", {"digest": None}), ("PartyResult", {"payload": {}})):
        harness = WaitingHarness()
        a, c = harness.prepare("a"), harness.prepare("c")
        harness.gather().outcome(20)
        harness.begin(1, [a, c], "ac")
        b = harness.prepare("b")
        b.send_control(kind, attempt=1, **fields)
        assert "cannot follow the state 'prepared'" in b.last_word().fields["reason"]
        assert harness.state("b") is PeerState.REFUSED


def test_a_refused_party_is_absent_after_the_same_time_and_the_line_says_why_it_was_refused():
    harness = WaitingHarness()
    harness.prepare("a")
    harness.prepare("c")
    b = harness.connect("b")
    wait_for(lambda: harness.session.list_connected()["b"])
    with harness.session.roster.changed:
        harness.session.host.expel(harness.session.roster.peers["b"], "its clock is wrong")
    b.end()
    assert harness.gather().outcome(20) == ("a", "c")
    assert "continuing without b: no connection for 600 s (b: its clock is wrong)." in harness.log
