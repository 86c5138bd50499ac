"""The server's side of the streams: every invalid frame is reported, and none hangs or changes the run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import sys
import threading
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glasu.errors import AbsenceError, EquivocationError, ProtocolError, TrainingError
from glasu.network.frames import (
    ACK,
    CONTROL,
    CONTROL_BYTES,
    FRAME_HEADER,
    MAX_PIECE,
    PIECE,
    pack_frame,
)
from glasu.network.handshake import Code, RefusalError, ResultPayload
from glasu.network.id_keys import IdShare
from glasu.network.roster import GROUPS, Attempt, Receipts, RestartAttempt
from glasu.network.signatures import Signature
from glasu.network.state_file import ServingRecord, StateFile
from glasu.network.states import PeerState, RunState
from glasu.network.transport import SessionLock
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Gradient, Joint, Partial
from glasu.protocol.requests import Receive
from glasu.wire.message_key import Key, Phase
from support.controls import hello, pack_control, pack_unnumbered
from support.raw_party import STATEMENT, ServerHarness, wait_for
from support.roles import Role
from support.toy_run import RUN, ToyServerHandshake, key


def partial(client, round_index=0, chunk=0, value=1.0, **changes):
    about = key(round_index, chunk, client, attempt=1)._replace(**changes)
    return encode(Partial(about, np.full((3, 4), value, np.float32)))


def start_receiving(harness, round_index=0, chunk=0):
    """Let the thread of the run wait for a partial of every party."""
    request = Receive((Partial,), key(round_index, chunk))
    role = Role("receiving", lambda: harness.session.receive(request))
    wait_for(lambda: harness.session.roster.peers[harness.toy.parties[-1]].expected is request or not role.is_alive())
    return role


# --- wakeups ----------------------------------------------------------------------------------


class CountingLock(SessionLock):
    """Counts how often the thread of the run begins to wait. It wakes only if it is notified."""

    waits = 0

    def wait(self, timeout=None):
        self.waits += threading.current_thread().name == "receiving"
        return super().wait(30.0)


def test_the_thread_of_the_run_wakes_for_the_last_message_alone():
    lock = CountingLock()
    harness = ServerHarness("abc", lock=lock)
    parties = harness.run()
    role = start_receiving(harness)
    wait_for(lambda: lock.waits == 1)
    for client, name in enumerate("ab"):
        parties[client].send_message(partial(client))
        wait_for(lambda name=name: harness.session.roster.peers[name].channel.inbox)
        role.join(0.1)  # a woken thread would wait again within this time
        assert lock.waits == 1
    parties[2].send_message(partial(2))
    assert len(role.outcome(10)) == 3
    assert lock.waits == 1


# --- hello ------------------------------------------------------------------------------------

HELLOS = {
    "not a hello": pack_unnumbered("Statement", payload={}),
    "an ack": pack_frame(ACK),
    "a piece": pack_frame(PIECE, b"x" * 30, number=1),
    "another protocol": hello(protocol=99),
    "no protocol": hello(protocol=None),
    "another field": hello(more=1),
    "a process with a long name": hello(process="x" * 65),
    "a name that is none": hello(process=7),
    "a negative count": hello(received=-1),
    "a count that is none": hello(received=1.5),
    "a count beyond all": hello(received=10**30),
    "a truth as a count": hello(received=True),
    "no payload": hello(payload=None),
    "numbered": pack_frame(CONTROL, pack_control("Hello"), number=1),
    "noise": b"\x00" * 100,
    "nothing": b"",
}


@pytest.mark.parametrize("name", HELLOS)
def test_an_invalid_hello_is_refused_with_a_reason_and_does_not_stop_others(name):
    harness = ServerHarness()
    party = harness.connect("a", HELLOS[name])
    assert party.last_word().kind == "Refused"
    assert party.last_word().fields["code"] == "invalid_hello"
    assert any(line.startswith("a: not accepted: ") for line in harness.log)
    assert harness.session.list_connected() == {"a": False, "b": False}
    assert harness.connect("a").reader.is_alive()  # the valid message can follow
    wait_for(lambda: harness.session.list_connected()["a"])


def test_a_refused_process_receives_reason_and_table_and_others_receive_the_reason():
    def refuse(party, payload):
        return RefusalError("other_settings", "it differs: x", ["server  a", "1       2"]) if "bad" in payload else None

    harness = ServerHarness(handshake=ToyServerHandshake(refuse=refuse))
    other = harness.connect("b")
    wait_for(lambda: harness.session.list_connected()["b"])
    for _ in range(3):
        word = harness.connect("a", hello(payload={"bad": 1})).last_word()
        assert (word.kind, word.fields["code"], word.fields["reason"]) == ("Refused", "other_settings", "it differs: x")
        assert word.fields["table"] == ["server  a", "1       2"]
        assert word.fields["run"] == RUN
    assert harness.session.refused == 3
    assert sum("a: not accepted: it differs: x" in line for line in harness.log) == 1  # reported once
    wait_for(lambda: any("a: not accepted" in str(control.fields.get("line")) for control in other.controls()))


def test_a_connection_for_another_purpose_does_not_look_like_a_refused_party():
    def refuse(party, payload):
        return RefusalError(Code.OTHER_PURPOSE, "a training is under way there") if "doctor" in payload else None

    harness = ServerHarness(handshake=ToyServerHandshake(refuse=refuse))
    other = harness.connect("b")
    running = harness.connect("a")
    wait_for(lambda: all(harness.session.list_connected().values()))
    assert (
        harness.connect("a", hello(process="p2", payload={"doctor": 1})).last_word().fields["code"] == "other_purpose"
    )
    assert harness.log[-1] == "a: a connection for another purpose was refused: a training is under way there"
    assert not any("not accepted" in line for line in harness.log)
    assert harness.session.list_connected()["a"]
    assert harness.session.roster.peers["a"].refusal == ""  # a later error does not give it as a reason
    for party in (running, other):
        party.end()
        assert not any("another purpose" in str(control.fields) for control in party.controls())


def test_a_statement_that_is_refused_withdraws_the_process():
    def refuse(party, payload):
        return RefusalError("other_data", "other nodes") if payload == {"rounds": "bad"} else None

    harness = ServerHarness(handshake=ToyServerHandshake(refuse=refuse))
    party = harness.connect("a")
    party.send_control("Statement", payload={"rounds": "bad"})
    assert party.last_word().fields["reason"] == "other nodes"
    assert harness.handshake.withdrawn == ["a"]


def test_a_newer_process_takes_the_place_of_the_earlier_one():
    harness = ServerHarness()
    first = harness.connect("a")
    wait_for(lambda: harness.session.list_connected()["a"])
    harness.connect("a", hello(process="p2"))
    assert "a newer process" in first.last_word().fields["reason"]
    assert harness.session.list_connected()["a"]


def test_a_new_process_voids_the_attempt():
    harness = ServerHarness()
    harness.run()
    role = start_receiving(harness)
    harness.connect("b", hello(process="p2"))
    role.join(20)
    assert isinstance(role.error(), RestartAttempt)


def test_the_same_process_continues_over_another_stream():
    harness = ServerHarness()
    a, b = harness.run()
    server = next(control for control in a.controls() if control.kind == "Welcome").fields["server"]
    a.send_message(partial(0))
    wait_for(lambda: harness.session.roster.peers["a"].channel.inbox)
    a.end()
    again = harness.connect("a", hello(server=server, received=len([one for one in a.heard if one.number])))
    b.send_message(partial(1))
    messages = harness.session.receive(Receive((Partial,), key(0, 0)))
    assert [message.key.client for message in messages] == [0, 1]
    wait_for(again.controls)
    welcome = again.controls()[0].fields
    assert (welcome["resumed"], welcome["received"]) == (True, 3)  # prepared, ready, and the message


@pytest.mark.parametrize("received", [999, 0])
def test_a_returning_process_cannot_claim_other_numbers_than_were_sent(received):
    harness = ServerHarness()
    a, _ = harness.run()
    server = next(control for control in a.controls() if control.kind == "Welcome").fields["server"]
    if received == 0:  # it acknowledged the proposal before
        a.send(pack_frame(ACK, acknowledged=1))
    a.end()
    word = harness.connect("a", hello(server=server, received=received)).last_word()
    assert word.kind == "Refused"
    assert "acknowledged" in word.fields["reason"]


# --- control messages ---------------------------------------------------------------------------

CONTROLS = {
    "of unknown kind": ("x", {}, "control message of unknown kind 'x'"),
    "of the server": ("StatementRequest", {}, "control message 'StatementRequest': it is not expected now"),
    "a last word in the sequence": ("Failed", {"code": "x", "reason": "y"}, "message 'Failed': it is not expected now"),
    "too long": ("Statement", {"payload": "x" * CONTROL_BYTES}, f"expected at most {CONTROL_BYTES} bytes, got"),
    "without a statement": ("Statement", {}, "control message 'Statement': payload: is missing"),
    "a statement that is none": ("Statement", {"payload": [1]}, "payload=[1]: must be an object"),
    "a second statement": ("Statement", {"payload": STATEMENT}, "'prepare' cannot follow the state 'running'"),
    "a second confirmation": (
        "Confirmation",
        {"attempt": 1, "digest": "start"},
        "'confirm' cannot follow the state 'running'",
    ),
    "no result": ("PartyResult", {"attempt": 1}, "control message 'PartyResult': payload: is missing"),
    "a malformed result": (
        "PartyResult",
        {"attempt": 1, "payload": {"received": "x"}},
        "control message 'PartyResult': payload.received='x': must be an integer",
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_an_unknown_control_message_aborts_the_run(name):
    harness = ServerHarness()
    a, _ = harness.run()
    kind, fields, words = CONTROLS[name]
    role = start_receiving(harness)
    a.send_control(kind, **fields)
    role.join(20)
    assert isinstance(role.error(), ProtocolError)
    assert words in str(role.error())
    assert role.error().party == "a"
    assert a.last_word().kind == "Stopped"


def test_a_confirmation_of_another_checkpoint_aborts_the_run():
    harness = ServerHarness("a")
    party = harness.connect("a")
    party.send_control("Statement", payload=STATEMENT)
    harness.session.gather()
    role = Role(
        "beginning", lambda: harness.session.begin_attempt(Attempt(1, 4, {"a": "right"}, harness.toy.check_limits))
    )
    wait_for(lambda: any(control.kind == "ProposedAttempt" for control in party.controls()))
    party.send_control("Confirmation", attempt=1, digest="wrong")
    role.join(20)
    assert "it confirmed another checkpoint of round 4: expected SHA-256 right, got wrong" in str(role.error())


class Comparing(ToyServerHandshake):
    """Asks party a for a second statement as soon as both are prepared."""

    def find_comparison(self, prepared):
        return (
            ("a", {"b": IdShare("00" * 32, Signature("00", "a certificate"))}) if set(prepared) == {"a", "b"} else None
        )


def test_a_request_that_a_statement_causes_is_sent_immediately():
    harness = ServerHarness("ab", handshake=Comparing())
    a, b = harness.connect("a"), harness.connect("b")
    gathering = Role("gathering", harness.session.gather)
    a.send_control("Statement", payload=STATEMENT)
    b.send_control("Statement", payload=STATEMENT)
    wait_for(lambda: any(control.fields.get("shares") for control in a.controls()), 5)
    harness.session.announce_failure(TrainingError("enough"), 0.0)
    assert gathering.error() is not None


def test_the_end_of_an_attempt_that_is_over_is_not_the_end_of_the_present_one():
    harness = ServerHarness("a")
    (a,) = harness.run()
    gathering = Role("gathering", harness.session.gather)
    wait_for(lambda: any(control.kind == "StatementRequest" for control in a.controls()))
    a.send_control("PartyResult", attempt=1, payload={"received": 1})
    a.send_message(partial(0))
    a.send_control("Statement", payload=STATEMENT)
    gathering.outcome(20)
    role = Role("begin", lambda: harness.session.begin_attempt(Attempt(2, 0, {"a": "start"}, harness.toy.check_limits)))
    wait_for(lambda: sum(control.kind == "ProposedAttempt" for control in a.controls()) == 2)
    a.send_control("Confirmation", attempt=2, digest="start")
    role.outcome(20)
    a.send_control("PartyResult", attempt=2, payload={"received": 2})
    assert harness.session.collect_results() == {"a": ResultPayload(received=2)}


def test_a_party_that_failed_stops_the_run_for_all_with_its_public_reason():
    harness = ServerHarness()
    a, _ = harness.run()
    role = start_receiving(harness)
    a.send(pack_unnumbered("Failed", code="invalid_data", reason="its data cannot be used"))
    role.join(20)
    assert isinstance(role.error(), TrainingError)
    assert str(role.error()) == "party 'a' failed: its data cannot be used"
    assert role.error().code == "party_failed"
    late = harness.connect("a", hello(process="p3"))
    assert late.last_word().fields["code"] == "party_failed"
    assert late.last_word().fields["reason"] == "party 'a' failed: its data cannot be used"


# --- the end of a run -------------------------------------------------------------------------


def finish(parties):
    for party in parties:
        party.send_control("PartyResult", attempt=1, payload={})


def has_goodbye(party):
    return any(control.kind == "Goodbye" for control in party.controls())


def test_a_process_that_restarts_before_the_results_are_collected_voids_the_attempt():
    harness = ServerHarness()
    finish(harness.run())
    again = harness.connect("b", hello(process="p2"))
    wait_for(lambda: again.controls())
    with pytest.raises(RestartAttempt):
        harness.session.collect_results()
    gathering = Role("gathering", harness.session.gather)
    wait_for(lambda: not gathering.is_alive() or harness.session.roster.run.state is RunState.GATHERING)
    again.send_control("Statement", payload=STATEMENT)
    wait_for(lambda: harness.session.roster.peers["b"].state is PeerState.PREPARED)


def test_a_failure_before_the_results_are_collected_is_reported_as_it_is():
    harness = ServerHarness()
    a, _ = harness.run()
    a.send(pack_unnumbered("Failed", code="invalid_data", reason="its data cannot be used"))
    wait_for(lambda: harness.session.roster.failure is not None)
    with pytest.raises(TrainingError, match="party 'a' failed: its data cannot be used"):
        harness.session.collect_results()


@pytest.mark.parametrize("stated", [False, True], ids=["connected", "prepared"])
def test_a_process_that_restarts_after_the_results_are_collected_receives_the_goodbye(stated):
    harness = ServerHarness()
    a, b = harness.run()
    finish([a, b])
    harness.session.collect_results()
    again = harness.connect("b", hello(process="p2"))
    wait_for(lambda: again.controls())
    if stated:
        again.send_control("Statement", payload=STATEMENT)
        wait_for(lambda: harness.session.roster.peers["b"].state is PeerState.PREPARED)
    harness.session.close_run(0.0)
    wait_for(lambda: has_goodbye(a) and has_goodbye(again))
    assert b.last_word().fields["code"] == Code.REPLACED


@pytest.mark.parametrize("when", ["before the goodbye", "after the goodbye"])
def test_a_failure_that_crosses_the_goodbye_does_not_fail_a_complete_run(when):
    harness = ServerHarness()
    a, b = harness.run()
    finish([a, b])
    harness.session.collect_results()
    word = pack_unnumbered("Failed", code="x", reason="too late")
    if when == "after the goodbye":
        harness.session.close_run(0.0)
        wait_for(lambda: has_goodbye(b))
    b.send(word)
    wait_for(lambda: "b: failed after it had finished: too late" in harness.log)
    if when == "before the goodbye":
        harness.session.close_run(0.0)
    wait_for(lambda: has_goodbye(a))
    assert harness.session.roster.failure is None
    again = harness.connect("b", hello(process="p2"))
    wait_for(lambda: has_goodbye(again))


def test_a_failure_of_the_run_after_the_results_are_collected_is_reported_as_it_is():
    harness = ServerHarness()
    finish(harness.run())
    harness.session.collect_results()
    harness.session.announce_failure(TrainingError("stopped by the operator"), 0.0)
    with pytest.raises(TrainingError, match="stopped by the operator"):
        harness.session.close_run(0.0)


def test_a_party_that_declines_leaves_its_place_and_the_run_waits():
    harness = ServerHarness()
    a = harness.connect("a")
    other = harness.connect("b")
    wait_for(lambda: all(harness.session.list_connected().values()))
    a.send(pack_unnumbered("Declined", code="x", reason="other settings", table=["x", "y"]))
    wait_for(lambda: not harness.session.list_connected()["a"])
    assert harness.handshake.withdrawn == ["a"]
    wait_for(lambda: "a: declines to take part: other settings" in harness.log)
    wait_for(lambda: any("declines" in str(control.fields.get("line")) for control in other.controls()))


# --- messages -----------------------------------------------------------------------------------

OTHERS = {  # a changed part of a key, and the expected error
    "a run": ({"run": bytes(12)}, "expected Partial for training round 0 layer 0 chunk 0, got .* of run 0000"),
    "a round": ({"round": 2}, "got Partial for training round 2"),
    "a layer": ({"layer": 3}, "got Partial for training round 0 layer 3"),
    "a phase": ({"phase": Phase.BACKWARD}, "got Partial for backward round 0"),
    "a chunk": ({"chunk": 1}, "got Partial for training round 0 layer 0 chunk 1"),
    "a client": ({"client": 0}, r"expected attempt and client \(1, 1\), got \(1, 0\)"),
    "an attempt": ({"attempt": 3}, r"expected attempt and client \(1, 1\), got \(3, 1\)"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_message_that_is_not_expected_is_refused_by_the_first_piece(name):
    harness = ServerHarness()
    _, b = harness.run()
    fields, words = OTHERS[name]
    role = start_receiving(harness)
    about = key(0, 0, 1, attempt=1)._replace(**fields)
    content = encode(Partial(about, np.zeros((300_000, 4), np.float32)))  # several pieces; one is sent
    b.send(pack_frame(PIECE, struct.pack("<QQ", len(content), 0), content[:MAX_PIECE], number=3))
    role.join(20)
    with pytest.raises(ProtocolError, match=words):
        raise role.error()
    assert role.error().party == "b"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Gradient(key(0, 0, 1, 1), np.zeros((3, 4), np.float32)), "expected Partial for .*, got Gradient for training"),
        (Partial(key(0, 0, 1, 1), np.zeros((300, 4), np.float32)), "expected at most 900 bytes, got 4860"),
        (Joint(key(0, 0, 1, 1), np.zeros((3, 4), np.float32)), "expected Partial for .*, got Joint for training"),
    ],
)
def test_another_kind_and_too_long_a_message_are_refused(message, words):
    harness = ServerHarness()
    _, b = harness.run()
    role = start_receiving(harness)
    b.send_message(encode(message))
    role.join(20)
    with pytest.raises(ProtocolError, match=words):
        raise role.error()


def test_messages_that_come_early_are_checked_when_their_turn_comes():
    harness = ServerHarness("a")
    (a,) = harness.run()
    for chunk in (0, 1, 3):  # 2 is missing
        a.send_message(partial(0, chunk=chunk))
    for chunk in (0, 1):
        assert harness.session.receive(Receive((Partial,), key(0, chunk)))[0].key.chunk == chunk
    with pytest.raises(ProtocolError, match=r"party 'a': expected Partial for .* chunk 2, got Partial for .* chunk 3"):
        harness.session.receive(Receive((Partial,), key(0, 2)))


def test_another_content_under_a_known_key_stops_the_run_whatever_the_policy():
    harness = ServerHarness("a", on_invalid_message="wait")
    (a,) = harness.run()
    for chunk in (0, 1):
        a.send_message(partial(0, chunk=chunk))
        assert harness.session.receive(Receive((Partial,), key(0, chunk)))[0].key.chunk == chunk
    role = start_receiving(harness, chunk=2)
    a.send_message(partial(0, chunk=1, value=2.0))
    role.join(20)
    assert isinstance(role.error(), EquivocationError)
    assert str(role.error()).count("SHA-256") == 1
    assert not harness.session.drop_sender(role.error())


@pytest.mark.parametrize("when", ["before its turn", "at its turn"])
def test_a_repeated_message_is_invalid_and_does_not_hold_up_the_run(when):
    harness = ServerHarness(on_invalid_message="wait")
    a, b = harness.run()
    for party, client in ((a, 0), (b, 1)):
        party.send_message(partial(client))
    harness.session.receive(Receive((Partial,), key(0, 0)))
    if when == "before its turn":
        b.send_message(partial(1))
        wait_for(lambda: harness.session.roster.peers["b"].channel.inbox)
    role = start_receiving(harness, chunk=1)
    if when == "at its turn":
        b.send_message(partial(1))
    a.send_message(partial(0, chunk=1))
    role.join(20)
    error = role.error()
    assert type(error) is ProtocolError
    assert re.search("party 'b': training round 0 .* received twice", str(error))
    assert harness.session.drop_sender(error)
    assert b.last_word().fields["code"] == "invalid_message"
    assert harness.session.list_connected() == {"a": True, "b": False}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    in_order=st.integers(0, 5),  # chunks that come as they should, before anything else
    rest=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1)), max_size=3),  # chunk, content
    copies=st.integers(1, 2),  # of each frame; a frame comes again when its stream broke before it was acknowledged
)
def test_repeats_reordering_and_two_contents_end_as_in_a_plain_model(in_order, rest, copies):
    """The reference model: chunk after chunk is accepted; the first message that is not the next one is an error."""
    harness = ServerHarness("a")
    (a,) = harness.run()
    sequence = [*((chunk, 0) for chunk in range(in_order)), *rest]
    for chunk, content in sequence:
        a.send_message(partial(0, chunk=chunk, value=float(content)), copies)
    accepted = []
    for expected, (chunk, content) in enumerate(sequence):
        request = Receive((Partial,), key(0, expected))
        if chunk == expected:
            accepted.append(content)
            (message,) = harness.session.receive(request)
            assert np.all(message.value == content)
            continue
        with pytest.raises(ProtocolError) as caught:
            harness.session.receive(request)
        kind = EquivocationError if chunk < expected and accepted[chunk] != content else ProtocolError
        assert type(caught.value) is kind
        assert ("received twice" in str(caught.value)) == (chunk < expected and kind is ProtocolError)
        break
    a.end()


@pytest.mark.parametrize("when", ["at its header", "at its turn", "in the script"])
def test_where_the_run_waits_an_invalid_message_costs_its_sender_the_place_and_others_nothing(when):
    harness = ServerHarness(on_invalid_message="wait")
    a, b = harness.run()
    if when == "at its turn":
        b.send_message(partial(1, round_index=7))
        wait_for(lambda: harness.session.roster.peers["b"].channel.inbox)
    role = start_receiving(harness)
    if when == "at its header":
        b.send_message(partial(1, round_index=7))
    else:
        a.send_message(partial(0))
    if when == "in the script":
        b.send_message(partial(1))
        role.outcome(20)
        error = ProtocolError("NaN in its tensor", party="b")
        assert not harness.session.drop_sender(ProtocolError("of nobody"))
    else:
        role.join(20)
        error = role.error()
    if when == "at its header":
        assert isinstance(error, RestartAttempt)
    else:
        assert harness.session.drop_sender(error)
    word = b.last_word()
    assert (word.kind, word.fields["code"]) == ("Refused", "invalid_message")
    assert harness.session.list_connected() == {"a": True, "b": False}
    gathering = Role("gathering", harness.session.gather)
    wait_for(lambda: any(control.kind == "StatementRequest" for control in a.controls()))
    a.send_control("Statement", payload=STATEMENT)
    harness.connect("b", hello(process="p2")).send_control("Statement", payload=STATEMENT)
    gathering.outcome(20)


def test_without_waiting_an_error_of_the_script_is_not_set_aside():
    harness = ServerHarness()
    harness.run()
    assert not harness.session.drop_sender(ProtocolError("NaN in its tensor", party="b"))


NOISE = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda kind, number, acknowledged, body: FRAME_HEADER.pack(kind, number, acknowledged) + body,
        st.integers(0, 4),
        st.integers(0, 6) | st.integers(0, 2**64 - 1),
        st.integers(0, 3) | st.integers(0, 2**64 - 1),
        st.binary(max_size=100)
        | st.builds(
            lambda total, offset, rest: struct.pack("<QQ", total, offset) + rest,
            *[st.integers(0, 2**64 - 1)] * 2,
            st.sampled_from([partial(0), partial(1), partial(0)[:60], b""]),
        )
        | st.sampled_from(["Statement", "Confirmation", "PartyResult", "Failed", "Declined", "Hello", "\x1b[2J"]).map(
            pack_control
        ),
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(frames=st.lists(NOISE, min_size=1, max_size=6), greeted=st.booleans())
def test_frames_of_one_party_never_change_another_party_or_hang_or_get_lost(frames, greeted):
    harness = ServerHarness(on_invalid_message="wait")
    other = harness.connect("b")
    wait_for(lambda: harness.session.list_connected()["b"])
    party = harness.connect("a", *([hello()] if greeted else []), *frames)
    party.end()
    assert not harness.session.list_connected()["a"]
    assert harness.session.list_connected()["b"]
    assert all(line.isprintable() for line in harness.log)
    assert harness.session.roster.peers["a"].channel.waiting < 10_000
    if harness.session.roster.failure is None:
        other.send_control("Statement", payload=STATEMENT)
        wait_for(lambda: "b: prepared." in harness.log)
    else:
        assert str(harness.session.roster.failure).startswith("party 'a' failed")
    other.end()


ESCAPES = "\x1b[2J\nattempt 9: all parties are there\r\x9b1m" + "x" * 10_000


@pytest.mark.parametrize(
    "frame",
    [
        pack_unnumbered("Declined", code="x", reason=ESCAPES, table=[ESCAPES] * 5),
        pack_unnumbered("Declined", code="x", reason=ESCAPES, table=7),
        pack_unnumbered("Failed", code="invalid_data", reason=ESCAPES),
        pack_unnumbered(ESCAPES),
        pack_frame(CONTROL, ESCAPES.encode()),
    ],
)
def test_what_a_party_says_reaches_terminals_as_one_short_printable_line(frame):
    harness = ServerHarness()
    other = harness.connect("b")
    wait_for(lambda: harness.session.list_connected()["b"])
    party = harness.connect("a", hello(), frame)
    party.end()
    said = [str(control.fields.get("line", "")) for control in other.controls()]
    said += [str(control.fields.get("reason", "")) for control in party.controls()]
    for line in [*harness.log, *said, str(harness.session.roster.failure or "")]:
        assert line.isprintable()
        assert len(line) < 2000


def test_one_party_cannot_fill_the_logs_of_the_others():
    now = [1000.0]
    harness = ServerHarness(clock=lambda: now[0])
    other = harness.connect("b")
    wait_for(lambda: harness.session.list_connected()["b"])
    for index in range(300):
        harness.connect("a", hello(process=f"p{index}")).end()
    assert sum(line.startswith("a: ") for line in harness.log) <= 20
    told = [control for control in other.controls() if control.kind == "Notice"]
    assert len(told) <= 20
    now[0] += 60.0
    with pytest.raises(AbsenceError):
        harness.session.gather()
    assert any(line.startswith("a: and 5") and line.endswith("more lines.") for line in harness.log)


# --- faults of the server itself ------------------------------------------------------------------


class Broken(ToyServerHandshake):
    """Fails when it has to remember a process."""

    error: Exception | None = OSError(28, "No space left on device", "/secret/place")

    def admit(self, party, hello):
        if self.error is not None:
            raise self.error
        return super().admit(party, hello)


def test_a_server_that_cannot_remember_who_came_stops_the_run_without_naming_paths():
    harness = ServerHarness(handshake=Broken())
    word = harness.connect("a").last_word()
    expected = "the server failed when party 'a' connected: OSError in the program (No space left on device)"
    assert (word.kind, word.fields["reason"]) == ("Stopped", expected)
    with pytest.raises(TrainingError, match="No space left"):
        harness.session.gather()


def test_a_process_that_cannot_be_remembered_does_not_replace_the_present_one():
    harness = ServerHarness(handshake=Broken())
    harness.handshake.error, failing = None, harness.handshake.error
    first = harness.connect("a")
    wait_for(lambda: harness.session.list_connected()["a"])
    harness.handshake.error = failing
    assert harness.connect("a", hello(process="p2")).last_word().kind == "Stopped"
    assert first.stream.is_open


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_a_state_file_that_cannot_be_written_is_the_servers_fault_and_not_the_partys(number, tmp_path, monkeypatch):
    """A full disk stops the run. If no descriptor is free, the stream is dropped and the party reconnects."""
    state = StateFile(tmp_path / "serving.json", ServingRecord())

    class Remembering(ToyServerHandshake):
        def admit(self, party, hello):
            state.update(attempt=1)
            return super().admit(party, hello)

    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", fail)
    harness = ServerHarness(handshake=Remembering())
    party = harness.connect("a")
    party.end()
    assert state.value.attempt == 0
    assert not any(control.kind == "Refused" for control in party.controls())
    assert str(tmp_path) not in str([control.fields for control in party.controls()])
    if number == errno.ENOSPC:
        assert "serving.json cannot be written there (No space left on device)" in party.last_word().fields["reason"]
        with pytest.raises(TrainingError, match="the server failed when party 'a' connected"):
            harness.session.gather()
    else:
        assert harness.session.roster.failure is None
        monkeypatch.setattr("os.fsync", lambda handle: None)
        harness.connect("a")
        wait_for(lambda: harness.session.list_connected()["a"])


def test_a_server_without_a_free_descriptor_drops_the_stream_and_continues():
    harness = ServerHarness(handshake=Broken())
    harness.handshake.error = OSError(24, "Too many open files")
    party = harness.connect("a")
    party.end()
    assert "a: its connection was dropped: OSError in the program (Too many open files)." in harness.log
    assert harness.session.roster.failure is None


def test_an_unexpected_error_in_a_stream_is_reported_by_its_type_only():
    harness = ServerHarness(handshake=Broken())
    harness.handshake.error = ZeroDivisionError("salary of node 7: 12345")
    assert harness.connect("a").last_word().fields["reason"] == "ZeroDivisionError in the program"


# --- waiting -------------------------------------------------------------------------------------


class QuickClock:
    """A clock that moves by half a second whenever it is read."""

    def __init__(self) -> None:
        self._lock, self._now = threading.Lock(), 1000.0

    def __call__(self) -> float:
        with self._lock:
            self._now += 0.5
            return self._now


@contextlib.contextmanager
def wake_threads(session):
    """Wake the threads that wait in a session, repeatedly."""
    over = threading.Event()

    def run():
        while not over.wait(0.0005):
            session.host.open_stream().close()

    role = Role("waking", run)
    yield
    over.set()
    role.outcome()


def test_a_missing_party_is_named_within_15_s_and_then_at_least_every_minute_until_time_is_up():
    harness = ServerHarness(wait=1800.0, clock=QuickClock())
    a = harness.connect("a")
    a.send_control("Statement", payload=STATEMENT)
    with wake_threads(harness.session), pytest.raises(AbsenceError, match="waited 1800 s for b to join"):
        harness.session.gather()
    times = [float(line.rpartition(" for ")[2].split(" s")[0]) for line in harness.log if "waiting for b" in line]
    assert times[0] <= 15
    assert max(later - earlier for earlier, later in pairwise(times)) <= 65
    assert times[-1] > 1700
    told = "the server has been waiting for b to join for "
    wait_for(lambda: any(told in str(control.fields.get("line")) for control in a.controls()))
    assert all("(b: not connected, start it there)" in line for line in harness.log if told in line)


def test_a_refused_party_is_not_described_as_a_party_that_was_not_started():
    def refuse(party, payload):
        return RefusalError("other_settings", f"it differs: {'x ' * 500}") if party == "b" else None

    harness = ServerHarness(wait=60.0, clock=QuickClock(), handshake=ToyServerHandshake(refuse=refuse))
    assert harness.connect("b").last_word().kind == "Refused"
    harness.connect("a").send_control("Statement", payload=STATEMENT)
    with wake_threads(harness.session), pytest.raises(AbsenceError):
        harness.session.gather()
    (line, *_) = [line for line in harness.log if "waiting for b to join" in line]
    assert "(b: refused: it differs: x x" in line
    assert len(line) < 300


def test_the_time_of_an_absent_party_does_not_begin_again_when_another_arrives():
    clock = QuickClock()
    harness = ServerHarness(wait=600.0, clock=clock)
    with wake_threads(harness.session):
        role = Role("gathering", harness.session.gather)
        wait_for(lambda: clock() > 1400.0)
        harness.connect("a").send_control("Statement", payload=STATEMENT)
        role.join(20)
    with pytest.raises(AbsenceError, match="waited 600 s for b to join"):
        raise role.error()
    named = [
        float(line.rpartition(" for ")[2].split(" s")[0]) for line in harness.log if "waiting for b to join" in line
    ]
    assert max(named, default=0.0) <= 200  # it waits for b alone since a's message arrived, and soon times out


def test_a_party_that_is_connected_may_compute_for_hours_and_is_named():
    harness = ServerHarness("a", wait=600.0, clock=QuickClock())
    harness.run()
    with wake_threads(harness.session):
        role = start_receiving(harness)
        wait_for(lambda: len([line for line in harness.log if "waiting for a to send Partial" in line]) > 60, 60)
        assert role.is_alive()
        assert "(a: connected)" in harness.log[-1]
        harness.session.announce_failure(TrainingError("enough"), 0.0)
        role.join(20)


def test_a_party_that_connects_after_the_end_learns_the_reason_and_delays_no_other():
    harness = ServerHarness()
    first = harness.connect("a")
    wait_for(lambda: harness.session.list_connected()["a"])
    ending = Role("ending", lambda: harness.session.announce_failure(AbsenceError("waited 1 s for b"), 20.0))
    assert first.last_word().fields["reason"] == "waited 1 s for b"
    assert harness.connect("b").last_word().kind == "Stopped"
    first.end()
    ending.outcome(20)
    assert not any("waiting for this party to return" in line for line in harness.log)


def test_a_failure_jumps_ahead_of_data_that_waits():
    harness = ServerHarness("a")
    (a,) = harness.run()
    harness.session.broadcast(Joint(key(0, 0), np.zeros((2_000_000, 4), np.float32)))  # 32 MB, more than the window
    harness.session.announce_failure(TrainingError("enough"), 0.0)
    assert a.last_word().fields["reason"] == "enough"


def test_a_broadcast_is_encoded_once_for_all_parties():
    harness = ServerHarness("abcd")
    for party in harness.run():
        party.end()  # no party is connected: the message waits for all of them
    message = Joint(key(0, 0), np.zeros((1_000_000, 4), np.float32))
    tracemalloc.start()
    try:
        harness.session.broadcast(message)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = [peer.channel.outbox.held for peer in harness.session.roster.peers.values()]
    assert min(held) > message.value.nbytes
    assert peak < 1.5 * message.value.nbytes


# --- the lock ---------------------------------------------------------------------------------------


@pytest.fixture
def pause_function(monkeypatch):
    """Return a function that blocks a library function in the thread "slow"; it returns two events: begun, continue."""

    def pause(name):
        module, _, function = name.partition(".")
        original, begun, go_on = getattr(sys.modules[module], function), threading.Event(), threading.Event()

        def slow(*arguments, **options):
            if not begun.is_set() and threading.current_thread().name == "slow":
                begun.set()
                assert go_on.wait(20)
            return original(*arguments, **options)

        monkeypatch.setattr(name, slow)
        return begun, go_on

    return pause


@pytest.mark.parametrize("name", ["json.loads", "hashlib.sha256"])
def test_no_party_waits_while_a_frame_of_another_is_parsed_or_hashed(name, pause_function):
    harness = ServerHarness()
    a, b = harness.run()
    begun, go_on = pause_function(name)
    if name == "json.loads":
        a.reader.name = "slow"
        a.send_control("PartyResult", attempt=1, payload={})
    else:
        role = start_receiving(harness)
        role.name = "slow"
        a.send_message(partial(0))
        b.send_message(partial(1))
    assert begun.wait(20)
    connected = Role("connected", harness.session.list_connected)  # needs the lock
    assert connected.outcome(5) == {"a": True, "b": True}
    b.send_message(partial(1, chunk=1))
    wait_for(lambda: harness.session.roster.peers["b"].channel.inbox)
    go_on.set()


def test_a_party_whose_message_is_there_may_send_the_next_one_while_others_are_awaited():
    harness = ServerHarness()
    a, b = harness.run()
    role = start_receiving(harness)
    for chunk in (0, 1):
        a.send_message(partial(0, chunk=chunk))
    wait_for(lambda: len(harness.session.roster.peers["a"].channel.inbox) == 2)
    b.send_message(partial(1))
    assert [message.key.chunk for message in role.outcome(20)] == [0, 0]


def test_a_message_of_an_attempt_that_is_over_is_not_used():
    harness = ServerHarness("a")
    (a,) = harness.run()
    a.send_message(partial(0))
    wait_for(lambda: harness.session.roster.peers["a"].channel.inbox)
    gathering = Role("gathering", harness.session.gather)  # voids the attempt
    wait_for(lambda: any(control.kind == "StatementRequest" for control in a.controls()))
    a.send_message(partial(0, chunk=1))
    a.send_control("Statement", payload=STATEMENT)
    gathering.outcome(20)
    assert not harness.session.roster.peers["a"].channel.inbox
    assert harness.session.roster.peers["a"].channel.waiting == 0


# --- receipts --------------------------------------------------------------------------------------


def about(round_index, layer=0):
    return Key(bytes(12), Phase.TRAINING, 1, round_index, layer)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 1)), max_size=60))
def test_receipts_agree_with_a_plain_model(sequence):
    """The reference model keeps all keys. Its last GROUPS groups equal the stored ones."""
    receipts, seen, order = Receipts(), {}, []
    for round_index, content in sequence:
        known = round_index in order[-GROUPS:]
        assert receipts.knows(about(round_index)) == known
        if known:
            with pytest.raises(ProtocolError) as caught:
                receipts.take(about(round_index), bytes([content]))
            assert type(caught.value) is (ProtocolError if seen[round_index] == content else EquivocationError)
            continue
        receipts.take(about(round_index), bytes([content]))
        order = [one for one in order if one != round_index] + [round_index]
        seen[round_index] = content


def test_another_content_under_one_key_names_both_digests_and_changes_nothing():
    receipts = Receipts()
    receipts.take(about(1), b"\1" * 32)
    with pytest.raises(EquivocationError, match=f"{'01' * 32} and {'02' * 32}"):
        receipts.take(about(1), b"\2" * 32)
    with pytest.raises(ProtocolError, match="received twice"):
        receipts.take(about(1), b"\1" * 32)
    receipts.take(about(1, layer=2), b"\2" * 32)
