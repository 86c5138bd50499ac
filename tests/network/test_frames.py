"""Numbered frames: over any number of broken streams, everything arrives once, in order, and memory is bounded."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from glasu.errors import ProtocolError
from glasu.network.control import Goodbye, Notice, pack_control, read_control
from glasu.network.frames import (
    ACK,
    CONTROL,
    CONTROL_BYTES,
    FRAME_HEADER,
    MAX_FRAME,
    MAX_PIECE,
    OVERHEAD,
    PIECE,
    ROOM,
    WINDOW,
    Assembler,
    Channel,
    Outbox,
    pack_frame,
    read_frame,
    split_pieces,
)
from glasu.protocol.message_bytes import decode, encode
from glasu.protocol.messages import Partial
from glasu.wire.message_key import Key, Phase

KEY = Key(bytes(12), Phase.TRAINING, 0, round=3, layer=1)


def partial(rows, columns=4):
    return Partial(key=KEY, value=np.arange(rows * columns, dtype=np.float32).reshape(rows, columns))


SMALL = 20_000  # bytes of a window


class Streams(RuleBasedStateMachine):
    """Two channels over a stream that can lose all frames in flight at any moment, compared with a list."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = [Channel(window=SMALL, room=SMALL), Channel(window=SMALL, room=SMALL)]
        self.under_way: list[list[bytes]] = [[], []]  # towards each end
        self.sent: list[list[str]] = [[], []]  # by each end
        self.arrived: list[list[str]] = [[], []]  # at each end

    @rule(end=st.integers(0, 1), size=st.sampled_from([0, 10, 3_000]))
    def put(self, end, size):
        name = f"{end}-{len(self.sent[end])}"
        self.ends[end].outbox.put_control(Goodbye({"name": name, "rest": "y" * size}))
        self.sent[end].append(name)

    @rule(end=st.integers(0, 1), count=st.integers(1, 5))
    def transmit(self, end, count):
        for _ in range(count):
            frame = self.ends[end].take_next()
            if frame is not None:
                self.under_way[1 - end].append(frame)

    @rule(end=st.integers(0, 1), count=st.integers(1, 5))
    def deliver(self, end, count):
        for _ in range(min(count, len(self.under_way[end]))):
            frame = read_frame(self.under_way[end].pop(0))
            if self.ends[end].accept(frame):
                self.arrived[end].append(read_control(frame.body, MAX_FRAME).payload["name"])

    @rule(end=st.integers(0, 1))
    def deliver_twice(self, end):
        if self.under_way[end]:
            frame = read_frame(self.under_way[end][0])
            before = list(self.arrived[end])
            if self.ends[end].accept(frame):
                self.arrived[end].append(read_control(frame.body, MAX_FRAME).payload["name"])
                before = list(self.arrived[end])
            assert not self.ends[end].accept(frame)
            assert self.arrived[end] == before
            self.under_way[end].pop(0)

    @rule()
    def break_stream(self):
        self.under_way = [[], []]
        received = [end.received for end in self.ends]
        self.ends[0].outbox.rewind(received[1])
        self.ends[1].outbox.rewind(received[0])

    @invariant()
    def what_arrives_is_a_prefix_of_what_was_sent(self):
        for end in (0, 1):
            assert self.arrived[1 - end] == self.sent[end][: len(self.arrived[1 - end])]

    @invariant()
    def no_more_than_the_window_is_under_way(self):
        for end in (0, 1):
            assert sum(map(len, self.under_way[end])) <= SMALL + 4_000

    def teardown(self):
        for _ in range(60):
            for end in (0, 1):
                self.transmit(end, 5)
                self.deliver(1 - end, 5)
        assert self.arrived == [self.sent[1], self.sent[0]]
        for end in (0, 1):  # only frames that one more ack would free are held
            assert self.ends[end].outbox.held <= SMALL


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_acknowledged_frames_are_freed_and_the_window_opens():
    sender, receiver = Outbox(), Channel()
    message = encode(partial(70_000, 64))  # 17.9 MB, more than the window
    sender.put_message(message)
    sender.put_message(message)
    assert sender.is_full
    count = 0
    while (frame := sender.take_next(0)) is not None:
        receiver.accept(read_frame(frame))
        count += 1
    assert count == WINDOW // (MAX_PIECE + OVERHEAD) + 1
    sender.acknowledge(receiver.received)
    assert sender.held < 2 * len(message) - WINDOW + MAX_FRAME
    assert sender.take_next(0) is not None


