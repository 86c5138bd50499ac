"""A party connects and reconnects: with backoff, with bounded memory, and with a log line while it waits."""

from __future__ import annotations

import threading
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from glasu.errors import AbsenceError, CheckpointError, ProtocolError, TrainingError, TransportError
from glasu.network.client_session import ClientSession, NewAttempt
from glasu.network.connection import FIRST_DELAY, LONGEST_DELAY, SILENT_AFTER, ConnectOptions
from glasu.network.connection_codes import ConnectionCode, Disconnection
from glasu.network.control import PROTOCOL, ProposedAttempt
from glasu.network.frames import ACK, CONTROL, FRAME_HEADER, MAX_PIECE, PIECE, ROOM, WINDOW, Channel, pack_frame
from glasu.network.handshake import Code, RefusalError
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Joint
from glasu.protocol.requests import Receive
from support.controls import pack_numbered, pack_unnumbered, read_control
from support.raw_party import wait_for
from support.roles import Role
from support.toy_run import RUN, Toy, ToyClientHandshake, digest, key, logger

KIT = SimpleNamespace(ca_fingerprint="AA", name="a")
CLOSED = Disconnection(ConnectionCode.CLOSED)


def welcome(**changes):
    fields = {"protocol": PROTOCOL, "run": RUN, "server": "s1", "resumed": False, "received": 0, "payload": {}}
    return pack_unnumbered("Welcome", **{**fields, **changes})


class FakeStream:
    """A stream whose server is the test. It delivers the given events immediately, and those of `deliver` later."""

    def __init__(self, outgoing, arrive, events):
        self.outgoing, self._arrive, self.sent = outgoing, arrive, []
        threading.Thread(target=self._collect, daemon=True).start()
        threading.Thread(target=lambda: self.deliver(*events), daemon=True).start()

    def _collect(self):
        self.sent.extend(self.outgoing.yield_frames())

    def deliver(self, *events):
        for event in events:
            self._arrive(self, event)

    def close(self, seconds=0.0):
        self.outgoing.close()


class Server:
    """The streams that a party opens, with the events of each. Later streams deliver nothing."""

    def __init__(self, *visits):
        self.visits, self.streams, self.pauses, self.log = list(visits), [], [], []
        self.now = None

    def connect(self, kit, address, outgoing, arrive):
        events = self.visits.pop(0) if self.visits else ()
        self.streams.append(FakeStream(outgoing, arrive, events))
        return self.streams[-1]

    def session(self, wait=600.0, decline=None, **options):
        options = {"sleep": self.pauses.append, "jitter": lambda: 1.0, **options}
        options = ConnectOptions(KIT, "localhost:1", wait, logger(self.log), connect=self.connect, **options)
        return ClientSession(options, ToyClientHandshake("a", {0: Toy().start(0)}, decline))


BEGIN = ("ProposedAttempt", {"number": 1, "round": 0, "present": ["a", "b", "c"], "digest": digest(Toy().start(0))})


def open_and_wait(session):
    session.open()
    return session.await_attempt()


BACKOFF = [min(FIRST_DELAY * 2**count, LONGEST_DELAY) for count in range(9)]


@pytest.mark.parametrize(
    ("visit", "pauses"),
    [
        ((Disconnection(ConnectionCode.NOTHING_LISTENS),), BACKOFF),
        ((welcome(), CLOSED), BACKOFF),
        ((CLOSED,), [FIRST_DELAY] * 9),  # as in a flood of connections
    ],
    ids=["absent", "dropped", "crowded out"],
)
def test_a_server_is_asked_less_and_less_often_unless_a_flood_may_hold_its_places(visit, pauses):
    server = Server(*[visit] * 9, (pack_unnumbered("Stopped", code="x", reason="enough"),))
    session = server.session()
    with pytest.raises(TrainingError):
        open_and_wait(session)
    assert server.pauses == pauses


def test_a_stream_that_worked_is_reopened_immediately():
    notice = pack_unnumbered("Notice", line="waiting for b")
    visits = [
        (welcome(), CLOSED),
        (welcome(), notice, CLOSED),
        (pack_unnumbered("Stopped", code="x", reason="enough"),),
    ]
    server = Server(*visits)
    session = server.session()
    session.open()
    with pytest.raises(TrainingError, match="enough"):
        session.await_attempt()
    assert server.pauses == [FIRST_DELAY]
    assert "waiting for b" in server.log


