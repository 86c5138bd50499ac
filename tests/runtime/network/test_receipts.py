"""Frames and receipts: pieces fit together, sizes are checked before they are allocated, nothing is taken twice."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasu.errors import ProtocolError
from glasu.keys import Key, Phase
from glasu.runtime.network import frames
from glasu.runtime.network.frames import Assembler, control, largest_message, pieces, read_control
from glasu.runtime.network.receipts import Receipts
from glasu.runtime.simulation import simulate
from glasu.runtime.wire import encode
from runtime.network.test_runs import tiny

MANY = 1 << 40


@pytest.mark.parametrize("size", [0, 1, frames.PIECE_BYTES - 1, frames.PIECE_BYTES, 2 * frames.PIECE_BYTES + 5])
def test_a_message_put_together_from_its_pieces_is_the_message(size):
    message = random.Random(0).randbytes(size)
    found = list(pieces(message))
    assembler = Assembler(size)
    wholes = [assembler.add(piece) for piece in found]
    assert wholes == [None] * (len(found) - 1) + [message]
    assert all(len(piece) <= frames.MAX_FRAME for piece in found)
    assert assembler.add(next(pieces(b""))) == b""  # ready for the next


@pytest.mark.parametrize(
    ("total", "offset", "size"), [(MANY, 0, 10), (11, 0, 11), (10, 1, 5), (10, 0, 11), (10, 2**63, 1), (10, 0, 0)]
)
def test_a_piece_that_does_not_fit_is_refused(total, offset, size):
    frame = struct.pack("<BQQ", frames.PIECE, total, offset) + bytes(size)
    with pytest.raises(ProtocolError):
        Assembler(10).add(frame)


def test_a_message_that_is_too_long_is_refused_before_a_buffer_is_made(monkeypatch):
    monkeypatch.setattr(frames, "bytearray", lambda size: pytest.fail(f"{size} bytes were asked for"), raising=False)
    with pytest.raises(ProtocolError, match="declared: this run's settings allow 100"):
        Assembler(100).add(struct.pack("<BQQ", frames.PIECE, 101, 0))


def test_pieces_in_another_order_are_refused():
    first, second, third = pieces(bytes(2 * frames.PIECE_BYTES + 1))
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
    [{}, {"sampler": "neighbor", "prefetch": 16}, {"aggregation": "concat", "precision": "fp64"}, {"labels": "b"}],
    ids=str,
)
def test_no_message_of_a_run_is_longer_than_its_limit(keys):
    config, parties = tiny(**keys)
    limit = largest_message(config, parties[0].num_nodes, 3, 3)
    sizes = []

    def carry(message):
        sizes.append(len(encode(message)))
        return message

    simulate(parties, config, carry=carry)
    assert max(sizes) <= limit
    assert limit < 60_000


def key(round_index, *, phase=Phase.TRAINING, layer=0, chunk=0):
    return Key(run=bytes(12), phase=phase, client=1, round=round_index, layer=layer, chunk=chunk)


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
    receipts.answered(key(1), b"answer")
    assert receipts.answer(key(1)) == b"answer"
    receipts.received(key(1).pack())
    assert receipts.answer(key(1)) is None
    assert not receipts.take(key(1), b"digest")


def test_the_present_and_the_previous_phase_are_remembered_and_no_other():
    receipts = Receipts()
    for round_index in range(5):
        for layer in (1, 3):
            receipts.take(key(round_index, layer=layer), b"digest")
            receipts.answered(key(round_index, layer=layer), b"answer")
    known = [index for index in range(5) if receipts.answer(key(index, layer=3)) is not None]
    assert known == [3, 4]


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