def test_a_receiver_that_uses_nothing_acknowledges_nothing_beyond_its_room():
    sender, receiver = Channel(), Channel()
    for _ in range(10):
        sender.outbox.put_message(encode(partial(16_384, 64)))  # 4 MiB each
    acknowledged = 0
    for _ in range(200):
        frame = sender.take_next()
        if frame is not None and receiver.accept(read_frame(frame)):
            receiver.put(frame, len(frame))
        ack = receiver.take_next()
        if ack is not None:
            acknowledged = read_frame(ack).acknowledged
            sender.accept(read_frame(ack))
    assert ROOM <= receiver.waiting <= ROOM + WINDOW + 2 * MAX_FRAME
    assert acknowledged <= ROOM // MAX_PIECE + 1
    assert not receiver.is_overrun
    receiver.clear()  # the window is used up: an ack is due immediately
    ack = receiver.take_next()
    assert read_frame(ack).acknowledged == receiver.received


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "expected at least a header of 17 bytes"),
        (b"\x00" * 16, "expected at least a header of 17 bytes"),
        (FRAME_HEADER.pack(3, 1, 0), "unknown kind 3"),
        (FRAME_HEADER.pack(255, 1, 0), "unknown kind 255"),
        (FRAME_HEADER.pack(PIECE, 0, 0), "pieces have a number"),
        (FRAME_HEADER.pack(ACK, 1, 0), "acks have 0"),
    ],
)
def test_a_frame_that_cannot_be_is_refused(data, words):
    with pytest.raises(ProtocolError, match=words):
        read_frame(data)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[" * 50_000, "is nested too deeply"),
        (b"[]", "unknown kind 'None'"),
        (b"7", "unknown kind 'None'"),
        (b"null", "unknown kind 'None'"),
        (b"{}", "unknown kind 'None'"),
        (b'{"kind": 7}', "unknown kind '7'"),
        (b'{"kind": ["Hello"]}', "unknown kind"),
        (b'{"kind": "Notice", "line": "x", "kind": "Notice"}', "same key twice"),
        (b'{"kind": "Goodbye", "payload": {"y": NaN}}', "must be a finite number"),
    ],
)
def test_a_control_message_that_is_no_json_object_with_a_kind_is_refused(body, words):
    with pytest.raises(ProtocolError, match=words):
        read_control(body, MAX_FRAME)


def test_a_long_control_message_is_refused_before_it_is_parsed():
    with pytest.raises(ProtocolError, match=f"at most {CONTROL_BYTES} bytes"):
        read_control(b"[" * (CONTROL_BYTES + 1), CONTROL_BYTES)


def test_a_gap_in_the_numbers_and_an_ack_of_what_was_not_sent_are_refused():
    channel = Channel()
    with pytest.raises(ProtocolError, match="expected frame 1, got frame 2"):
        channel.accept(read_frame(pack_frame(CONTROL, pack_control(Notice("x")), number=2)))
    with pytest.raises(ProtocolError, match="frame 1 is acknowledged, but 0 was the last frame sent"):
        channel.accept(read_frame(pack_frame(ACK, acknowledged=1)))
    assert channel.received == 0


def test_a_peer_cannot_ask_for_frames_that_it_has_acknowledged():
    channel = Channel()
    channel.outbox.put_control(Notice("x"))
    channel.take_next()
    channel.outbox.acknowledge(1)
    with pytest.raises(ProtocolError, match="frame 1 is requested again"):
        channel.outbox.rewind(0)


def bodies(message):
    """Return the bodies of a message's pieces."""
    outbox = Outbox()
    outbox.put_message(message)
    frames = []
    while (frame := outbox.take_next(0)) is not None:
        assert len(frame) <= MAX_FRAME
        frames.append(read_frame(frame).body)
    return frames


def admit_all(head, size):
    pass


@pytest.mark.parametrize("rows", [0, 1, 65_536, 70_000])
def test_pieces_make_the_message_again(rows):
    message, assembler = partial(rows), Assembler()
    for _ in range(2):  # after a message, the assembler is ready for the next
        found = None
        for body in bodies(encode(message)):
            assert found is None
            found = assembler.add(body, admit_all)
        np.testing.assert_array_equal(decode(found.content, found.head).value, message.value)