def test_a_party_tries_at_least_once_and_gives_up_after_its_wait():
    server = Server(*[(Disconnection(ConnectionCode.NOTHING_LISTENS),)] * 3)
    with pytest.raises(AbsenceError, match="waited 0 s for the server at localhost:1: nothing listens there"):
        server.session(wait=0.0).open()
    assert len(server.streams) == 1


def test_the_remedy_for_an_unknown_host_name_is_not_to_start_the_server():
    for code, advice in (("UNKNOWN_NAME", "Give the correct name"), ("NOTHING_LISTENS", "Start the server")):
        server = Server((Disconnection(ConnectionCode[code]),))
        with pytest.raises(AbsenceError, match=f"saved work is kept. {advice}"):
            server.session(wait=0.0).open()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ConnectionCode.SERVER_EXPIRED, "this party does not accept the server at localhost:1: the server's certif"),
        (ConnectionCode.REFUSED, "the server at localhost:1 does not accept this party: revoked.$"),
    ],
)
def test_a_final_end_says_which_side_rejects_the_other(code, words):
    with pytest.raises(TransportError, match=words):
        Server((Disconnection(code, "revoked."),)).session().open()


@pytest.mark.parametrize("code", [code for code in ConnectionCode if code.is_final])
def test_a_permanent_connection_error_ends_the_session_immediately(code):
    server = Server((Disconnection(code, "x"),))
    with pytest.raises(TransportError, match="does not accept"):
        server.session().open()
    assert len(server.streams) == 1


def test_a_refusal_ends_the_session_without_another_try():
    server = Server(
        (pack_unnumbered("Refused", reason="other nodes", code="different_facts", run=RUN, table=[]),), (welcome(),)
    )
    with pytest.raises(RefusalError, match="other nodes"):
        server.session().open()
    assert (len(server.streams), server.pauses) == (1, [])


def test_waiting_is_logged_immediately_and_then_from_time_to_time():
    now = [0.0]

    def pause(seconds):
        now[0] += seconds

    server = Server(*[(Disconnection(ConnectionCode.NOTHING_LISTENS),)] * 100)
    with pytest.raises(AbsenceError):
        server.session(wait=300.0, sleep=pause, clock=lambda: now[0]).open()
    told = [line for line in server.log if line.startswith("this party is waiting for the server at localhost:1")]
    first = "this party is waiting for the server at localhost:1: nothing listens there. It tries again for 300 s."
    assert told[0] == first
    assert 8 <= len(told) <= 11
    assert all(" since " in line for line in told[1:])


def test_a_frozen_server_is_reported_within_15_s_and_its_return_too():
    now = [0.0]
    server = Server((welcome(),))
    session = server.session(clock=lambda: now[0])
    session.open()
    role = Role("waiting", session.await_attempt)
    for _ in range(14):
        now[0] += 1.0
        time.sleep(0.02)
    deadline = time.monotonic() + 10
    while not any("has been silent for" in line for line in server.log) and time.monotonic() < deadline:
        time.sleep(0.02)
    silent = [line for line in server.log if "has been silent for" in line]
    assert len(silent) == 1
    assert SILENT_AFTER <= float(silent[0].split("for ")[1].split(" s")[0]) <= 15
    server.streams[0].deliver(pack_frame(ACK))  # a heartbeat
    while not any("answers again" in line for line in server.log) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert any("answers again" in line for line in server.log)
    server.streams[0].deliver(pack_unnumbered("Stopped", code="x", reason="enough"))
    role.join(10)
    assert isinstance(role.error(), TrainingError)


def test_a_server_that_sends_signs_of_life_only_is_given_up_after_five_minutes():
    now = [0.0]
    server = Server((welcome(),))
    session = server.session(wait=1.0, clock=lambda: now[0])
    session.open()
    role = Role("waiting", session.await_attempt)
    while role.is_alive() and now[0] < 2000:
        now[0] += 5.0
        server.streams[0].deliver(pack_frame(ACK))
        time.sleep(0.001)
    role.join(10)
    assert isinstance(role.error(), AbsenceError)
    assert "waited 300 s for the other parties" in str(role.error())


