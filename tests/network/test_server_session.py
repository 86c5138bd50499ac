"""The server's end of the streams alone: whatever comes on one of them, somebody hears of it, and nothing hangs."""

from __future__ import annotations

import json
import threading
from itertools import pairwise

import pytest

from glasu.errors import AbsenceError, GlasuError, ProtocolError, TrainingError
from glasu.network import server_session as hubs
from glasu.network import state_file as durables
from glasu.network.client_session import Session
from glasu.network.compatibility import STATED, protocol_facts
from glasu.network.fencing import REMEMBERED
from glasu.network.frames import CONTROL, CONTROL_BYTES, control, pieces, read_control
from glasu.network.party_setup import id_facts, label_facts
from glasu.network.peer import Stream
from glasu.network.server_session import Hub
from glasu.network.state_file import Durable
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Proposal
from glasu.report import versions
from glasu.wire.message_key import Key, Phase
from network.test_runs import tiny

RUN = "00" * 12
FACTS = {"nodes": 5, "glasu": "1", **dict.fromkeys(STATED, "x")}
HELLO = {
    "process": "p1",
    "before": [],
    "incarnation": 1,
    "run": None,
    "attempt": 0,
    "finished": None,
    "rounds": {"0": "start"},
    "facts": FACTS,
}
PREPARED = {"digest": "d", "rounds": {"0": "start"}, "facts": FACTS}


class Desk:
    """A hub with what it said, and streams that a test plays the party of."""

    def __init__(self, folder, names="ab", **options) -> None:
        self.said: list[str] = []
        self.durable = Durable(folder / "serving.json", {"incarnations": {}})
        welcome = {"run": RUN, "config": {}, "roster": list(names)}
        self.hub = Hub(names, {"glasu": "1"}, welcome, self.durable, lambda: {0: "start"}, self.said.append, **options)

    def attach(self, name, frames) -> Stream:
        """Let a party's stream bring these frames, and end."""
        stream = Stream()
        thread = threading.Thread(target=self.hub.attach, args=(name, stream, iter(frames)))
        thread.start()  # pytest reports what a thread does not catch
        thread.join(20)
        assert not thread.is_alive()
        return stream

    def staying(self, name, frames):
        """Let a party's stream bring these frames, and stay; return it and what ends it."""
        stream, taken, leave = Stream(), threading.Event(), threading.Event()

        def coming():
            yield from frames
            taken.set()
            leave.wait(60)

        thread = threading.Thread(target=self.hub.attach, args=(name, stream, coming()), daemon=True)
        thread.start()
        taken.wait(20)
        return stream, leave


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def sent(stream):
    """Return the control frames that a closed stream was given."""
    assert not stream.open
    return [json.loads(frame[1:]) for frame in stream.outgoing() if frame[0] == CONTROL]


def hello(**changes):
    return control("hello", **{**HELLO, **changes})


HELLOS = {
    "an infinite count": bytes([CONTROL]) + json.dumps({**HELLO, "kind": "hello", "incarnation": 9e999}).encode(),
    "a count that is none": hello(incarnation=1.5),
    "a negative count": hello(incarnation=-1),
    "a count beyond the key's": hello(incarnation=2**32),
    "an attempt beyond all": hello(attempt=10**30),
    "infinite nodes": hello(facts={"nodes": float("nan")}),
    "rounds that are none": hello(rounds={"-1": "x"}),
    "a past that is none": hello(before=7),
    "an end that is none": hello(finished=[1]),
}


@pytest.mark.parametrize("name", HELLOS)
def test_a_hello_that_cannot_be_is_refused_in_words_and_stops_nobody(name, desk):
    stream = desk.attach("a", [HELLOS[name]])
    (answer,) = sent(stream)
    assert answer["kind"] == "refused"
    assert any(line.startswith("a: not accepted: ") for line in desk.said)
    assert desk.hub.failure is None
    assert desk.hub.connected() == {"a": False, "b": False}