@pytest.mark.parametrize("rows", [(3,), (1, 0, 40), (1, 65_536, 2), (70_000, 5)])
def test_messages_of_a_bundle_arrive_one_by_one_and_short_ones_share_a_frame(rows):
    outbox, assembler, messages = Outbox(), Assembler(), [encode(partial(each)) for each in rows]
    outbox.put_bundle(messages)
    found, num_frames = [], 0
    while (frame := outbox.take_next(0)) is not None:
        assert len(frame) <= MAX_FRAME
        num_frames += 1
        whole = [assembler.add(piece, admit_all) for piece in split_pieces(read_frame(frame).body)]
        found += [bytes(each.content) for each in whole if each is not None]
    assert found == messages
    assert num_frames == 1 or sum(map(len, messages)) > MAX_PIECE - 1024


@given(st.binary(max_size=200))
def test_pieces_of_any_bytes_make_the_bytes_again(body):
    pieces = list(split_pieces(memoryview(body)))
    assert b"".join(pieces) == body
    assert all(len(piece) for piece in pieces) or not body


def test_pieces_in_another_order_are_refused():
    first, second, third = bodies(encode(partial(2 * MAX_PIECE // 16 + 1)))
    for order in ([second], [first, third], [first, first], [first, second, second]):
        assembler = Assembler()
        for body in order[:-1]:
            assembler.add(body, admit_all)
        with pytest.raises(ProtocolError, match="piece"):
            assembler.add(order[-1], admit_all)


@pytest.mark.parametrize(
    ("total", "offset", "size"), [(10, 0, 11), (10, 5, 3), (0, 0, 1), (2**64 - 1, 0, 60), (0, 0, 0)]
)
def test_a_piece_that_does_not_fit_its_message_is_refused(total, offset, size):
    with pytest.raises(ProtocolError):
        Assembler().add(memoryview(struct.pack("<QQ", total, offset) + bytes(size)), admit_all)


def test_a_message_is_decoded_in_the_buffer_of_its_pieces_without_another_copy():
    message = partial(1 << 17, 8)  # 4 MiB, within the window
    pieces, size = bodies(encode(message)), message.value.nbytes
    assembler = Assembler()
    tracemalloc.start()
    try:
        *_, whole = (assembler.add(body, admit_all) for body in pieces)
        found = decode(whole.content, whole.head)
        assert tracemalloc.get_traced_memory()[1] < 1.01 * size
    finally:
        tracemalloc.stop()
    assert np.shares_memory(found.value, np.frombuffer(whole.content, np.uint8))
    assert found.value.flags.writeable


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16, np.int8])
def test_tensors_of_all_types_are_aligned_in_the_buffer(dtype):
    assembler = Assembler()
    (body,) = bodies(encode(Partial(key=KEY, value=np.ones((3, 5), dtype))))
    whole = assembler.add(body, admit_all)
    found = decode(whole.content, whole.head)
    assert np.shares_memory(found.value, np.frombuffer(whole.content, np.uint8))
    assert found.value.flags.aligned


@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_a_frame_or_refused(data):
    with contextlib.suppress(ProtocolError):
        frame = read_frame(data)
        Assembler().add(frame.body, admit_all)


def test_a_message_that_is_refused_by_its_header_gets_no_memory():
    seen = []

    def refuse(head, size):
        seen.append((head.key, size))
        raise ProtocolError("no")

    body = bytearray(bodies(encode(partial(70_000)))[0])
    body[0:8] = (1 << 40).to_bytes(8, "little")  # total length: 1 TiB
    with pytest.raises(ProtocolError):
        Assembler().add(memoryview(body), refuse)
    with pytest.raises(ProtocolError, match="no"):
        Assembler().add(memoryview(bodies(encode(partial(70_000)))[0]), refuse)
    assert seen == [(KEY, len(encode(partial(70_000))))]


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 79), st.integers(0, 255)), max_size=6), cut=st.integers(0, 80))
def test_mutated_pieces_are_refused_or_complete_a_message_of_the_admitted_size(changes, cut):
    content = bytearray(bodies(encode(partial(1)))[0])
    for place, value in changes:
        content[place % len(content)] = value
    admitted = []

    def admit(head, size):
        if size > 4096:
            raise ProtocolError("too long")
        admitted.append(size)

    assembler = Assembler()
    try:
        whole = assembler.add(memoryview(content[: len(content) - cut]), admit)
        if whole is not None:
            assert len(whole.content) == admitted[0]
            decode(whole.content, whole.head)
    except ProtocolError:
        pass