def test_a_server_of_another_run_counts_as_absent_once_the_run_has_begun():
    server = Server(
        (welcome(), *pack_numbered(BEGIN)),
        (welcome(run="cd" * 12, server="s2"), *pack_numbered(("StatementRequest", {"shares": {}}))),
        (pack_unnumbered("Refused", reason="who are you", run="cd" * 12, code="x", table=[]),),
        (pack_unnumbered("Stopped", code="x", reason="enough"),),
    )
    session = server.session()
    session.open()
    session.prepare(Toy().check_limits)
    session.confirm(session.await_attempt())
    server.streams[0].deliver(CLOSED)
    with pytest.raises(TrainingError, match="the run was stopped: enough"):
        session.receive(Receive((Joint,), key(0, 0)))
    assert sum("it does not serve run" in line for line in server.log) == 1


def test_before_it_has_begun_a_party_takes_part_in_the_run_that_the_server_offers_now():
    other = welcome(run="cd" * 12, server="s2", payload={"new": 1})
    server = Server((welcome(), CLOSED), (other, *pack_numbered(BEGIN)))
    session = server.session()
    session.open()
    session.prepare(Toy().check_limits)
    assert session.await_attempt().number == 1
    assert len(server.streams) == 2


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([welcome(protocol=7)], f"uses session protocol '7', this side {PROTOCOL}"),
        ([welcome(server="s" * 65)], "server: has length 65"),
        ([welcome(received=-1)], "received=-1: must lie in"),
        ([welcome(payload=[])], r"payload=\[\]: must be an object"),
        ([welcome(more=1)], "has the unknown key 'more'"),
        ([welcome(resumed=True)], "a session that this party does not know"),
        ([welcome(received="1")], "received='1': must be an integer"),
        ([b""], "expected at least a header of 17 bytes"),
        ([b"\xff" * 40], "unknown kind 255"),
        ([pack_frame(CONTROL, b"[" * 50_000)], "control frame: is nested too deeply"),
        ([pack_unnumbered("x")], "control message of unknown kind 'x'"),
        (pack_numbered(BEGIN), "received a frame before the welcome"),
        ([welcome(), *pack_numbered(("x", {}))], "unknown kind 'x'"),
        (
            [welcome(), *pack_numbered(("ProposedAttempt", {"number": 1}))],
            "control message 'ProposedAttempt': round: is missing",
        ),
        ([welcome(), *pack_numbered(("Goodbye", {"payload": 7}))], "'Goodbye': payload=7: must be an object"),
        (
            [welcome(), *pack_numbered(("Confirmation", {"attempt": 1}))],
            "control message 'Confirmation': it is not expected now",
        ),
        ([pack_unnumbered("Stopped", reason="x")], "control message 'Stopped': code: is missing"),
        ([welcome(), *pack_numbered(BEGIN)], "'propose' cannot follow the state 'connected'"),
        ([welcome(), *pack_numbered(BEGIN, BEGIN)[1:]], "expected frame 1, got frame 2"),
        ([welcome(), pack_frame(ACK, acknowledged=9)], "frame 9 is acknowledged"),
    ],
)
def test_a_malformed_server_ends_the_session_with_one_clear_error(frames, words):
    server = Server(frames)
    session = server.session()
    with pytest.raises(ProtocolError, match=words):
        open_and_wait(session)


def test_what_the_server_says_reaches_a_terminal_as_one_short_printable_line():
    escapes = "\x1b[2J\nall parties are there\r\x9b1m" + "x" * 10_000
    table = [escapes] * 80
    server = Server(
        (
            welcome(),
            pack_unnumbered("Notice", line=escapes),
            pack_unnumbered("Refused", reason=escapes, code=escapes, table=table),
        )
    )
    session = server.session()
    with pytest.raises(RefusalError) as caught:
        open_and_wait(session)
    assert len(caught.value.table) <= 50
    for line in [*server.log, str(caught.value), caught.value.code, *caught.value.table]:
        assert line.isprintable()
        assert len(line) < 2000


def joint(round_index=0, rows=3):
    return encode(Joint(key(round_index, 0), np.zeros((rows, 4), np.float32)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (joint(round_index=1), "expected Joint for training round 0 .*, got Joint for training round 1"),
        (joint(rows=3000), "expected at most 900 bytes, got 48060"),
    ],
)
def test_an_answer_that_is_not_expected_or_too_long_is_refused_by_its_header(content, words):
    channel = Channel()
    channel.outbox.put_control(ProposedAttempt(*BEGIN[1].values()))
    channel.outbox.put_message(content)
    server = Server((welcome(), channel.take_next()))
    session = server.session()
    session.open()
    session.prepare(Toy().check_limits)
    session.confirm(session.await_attempt())
    server.streams[0].deliver(channel.take_next())
    with pytest.raises(ProtocolError, match=words):
        session.receive(Receive((Joint,), key(0, 0)))