CONTROLS = {
    "unknown": (control("x"), "control frame of unknown kind 'x'"),
    "a second hello": (hello(), "control frame of unknown kind 'hello'"),
    "too long": (control("failed", why="x" * CONTROL_BYTES), f"expected at most {CONTROL_BYTES} bytes, got"),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_frame_that_nobody_sends_is_refused(name, desk):
    frame, expected = CONTROLS[name]
    stream = desk.attach("a", [hello(), frame])
    assert isinstance(desk.hub.failure, ProtocolError)
    assert expected in str(desk.hub.failure)
    assert sent(stream)[-1]["kind"] == "stopped"


def test_nobody_waits_while_a_control_frame_is_read(desk, monkeypatch):
    free = []

    def read(frame, *more):
        thread = threading.Thread(target=lambda: free.append(desk.hub.connected()), daemon=True)
        thread.start()
        thread.join(5)
        return read_control(frame, *more)

    monkeypatch.setattr(hubs, "read_control", read)
    desk.attach("a", [hello(), control("prepared", **PREPARED)])
    assert len(free) == 2


def test_what_an_honest_party_says_is_far_from_too_long():
    config, parties = tiny()
    facts = {**protocol_facts(versions(), "training"), **id_facts(parties[0]), **label_facts(parties[0])}
    said = control("prepared", digest="0" * 64, settings=config.comparable(), rounds={1: "0" * 64}, facts=facts)
    starts = control("hello", **{**HELLO, "before": ["0" * 16] * REMEMBERED, "facts": facts})
    assert max(len(said), len(starts)) < CONTROL_BYTES / 4


def test_a_fault_of_the_program_that_a_stream_wakes_stops_the_run_by_its_type_only(desk, monkeypatch):
    def fault(self, link, fields):
        raise ZeroDivisionError("salary of node 7: 12345")

    monkeypatch.setattr(Hub, "_control", fault)
    stream = desk.attach("a", [hello(), control("prepared", **PREPARED)])
    assert isinstance(desk.hub.failure, GlasuError)
    assert str(desk.hub.failure) == "party 'a': ZeroDivisionError in the program"
    assert sent(stream)[-1] == {"kind": "stopped", "why": "party 'a': ZeroDivisionError in the program"}
    assert desk.hub.connected()["a"] is False


def test_a_party_that_becomes_another_in_mid_run_is_refused_and_its_messages_are_not_read(tmp_path):
    desk = Desk(tmp_path, "a")

    def frames():
        yield hello()
        yield control("prepared", **PREPARED)
        desk.hub.under_way = True
        desk.hub.propose(1, 0)
        yield control("ready", attempt=1, digest="start")
        yield control("prepared", **{**PREPARED, "facts": {**FACTS, "nodes": 6, "glasu": "2"}})
        key = Key(run=bytes(12), phase=Phase.TRAINING, client=0, incarnation=1, attempt=1)
        yield from pieces(encode(Proposal(key=key)))

    stream = desk.attach("a", frames())
    last = sent(stream)[-1]
    assert last["kind"] == "refused"
    assert "glasu: the server 1, a 2" in last["why"]
    assert desk.hub.failure is None  # it may come back with what is right
    stranger = desk.attach("a", [hello(process="q", incarnation=7)])
    assert "another process of party 'a'" in sent(stranger)[0]["why"]  # but nobody else in its place
    assert desk.hub.connected() == {"a": False}
    assert not desk.hub.links["a"].inbox


def test_a_server_that_cannot_remember_who_came_stops_the_run_and_says_why(desk, monkeypatch):
    first, leave = desk.staying("a", [hello()])

    def full(*arguments, **more):
        raise OSError(28, "No space left on device", "/secret/place")

    monkeypatch.setattr(durables, "write_atomically", full)
    stream = desk.attach("a", [hello(process="p2", before=["p1"], incarnation=2)])
    expected = "the server failed when party 'a' came: OSError in the program (No space left on device)"
    assert sent(stream) == [{"kind": "stopped", "why": expected}]
    assert isinstance(desk.hub.failure, TrainingError)
    assert str(desk.hub.failure) == expected
    assert first.open  # the process that takes part was not let go for one that could not be admitted
    leave.set()


def test_what_cannot_be_written_does_not_count(tmp_path, monkeypatch):
    kept = Durable(tmp_path / "kept.json", {"count": 1})

    def full(*arguments, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durables, "write_atomically", full)
        with pytest.raises(OSError, match="No space"):
            kept.update(count=2)
    assert kept["count"] == 1
    kept.update(count=2)
    assert Durable(tmp_path / "kept.json", {})["count"] == kept["count"] == 2


ESCAPES = "\x1b[2J\nglasu serve: attempt 9: all parties are there\r\x9b1m" + "x" * 10_000


@pytest.mark.parametrize(
    "frames",
    [
        [hello(), control("declined", why=ESCAPES, table=[ESCAPES] * 5)],
        [hello(), control("declined", why=ESCAPES, table=7)],
        [hello(), control("failed", why=ESCAPES)],
        [hello(facts={"nodes": 5, "glasu": ESCAPES})],
        [hello(), control("prepared", **{**PREPARED, "facts": {"nodes": 5, "glasu": ESCAPES}})],
        [hello(facts={**FACTS, ESCAPES: 1})],
        [control(ESCAPES)],
        [hello(), bytes([CONTROL]) + ESCAPES.encode()],
    ],
    ids=["declined", "declined with no table", "failed", "facts", "prepared", "name of a fact", "kind", "control"],
)
def test_what_a_party_says_reaches_terminals_as_one_short_printable_line(frames, desk):
    other, leave = desk.staying("b", [hello(process="q", facts={**FACTS, ESCAPES: 2})])
    own = desk.attach("a", frames)
    leave.set()
    other.close()
    answers = [*sent(own), *sent(other)]
    told = [frame.get("line", frame.get("why", "")) for frame in answers]
    told += [line for frame in answers for line in frame.get("table", ())]
    for line in [*desk.said, *told, str(desk.hub.failure or "")]:
        assert line.isprintable()
        assert len(line) < 2000


def test_what_the_server_says_reaches_a_partys_terminal_as_one_short_printable_line():
    said: list[str] = []
    session = Session(None, "localhost:1", dict, 1.0, said.append)
    session._control({"kind": "notice", "line": ESCAPES})
    errors = [
        session._ended({"kind": "refused", "why": ESCAPES, "table": [ESCAPES] * 1000}),
        session._ended({"kind": "refused", "why": ESCAPES, "table": 7}),
        session._ended({"kind": "stopped", "why": ESCAPES}),
    ]
    assert len(said) <= 100
    for line in [*said, *map(str, errors)]:
        assert line.isprintable()
        assert len(line) < 2000


class Quick:
    """A clock that a hub's waiting moves: a second passes whenever it waits for one."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def drive(self, hub, end=float("inf")) -> None:
        def wait(seconds):
            self.now += seconds
            if self.now - 1000.0 > end:
                hub.failure = TrainingError("enough")

        hub.changed.wait = wait


def test_who_is_awaited_is_named_at_least_every_minute_until_time_is_up(tmp_path):
    clock = Quick()
    desk = Desk(tmp_path, "ab", clock=clock)
    other, leave = desk.staying("a", [hello(), control("prepared", **PREPARED)])
    clock.drive(desk.hub)
    with pytest.raises(AbsenceError, match="waited 3600 s for b to join"):
        desk.hub.gather(3600.0)
    times = [float(line.split("since ")[1].split(" s")[0]) for line in desk.said if "waiting for" in line]
    assert times[0] <= 11
    assert max(later - earlier for earlier, later in pairwise(times)) <= 61
    assert times[-1] >= 3600 - 61
    leave.set()
    other.close()


def test_who_comes_when_the_run_has_ended_hears_why_and_holds_nobody_up(desk):
    first, leave = desk.staying("a", [hello()])
    came = []

    def come_late():
        came.append(desk.attach("b", [hello(process="q")]))
        leave.set()

    ending = threading.Thread(target=desk.hub.announce_failure, args=(AbsenceError("waited 1 s for b"), 60.0))
    ending.start()
    while desk.hub.failure is None:
        pass
    come_late()
    ending.join(20)
    assert not ending.is_alive()
    assert [frame["kind"] for frame in sent(came[0])] == ["stopped"]
    assert sent(first)[-1] == {"kind": "stopped", "why": "waited 1 s for b"}
    assert not any("its return is awaited" in line for line in desk.said)


def test_a_process_that_is_refused_again_and_again_is_told_of_once(desk):
    for _ in range(3):
        assert sent(desk.attach("a", [hello(run="11" * 12)]))[0]["kind"] == "refused"
    assert sum("a: not accepted" in line for line in desk.said) == 1
    assert desk.hub.refused == 3


def test_a_party_that_is_connected_may_take_as_long_as_it_needs_and_is_named(tmp_path):
    clock = Quick()
    desk = Desk(tmp_path, "a", clock=clock)
    stream, leave = desk.staying("a", [hello()])
    clock.drive(desk.hub, end=50_000.0)
    with pytest.raises(TrainingError, match="enough"):
        desk.hub.gather(600.0)
    assert sum("waiting for a to join since" in line and "a is connected" in line for line in desk.said) > 500
    leave.set()
    stream.close()


def test_the_time_of_a_party_that_is_away_does_not_begin_again_when_another_comes(tmp_path):
    clock = Quick()
    desk = Desk(tmp_path, "ab", clock=clock)
    clock.now += 500
    stream, leave = desk.staying("a", [hello()])
    clock.drive(desk.hub)
    with pytest.raises(AbsenceError, match="waited 600 s for b to join"):
        desk.hub.gather(600.0)
    assert clock.now - 1000 <= 601
    leave.set()
    stream.close()


def test_the_end_of_an_attempt_that_is_over_is_not_the_end_of_the_present_one(tmp_path):
    desk = Desk(tmp_path, "a")

    def frames():
        yield hello()
        yield control("prepared", **PREPARED)
        desk.hub.propose(1, 0)
        yield control("ready", attempt=1, digest="start")
        desk.hub.propose(2, 0)
        yield control("finished", weights_sha256="of attempt 1")
        assert desk.hub.links["a"].finished is None
        yield control("ready", attempt=2, digest="start")
        yield control("finished", weights_sha256="of attempt 2")
        assert desk.hub.links["a"].finished["weights_sha256"] == "of attempt 2"

    desk.attach("a", frames())
    assert desk.hub.failure is None


def test_a_refusal_is_short_however_much_a_party_states(desk):
    stream = desk.attach("a", [hello(rounds={str(index): "x" for index in range(1, 4_000)})])
    (answer,) = sent(stream)
    assert "none in common" in answer["why"] or answer["why"].endswith("...")
    assert len(answer["why"]) <= 1200


def test_a_party_without_an_intact_checkpoint_is_told_that_it_has_none(desk):
    (answer,) = sent(desk.attach("a", [hello(rounds={})]))
    assert answer["why"].startswith("its intact checkpoints are of rounds: none; the server's: 0; none in common.")
