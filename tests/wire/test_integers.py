"""Integers on a common grid: they take few bits, and their sum is exact."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glasu.wire.integers import Integers
from glasu.wire.message_key import Key, Phase
from glasu.wire.packing import pack_integers, unpack_integers

KEY = Key(run=bytes(12), phase=Phase.TRAINING, client=1, round=3, layer=1)
quick = settings(deadline=None, max_examples=100)


def read_row(row, width, bits):
    """Return the integers of one packed row, by plain arithmetic on one long integer."""
    whole = int.from_bytes(row.tobytes(), "little")
    return [whole >> (bits * place) & ((1 << bits) - 1) for place in range(width)], whole >> (bits * width)


@st.composite
def clients_integers(draw):
    """Return an encoding and one matrix of integers per client."""
    clients, bits, width, rows = (draw(st.integers(*ends)) for ends in ((1, 9), (2, 32), (1, 9), (0, 5)))
    encoding = Integers(width, bits, clients)
    numbers = hnp.arrays(np.int64, (rows, width), elements=st.integers(-encoding.largest, encoding.largest))
    return encoding, [draw(numbers) for _ in range(clients)]


@quick
@given(clients_integers())
def test_the_server_adds_the_integers_of_any_number_of_clients_exactly(case):
    encoding, numbers = case
    payloads = [encoding.encode(each, KEY) for each in numbers]
    for each, payload in zip(numbers, payloads, strict=True):
        assert encoding.find_error(payload, encoding.width) == ""
        np.testing.assert_array_equal(encoding.decode(payload), each)
    (answer,) = encoding.combine(payloads, len(payloads), [KEY])
    assert encoding.answer.find_error(answer, encoding.width) == ""
    expected = [
        [sum(int(each[row, column]) for each in numbers) for column in range(encoding.width)]
        for row in range(len(numbers[0]))
    ]
    assert encoding.answer.decode(answer).tolist() == expected


@quick
@given(st.integers(1, 36), st.integers(1, 9), st.integers(0, 4), st.randoms(use_true_random=False))
def test_packed_integers_follow_each_other_without_gaps(bits, columns, rows, random):
    numbers = [[random.getrandbits(bits) for _ in range(columns)] for _ in range(rows)]
    packed = pack_integers(np.array(numbers, np.int64).reshape(rows, columns), bits)
    assert packed.shape == (rows, -(-bits * columns // 8))
    assert [read_row(row, columns, bits) for row in packed] == [(row, 0) for row in numbers]
    assert unpack_integers(packed, columns, bits).tolist() == numbers


@pytest.mark.parametrize(
    ("bits", "clients", "sent", "answered"), [(2, 3, 2, 3), (3, 3, 3, 5), (4, 3, 4, 6), (4, 9, 4, 7), (8, 1, 8, 8)]
)
def test_a_sum_has_the_bits_that_its_values_need(bits, clients, sent, answered):
    encoding = Integers(16, bits, clients)
    assert (encoding.row_bytes(16), encoding.answer.row_bytes(16)) == (2 * sent, 2 * answered)
    payload = encoding.encode(np.ones((5, 16)), KEY)
    assert payload.nbytes == 5 * encoding.row_bytes(16)


def test_fewer_clients_than_usual_can_be_added():
    encoding = Integers(3, 4, 5)
    payloads = [encoding.encode(np.full((2, 3), value), KEY) for value in (-7, 2)]
    (answer,) = encoding.combine(payloads, 2, [KEY])
    np.testing.assert_array_equal(encoding.answer.decode(answer), np.full((2, 3), -5))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda payload: payload.astype(np.float32), "expected a matrix of u1, got a matrix of f4"),
        (lambda payload: payload[0], "expected a matrix of u1, got a vector"),
        (lambda payload: payload[:, :1], "expected rows of 2 bytes, got 1"),
        (lambda payload: np.hstack([payload, payload]), "expected rows of 2 bytes, got 4"),
        (lambda payload: payload | np.array([0, 0x10], np.uint8), "expected zeros at the end of a row"),
        (lambda payload: payload | np.array([0x0F, 0], np.uint8), r"expected integers of 0..14, got 15"),
    ],
)
def test_other_bytes_are_refused(change, reason):
    encoding = Integers(3, 4, 2)
    payload = encoding.encode(np.array([[1, -2, 3], [7, -7, 0]]), KEY)
    assert encoding.find_error(payload, 3) == ""
    assert reason in encoding.find_error(change(payload))
    assert encoding.find_error(payload, 4) == "expected 4 columns, got 3"
