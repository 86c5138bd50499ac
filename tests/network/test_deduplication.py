"""Frames and receipts: pieces fit together, sizes are checked before they are allocated, nothing is taken twice."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasu.errors import ProtocolError
from glasu.network import frames
from glasu.network.deduplication import Receipts
from glasu.network.frames import ROOM, Assembler, Limits, control, pieces, read_control
from glasu.protocol import chunks
from glasu.protocol.message_bytes import HEADER, SECTION, Head, decode, encode, read_header
from glasu.protocol.messages import Partial
from glasu.runtime.simulation import simulate
from glasu.wire import ids
from glasu.wire.message_key import Key, Phase
from network.test_runs import tiny

MANY = 1 << 40


def key(round_index, *, phase=Phase.TRAINING, layer=0, chunk=0):
    return Key(run=bytes(12), phase=phase, client=1, round=round_index, layer=layer, chunk=chunk)


def message_of(size):
    """Return a message of so many bytes, encoded."""
    values = np.random.default_rng(0).integers(0, 255, size - HEADER.size - SECTION.size).view(np.int8)[::8]
    content = encode(Partial(key=key(1), value=values[:, None]))
    assert len(content) == size
    return content


@pytest.mark.parametrize("size", [61, frames.PIECE_BYTES - 1, frames.PIECE_BYTES, 2 * frames.PIECE_BYTES + 5])
def test_a_message_put_together_from_its_pieces_is_the_message(size):
    message = message_of(size)
    found = list(pieces(message))
    assembler = Assembler(size)
    wholes = [assembler.add(piece) for piece in found]
    assert wholes == [None] * (len(found) - 1) + [message]
    assert all(len(piece) <= frames.MAX_FRAME for piece in found)
    assert assembler.add(next(pieces(message_of(61)))) == message_of(61)  # ready for the next


def test_the_arrays_of_a_message_lie_in_the_buffer_of_its_pieces_and_nothing_else_is_allocated():
    value = np.zeros((1 << 20, 8), np.float32)
    found, size = list(pieces(encode(Partial(key=key(1), value=value)))), value.nbytes
    assembler = Assembler(size + 100)
    tracemalloc.start()
    try:
        *_, whole = (assembler.add(piece) for piece in found)
        message = decode(whole, assembler.head)
        assert tracemalloc.get_traced_memory()[1] < 1.01 * size
    finally:
        tracemalloc.stop()
    assert np.shares_memory(message.value, np.frombuffer(whole, np.uint8))
    assert message.value.flags.writeable
    assert message.value.flags.aligned


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<u2", "|i1"])
def test_tensors_of_all_types_lie_where_their_type_may_lie(dtype):
    assembler = Assembler(1000)
    (frame,) = pieces(encode(Partial(key=key(1), value=np.ones((3, 5), dtype), losses=np.array([0.5]))))
    whole = assembler.add(frame)
    message = decode(whole, assembler.head)
    assert np.shares_memory(message.value, np.frombuffer(whole, np.uint8))
    assert message.value.flags.aligned
    assert message.losses.flags.aligned


REFUSED = {  # the beginning of a message of a mebibyte that is not one, and what is said of it
    "noise": (b"NOT A HEADER" * 10, "expected b'GLSU' version 2, got b'NOT ' version 65"),
    "half a header": (message_of(61)[:40], "message of 40 bytes: a header alone has 48"),
    "another length": (message_of(61), "training round 1 .*: message declares 13 bytes after its header, but carries"),
    "another kind": (message_of(61)[:5] + b"\x63" + message_of(61)[6:], "unknown kind 99 or phase 2: expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_header_is_read_before_room_is_made(name, monkeypatch):
    monkeypatch.setattr(frames, "room_for", lambda size: pytest.fail(f"{size} bytes were asked for"))
    content, words = REFUSED[name]
    with pytest.raises(ProtocolError, match=words):
        Assembler(1 << 30).add(struct.pack("<BQQ", frames.PIECE, 1 << 20, 0) + content)


def test_a_message_that_is_not_kept_passes_by_without_room(monkeypatch):
    monkeypatch.setattr(frames, "room_for", lambda size: pytest.fail(f"{size} bytes were asked for"))
    assembler = Assembler(MANY)
    for _ in range(2):
        for piece in pieces(message_of(3 * frames.PIECE_BYTES)):
            assert assembler.add(piece, lambda head, size: False) is None


@pytest.mark.parametrize(
    ("total", "offset", "size"), [(MANY, 0, 10), (11, 0, 11), (10, 1, 5), (10, 0, 11), (10, 2**63, 1), (10, 0, 0)]
)
def test_a_piece_that_does_not_fit_is_refused(total, offset, size):
    frame = struct.pack("<BQQ", frames.PIECE, total, offset) + bytes(size)
    with pytest.raises(ProtocolError):
        Assembler(10).add(frame)


def test_a_message_that_is_too_long_is_refused_before_a_buffer_is_made(monkeypatch):
    monkeypatch.setattr(frames, "room_for", lambda size: pytest.fail(f"{size} bytes were asked for"))
    with pytest.raises(ProtocolError, match="declared: this run's settings allow 100"):
        Assembler(100).add(struct.pack("<BQQ", frames.PIECE, 101, 0))


def test_pieces_in_another_order_are_refused():
    first, second, third = pieces(message_of(2 * frames.PIECE_BYTES + 1))
    for order in ([second], [first, third], [first, first], [first, second, second]):
        assembler = Assembler(MANY)
        for piece in order[:-1]:
            assembler.add(piece)
        with pytest.raises(ProtocolError, match="piece"):
            assembler.add(order[-1])


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reader_of_frames(data):
    for read in (Assembler(1000).add, read_control):
        with contextlib.suppress(ProtocolError):
            read(data)


def test_a_control_frame_says_what_was_put_in():
    assert read_control(control("begin", attempt=3, digest=None)) == {"kind": "begin", "attempt": 3, "digest": None}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sampler": "neighbor", "prefetch": 16},
        {"sampler": "neighbor", "prefetch": 0, "labels": "b"},
        {"aggregation": "concat", "precision": "fp64"},
        {"labels": "b", "precision": "int8"},
        {"backward": "joint", "num_local_steps": 1, "precision": "bf16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [5, 8192])
def test_no_message_of_a_run_is_longer_than_its_limit(keys, rows, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", rows)
    config, parties = tiny(**keys)
    limits = Limits(config, parties[0].num_nodes, 3, 3)
    lengths = []

    def carry(message):
        content = encode(message)
        size, limit = len(content), limits.of(type(message), message.key)
        assert size <= limit <= limits.largest
        limits.check(read_header(content, size), size)
        lengths.append(size / limit)
        return message

    simulate(parties, config, carry=carry)
    assert max(lengths) > 0.5  # not just any large number
    assert limits.largest < 10_000


@pytest.mark.parametrize(("phase", "chunk", "most"), [(Phase.SAMPLING, 0, 18), (Phase.TRAINING, 1, 1)])
def test_a_message_of_more_sections_than_it_can_have_is_refused_by_its_header(phase, chunk, most):
    config, _ = tiny(sampler="neighbor", prefetch=16)
    limits = Limits(config, 10**6, 3, 3)
    head = Head(Partial, key(1, phase=phase, chunk=chunk), most, 1000)
    limits.check(head, 1000)
    with pytest.raises(ProtocolError, match=f"expected at most {most} sections, got {most + 1}"):
        limits.check(head._replace(sections=most + 1), 1000)


@given(st.sets(st.integers(0, 499), max_size=500))
def test_a_set_of_ids_below_n_has_n_bytes_at_most(nodes):
    assert len(ids.encode(np.array(sorted(nodes), np.int64))) <= 500


def test_a_message_is_new_once():
    receipts = Receipts()
    assert receipts.take(key(1), b"digest")
    assert not receipts.take(key(1), b"digest")
    assert receipts.take(key(1, layer=2), b"digest")


def test_another_content_under_one_key_stops_the_run_and_names_both_digests():
    receipts = Receipts()
    receipts.take(key(1), b"\1" * 32)
    with pytest.raises(ProtocolError, match=f"{'01' * 32} and {'02' * 32}"):
        receipts.take(key(1), b"\2" * 32)
    assert not receipts.take(key(1), b"\1" * 32)  # the state has not changed


def test_a_repeat_is_answered_from_memory_until_the_answer_has_arrived():
    receipts = Receipts()
    receipts.take(key(1), b"digest")
    assert receipts.answer(key(1)) is None
    receipts.answered(key(1), [b"answer"])
    assert receipts.answer(key(1)) == [b"answer"]
    receipts.received(key(1).pack())
    assert receipts.answer(key(1)) is None
    assert not receipts.take(key(1), b"digest")


def test_a_repeat_is_answered_once_on_each_stream():
    receipts = Receipts()
    receipts.take(key(1), b"digest")
    assert not receipts.repeated(key(1))
    receipts.answered(key(1), [b"answer"])
    assert not receipts.repeated(key(1))  # it is on its way
    for _ in range(2):
        receipts.begin_stream()
        assert receipts.repeated(key(1)) == [b"answer"]
        assert not receipts.repeated(key(1))


def test_the_present_and_the_previous_phase_are_remembered_and_no_other():
    receipts = Receipts()
    for round_index in range(5):
        for layer in (1, 3):
            receipts.take(key(round_index, layer=layer), b"digest")
            receipts.answered(key(round_index, layer=layer), [b"answer"])
    known = [index for index in range(5) if receipts.answer(key(index, layer=3)) is not None]
    assert known == [3, 4]


def test_answers_are_under_way_until_a_receipt_or_the_next_exchange_says_that_they_have_arrived():
    receipts = Receipts()
    for chunk in range(3):
        receipts.take(key(1, chunk=chunk), b"digest")
        receipts.answered(key(1, chunk=chunk), [bytes(100), bytes(20)])
    assert receipts.under_way == 360
    receipts.received(key(1, chunk=1).pack())
    receipts.received(key(1, chunk=1).pack())
    assert receipts.under_way == 240
    receipts.take(key(1, layer=1), b"digest")
    assert receipts.under_way == 0
    assert receipts.answer(key(1, chunk=2)) is not None


def test_of_large_answers_those_are_forgotten_first_that_have_arrived():
    receipts, large = Receipts(), [bytes(ROOM // 2)]
    for layer in range(4):
        receipts.take(key(1, layer=layer), b"digest")
        receipts.answered(key(1, layer=layer), large)
    assert [receipts.answer(key(1, layer=layer)) is not None for layer in range(4)] == [False, False, True, True]
    for chunk in range(1, 4):  # none of these has arrived for certain: all are kept, and nothing more is collected
        receipts.take(key(1, layer=3, chunk=chunk), b"digest")
        receipts.answered(key(1, layer=3, chunk=chunk), large)
    assert receipts.answer(key(1, layer=2)) is None
    assert all(receipts.answer(key(1, layer=3, chunk=chunk)) for chunk in range(4))
    assert receipts.under_way == 4 * len(large[0])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=30))
def test_receipts_agree_with_a_plain_model(sequence):
    """The model keeps everything; what it keeps of the last two rounds is what the receipts know."""
    receipts, seen, order = Receipts(), {}, []
    for round_index, content in sequence:
        remembered = round_index in order[-2:]
        try:
            new = receipts.take(key(round_index), bytes([content]))
        except ProtocolError:
            assert remembered
            assert seen[round_index] != content
            return
        assert new == (not remembered)
        if new:
            order.append(round_index)
            seen[round_index] = content