LISTS = b'{"kind": "Goodbye", "payload": {"x": [' + b",".join([b"[]"] * 340_000) + b"]}}"  # parsed, it takes 22 MiB


@pytest.mark.parametrize(("kind", "body"), [(PIECE, bytes(MAX_PIECE)), (CONTROL, LISTS)], ids=["pieces", "lists"])
def test_a_server_that_ignores_the_window_cannot_fill_the_memory_of_a_party(kind, body):
    # Nothing reads here: the party computes. The reader stops, and gRPC's flow control stops the server.
    server = Server((welcome(),))
    session = server.session()
    session.open()

    def flood():
        stream, number = server.streams[0], 0
        while stream.outgoing.is_open:
            number += 1
            stream.deliver(pack_frame(kind, body, number=number))

    held = session.connection.channel
    tracemalloc.start()
    try:
        threading.Thread(target=flood, daemon=True).start()
        wait_for(lambda: held.is_overrun, seconds=120)
        assert tracemalloc.get_traced_memory()[0] < ROOM + WINDOW + (8 << 20)
    finally:
        tracemalloc.stop()
    last = -1
    while last != held.waiting:
        last = held.waiting
        time.sleep(0.3)
    assert ROOM < last < ROOM + WINDOW + (4 << 20)
    session.close()


def heard_by(server):
    """Return the second control message that the server received on its first stream; the first one is the hello."""
    deadline = time.monotonic() + 10
    while len(server.streams[0].sent) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return read_control(server.streams[0].sent[1][FRAME_HEADER.size :])


def test_a_failure_and_a_refusal_of_the_party_reach_the_server_as_last_words():
    server = Server((welcome(),))
    session = server.session()
    session.open()
    session.fail(CheckpointError("/home/x: full", public="its disk is full"))
    word = heard_by(server)
    assert (word.kind, word.fields) == (
        "Failed",
        {"code": "checkpoint_failed", "reason": "its disk is full", "table": []},
    )

    server = Server((welcome(),))
    session = server.session(decline=RefusalError(Code.DIFFERENT_SETTINGS, "the reason", ["a  b"]))
    with pytest.raises(RefusalError) as caught:
        session.open()
    session.fail(caught.value)  # changes nothing: the server knows the reason
    word = heard_by(server)
    assert (word.kind, word.fields) == (
        "Declined",
        {"code": "different_settings", "reason": "the reason", "table": ["a  b"]},
    )
    assert "a  b" in server.log


def test_a_party_that_the_server_has_stopped_reports_no_failure():
    server = Server((welcome(), pack_unnumbered("Stopped", code="party_failed", reason="enough")))
    session = server.session()
    with pytest.raises(TrainingError) as caught:
        open_and_wait(session)
    assert caught.value.code == "party_failed"
    session.fail(caught.value)
    session.close()
    wait_for(lambda: server.streams[0].sent)
    assert len(server.streams[0].sent) == 1  # the hello


def test_a_new_proposal_reaches_a_party_that_waits_for_an_answer():
    begin = {**BEGIN[1], "number": 2}
    frames = pack_numbered(BEGIN, ("StatementRequest", {}), ("ProposedAttempt", begin))
    server = Server((welcome(), frames[0]))
    session = server.session()
    session.open()
    session.prepare(Toy().check_limits)
    session.confirm(session.await_attempt())
    server.streams[0].deliver(*frames[1:])
    with pytest.raises(NewAttempt) as caught:
        session.receive(Receive((Joint,), key(0, 0)))
    assert caught.value.attempt.number == 2


def test_notices_of_a_server_cannot_fill_the_log_of_a_party():
    notices = [pack_unnumbered("Notice", line=f"line {number}") for number in range(500)]
    server = Server((welcome(), *notices, pack_unnumbered("Stopped", code="x", reason="enough")))
    with pytest.raises(TrainingError, match="enough"):
        open_and_wait(server.session())
    assert 1 <= sum(line.startswith("line ") for line in server.log) <= 20
