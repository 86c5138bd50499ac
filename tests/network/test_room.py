"""The server's memory: room is made for what is awaited now, and for no more than parties take."""

from __future__ import annotations

import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue

import numpy as np
import pytest

from glasu.errors import ProtocolError
from glasu.network import client_session as sessions
from glasu.network import frames
from glasu.network import server_session as hubs
from glasu.network.compatibility import STATED
from glasu.network.frames import PIECE, PIECE_BYTES, RECEIPT, Limits, control, pieces
from glasu.network.peer import Stream
from glasu.network.state_file import Durable
from glasu.protocol import chunks
from glasu.protocol.message_bytes import decode, encode
from glasu.protocol.messages import Awaited, Gradient, Joint, Partial
from glasu.runtime.simulation import simulate
from glasu.wire.message_key import SERVER, Key, Phase
from network.test_runs import tiny
from support.cluster import Cluster, Role

RUN = bytes(range(12))
SAID = {"facts": {"nodes": 24, "glasu": "1", **dict.fromkeys(STATED, "x")}, "rounds": {"0": "start"}}
AWAITED = Awaited((Partial,), RUN, Phase.TRAINING, 1, 1, 2)


class Peer:
    """A party that speaks to a hub without a network."""

    def __init__(self, hub, name, index):
        self.stream, self.index, self._frames = Stream(), index, SimpleQueue()
        threading.Thread(target=hub.attach, args=(name, self.stream, iter(self._frames.get, None)), daemon=True).start()
        self.send(control("hello", process="p", incarnation=1, run=None, attempt=0, finished=None, **SAID))

    def send(self, *sent):
        for frame in sent:
            self._frames.put(frame)

    def key(self, **fields):
        about = {"phase": Phase.TRAINING, "round": 1, "layer": 1, "chunk": 2}
        return Key(**{**about, "run": RUN, "client": self.index, "incarnation": 1, "attempt": 1, **fields})

    def answers(self):
        """Return the frames of messages that were sent to this party."""
        self.stream.close()
        return [frame for frame in self.stream.outgoing() if frame[0] == PIECE]


@pytest.fixture
def hub(tmp_path):
    """Return a hub with three peers who are ready for the first attempt, and the peers."""
    durable = Durable(tmp_path / "serving.json", {"incarnations": {}})
    hub = hubs.Hub("abc", {"glasu": "1"}, {"run": RUN.hex()}, durable, lambda: {0: "start"}, lambda line: None)
    peers = [Peer(hub, name, index) for index, name in enumerate("abc")]
    gathering = Role(lambda: hub.gather(20), "gathering")
    while gathering.is_alive():  # what is said before it asks does not count
        for peer in peers:
            peer.send(control("prepared", digest="d", **SAID))
        gathering.join(0.05)
    gathering.outcome()
    config, _ = tiny()
    hub.propose(1, 0, AWAITED, Limits(config, 10**6, 3, 3))
    for peer in peers:
        peer.send(control("ready", attempt=1, digest="start"))
    hub.confirmed(20)
    return hub, peers


OTHERS = {  # what is changed in the header of a message, and what is said of it
    "a run": ({"run": bytes(12)}, "expected Partial for training round 1 layer 1 chunk 2, got .* of run 0000"),
    "a round": ({"round": 2}, "got Partial for training round 2 layer 1"),
    "a layer": ({"layer": 3}, "got Partial for training round 1 layer 3"),
    "a phase": ({"phase": Phase.BACKWARD}, "got Partial for backward round 1 layer 1"),
    "an earlier chunk": ({"chunk": 1}, "got Partial for training round 1 layer 1 chunk 1"),
    "a chunk that no graph has": ({"chunk": 999}, "expected a chunk of 0..244, got 999"),
    "a client": ({"client": 0}, r"expected attempt, start and client \(1, 1, 1\), got \(1, 1, 0\)"),
    "a start": ({"incarnation": 2}, r"expected attempt, start and client \(1, 1, 1\), got \(1, 2, 1\)"),
    "an attempt": ({"attempt": 3}, r"expected attempt, start and client \(1, 1, 1\), got \(3, 1, 1\)"),
}


