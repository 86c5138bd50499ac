"""Integers in a ring: sums under masks are exact, and as long as the precision says."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glasu.wire.encodings import make_encodings
from glasu.wire.ring import Ring
from glasu.wire.tensor_kinds import GRADIENT, PROBABILITIES, REPRESENTATION
from support.masks import key_of, make_masks, use_masks
from support.tiny import tiny

quick = settings(deadline=None, max_examples=60)


@st.composite
def contributions(draw):
    """Return a ring, the clients that contribute, and one matrix of integers for each of them."""
    bits, num_clients = draw(st.sampled_from([8, 16, 32])), draw(st.integers(2, 6))
    ring = Ring(bits, num_clients)
    present = tuple(sorted(draw(st.sets(st.integers(0, num_clients - 1), min_size=1))))
    shape = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    numbers = hnp.arrays(np.int64, shape, elements=st.integers(0, ring.levels - 1))
    return ring, present, [draw(numbers) for _ in present]


@quick
@given(contributions(), st.booleans(), st.integers(1, 5))
def test_the_server_adds_masked_integers_exactly_for_any_parties_and_chunks(case, blind, chunk_rows):
    ring, present, numbers = case
    masks = make_masks(ring.num_clients, present, blind=blind, chunk_rows=chunk_rows)
    reveal = masks[-1].prepare_reading(key_of(ring.num_clients - 1), numbers[0].shape, ring)
    payloads = [
        masks[client](ring.encode(own, key_of(client)), key_of(client))
        for client, own in zip(present, numbers, strict=True)
    ]
    assert all(ring.find_error(payload, numbers[0].shape[1]) == "" for payload in payloads)
    (total,) = ring.combine(payloads, 1, [key_of(0)])
    read = reveal(total, None)
    assert blind or read is total
    expected = [[sum(int(own[row, column]) for own in numbers) for column in range(numbers[0].shape[1])]
                for row in range(len(numbers[0]))]  # fmt: skip
    assert ring.decode(read).tolist() == expected


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2), ("int8", 1)])
def test_the_ring_is_as_wide_as_the_precision_and_scores_have_32_bits(precision, size):
    encodings = make_encodings(use_masks(tiny(precision=precision)[0]))
    assert {kind: encodings[kind].row_bytes(10) for kind in (REPRESENTATION, GRADIENT, PROBABILITIES)} == {
        REPRESENTATION: 10 * size,
        GRADIENT: 10 * size,
        PROBABILITIES: 40,
    }


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("num_clients", [2, 3, 15])
def test_the_greatest_sum_does_not_wrap_around(bits, num_clients):
    ring = Ring(bits, num_clients)
    assert num_clients * (ring.levels - 1) < 2**bits
    assert ring.levels == (2**bits - 1) // num_clients