def refused(hub, peer, frame, monkeypatch):
    """Send a frame that must be refused before room is made for it, and return what is said of it."""
    made = []
    monkeypatch.setattr(frames, "room_for", made.append)
    peer.send(frame)
    with pytest.raises(ProtocolError) as caught:
        hub.collect(20, "in round 1")
    assert not made
    assert str(caught.value).startswith("party 'b': Partial for training round 1 layer 1 chunk 2 is awaited: ")
    return caught


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_awaited_is_refused_by_its_header_before_room_is_made_for_it(name, hub, monkeypatch):
    hub, peers = hub
    fields, words = OTHERS[name]
    message = Partial(key=peers[1].key(**fields), value=np.ones((8000, 6), np.float32))
    refused(hub, peers[1], next(pieces(encode(message))), monkeypatch).match(words)


@pytest.mark.parametrize(
    ("kind", "rows", "words"),
    [
        (Gradient, 10, "expected Partial for .*, got Gradient for training round 1 layer 1 chunk 2"),
        (Partial, 4097, "training round 1 layer 1 chunk 2 from client 1: expected at most 98364 bytes, got 98388"),
    ],
)
def test_another_kind_and_one_row_too_many_are_refused_before_room_is_made(kind, rows, words, hub, monkeypatch):
    hub, peers = hub
    message = kind(key=peers[1].key(), value=np.ones((rows, 6), np.float32))
    refused(hub, peers[1], next(pieces(encode(message))), monkeypatch).match(words)


NOISE = {
    "noise": (struct.pack("<BQQ", PIECE, 1 << 16, 0) + b"NOT A HEADER" * 10, "expected b'GLSU' version 2, got b'NOT '"),
    "too long": (struct.pack("<BQQ", PIECE, 1 << 40, 0), "1099511627776 bytes declared: this run's settings allow"),
    "too short": (struct.pack("<BQQ", PIECE, 9, 0) + bytes(9), "message of 9 bytes: a header alone has 48"),
    "not from its beginning": (struct.pack("<BQQ", PIECE, 99, 7) + bytes(9), "expected a piece at 0, .*, got one at 7"),
}


@pytest.mark.parametrize("name", NOISE)
def test_noise_is_refused_with_what_was_awaited_in_its_place(name, hub, monkeypatch):
    hub, peers = hub
    frame, words = NOISE[name]
    refused(hub, peers[1], frame, monkeypatch).match(words)


def test_later_chunks_of_what_is_awaited_and_repeats_may_come(hub):
    hub, peers = hub
    for peer in peers:
        for chunk in (2, 3, 2, 4):
            peer.send(*pieces(encode(Partial(key=peer.key(chunk=chunk), value=np.ones((2, 6), np.float32)))))
    for chunk in (2, 3, 4):
        messages = hub.collect(20, "in round 1")
        assert [message.key.chunk for message in messages] == [chunk] * 3


def test_a_message_of_more_sections_than_it_can_have_is_refused_before_room_is_made(hub, monkeypatch):
    hub, peers = hub
    content = bytearray(encode(Partial(key=peers[1].key(), value=np.ones((9, 6), np.float32))))
    struct.pack_into("<H", content, 6, 65535)
    refused(hub, peers[1], next(pieces(bytes(content))), monkeypatch).match("at most 1 sections, got 65535")


def test_nobody_waits_while_the_message_of_one_party_is_decoded(hub, monkeypatch):
    hub, peers = hub
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments):
        begun.set()
        assert go_on.wait(20)
        return decode(*arguments)

    monkeypatch.setattr(hubs, "decode", slow)
    send_chunks(peers[:1], 1)
    assert begun.wait(20)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(hub.connected).result(5) == {"a": True, "b": True, "c": True}
        go_on.set()
    send_chunks(peers[1:], 1)
    assert len(hub.collect(20, "in round 1")) == 3


def test_a_message_that_was_decoded_for_an_attempt_that_is_over_is_not_used(hub, monkeypatch):
    hub, peers = hub

    def late(*arguments):
        hub.propose(2, 0, AWAITED, hub.limits)
        return decode(*arguments)

    monkeypatch.setattr(hubs, "decode", late)
    send_chunks(peers[:1], 1)
    peers[0].send(control("ready", attempt=2, digest="start"))
    with hub.changed:
        assert hub.changed.wait_for(lambda: hub.links["a"].ready == 2, 20)
    assert not hub.links["a"].inbox


def test_what_waits_to_be_used_counts_as_it_is_kept(hub):
    hub, peers = hub
    hub.awaited = AWAITED._replace(chunk=0)
    nodes = np.arange(5000, dtype=np.int32)
    content = encode(Partial(key=peers[0].key(chunk=0), value=np.ones((9, 6), np.float32), node_sets=(nodes,)))
    peers[0].send(*pieces(content))
    with hub.changed:
        assert hub.changed.wait_for(lambda: hub.links["a"].inbox, 20)
    assert hub.links["a"].waiting_bytes() == len(content) + nodes.nbytes


def test_a_message_that_comes_again_and_again_on_one_stream_is_answered_once(hub):
    hub, peers = hub
    send_chunks(peers, 1)
    answer(hub, hub.collect(20, "in round 1"), 1)
    for _ in range(100):
        send_chunks(peers[:1], 1)
    peers[0].send(None)  # the end of the stream
    deadline = time.monotonic() + 20
    while hub.connected()["a"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not hub.connected()["a"]
    assert len(peers[0].answers()) == 2  # a mebibyte, and its header


def send_chunks(peers, count):
    for peer in peers:
        for chunk in range(2, 2 + count):
            message = Partial(key=peer.key(chunk=chunk), value=np.ones((8, 6), np.float32))
            peer.send(*pieces(encode(message)))


def answer(hub, messages, rows):
    """Answer all with one tensor of so many rows of a mebibyte."""
    value = np.ones((rows, PIECE_BYTES // 4), np.float32)
    joint = Joint(key=messages[0].key._replace(client=SERVER), value=value)
    hub.answer(messages, (joint,) * 3, AWAITED)


def test_one_answer_to_all_is_encoded_once(hub):
    hub, peers = hub
    send_chunks(peers, 1)
    answer(hub, hub.collect(20, "in round 1"), 3)
    first, *others = (peer.answers() for peer in peers)
    assert len(first) == 4
    for other in others:
        assert all(mine is theirs for mine, theirs in zip(first, other, strict=True))


def test_nothing_more_is_collected_while_a_party_has_not_taken_its_answers(hub):
    hub, peers = hub
    send_chunks(peers, 4)
    rows = frames.ROOM // PIECE_BYTES // 2
    for _ in range(2):  # the second one makes more than there is room for, as yet nothing was waited for
        answer(hub, hub.collect(20, "in round 1"), rows)
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(hub.collect, 20, "in round 1")
        assert not wait([collected], 0.3).done
        for peer in peers[:2]:
            peer.send(bytes([RECEIPT]) + peer.key(chunk=2).pack())
        assert not wait([collected], 0.3).done
        peers[2].send(bytes([RECEIPT]) + peers[2].key(chunk=3).pack())
        assert [message.key.chunk for message in collected.result(20)] == [4] * 3


MODES = [
    {"aggregation": "mean"},
    {"aggregation": "concat", "sampler": "neighbor"},
    {"labels": "b", "precision": "int8", "sampler": "neighbor"},
    {"labels": "b", "precision": "bf16", "aggregation": "concat"},
    {"backward": "joint", "num_local_steps": 1, "precision": "int8", "aggregation": "concat"},
    {"backward": "joint", "num_local_steps": 1, "precision": "int8", "labels": "b"},
    {"precision": "fp64"},
]


@pytest.fixture
def little_room(monkeypatch):
    """Let chunks have three rows, parties send one at a time, and the server wait for every receipt."""
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 3)
    monkeypatch.setattr(sessions, "WINDOW", 1)
    monkeypatch.setattr(hubs, "ROOM", 0)


@pytest.mark.parametrize("keys", MODES, ids=str)
def test_chunks_over_the_network_give_the_weights_of_one_chunk_in_one_process(keys, kits, tmp_path, request):
    config, parties = tiny(**keys)
    whole = simulate(parties, config).report
    request.getfixturevalue("little_room")
    served, _ = Cluster(config, parties, kits, tmp_path).run()
    assert served.weights_sha256 == whole.weights_sha256
    assert (served.losses, served.test) == (whole.losses, whole.test)
    assert served.traffic["exchanges_by_phase"] == whole.traffic["exchanges_by_phase"]
    assert served.traffic["messages"] > whole.traffic["messages"]


@pytest.mark.usefixtures("little_room")
def test_receipts_that_are_lost_with_a_connection_are_sent_again(kits, tmp_path, monkeypatch):
    config, parties = tiny()
    send, lost = sessions.Session._send_receipt, []

    def lose(self, about):
        if self.kit.name == "b" and len(lost) < 4 and about not in lost:
            lost.append(about)
            self._line.close()
        else:
            send(self, about)

    monkeypatch.setattr(sessions.Session, "_send_receipt", lose)
    served, _ = Cluster(config, parties, kits, tmp_path).run()
    assert len(lost) == 4
    assert served.weights_sha256 == simulate(parties, config).report.weights_sha256
