"""Node sets as bytes: lossless, one encoding per set, and a ProtocolError for any other bytes."""

from __future__ import annotations

import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from glasu.errors import ProtocolError
from glasu.wire import ids
from glasu.wire.ids import LARGEST, decode, encode, is_increasing, measure_encoded

quick = settings(deadline=None, max_examples=200)
EDGES = [0, 1, 126, 127, 128, 129, 2**14 - 1, 2**14, 2**21 - 1, 2**21, 2**28 - 1, 2**28, LARGEST - 1, LARGEST]
node_sets = st.sets(st.one_of(st.sampled_from(EDGES), st.integers(0, 500), st.integers(0, LARGEST)), max_size=60).map(
    lambda nodes: np.array(sorted(nodes), np.int32)
)


def by_hand(nodes: list[int]) -> bytes:
    """Write the gaps one by one, as the module's docstring specifies."""
    result, before = bytearray(), -1
    for node in nodes:
        gap, before = node - before - 1, node
        while gap >= 128:
            result.append(gap % 128 + 128)
            gap //= 128
        result.append(gap)
    return bytes(result)


def decode_bytes(data: bytes) -> np.ndarray:
    return decode(np.frombuffer(data, np.uint8))


@quick
@given(node_sets)
@example(np.array([], np.int32))
@example(np.array(EDGES, np.int32))
def test_a_decoded_node_set_is_the_encoded_one(nodes):
    data = encode(nodes)
    assert data.dtype == np.uint8
    assert data.tobytes() == by_hand(nodes.tolist())
    assert measure_encoded(nodes) == len(data)
    again = decode(data)
    assert again.dtype == np.int32
    np.testing.assert_array_equal(again, nodes)


@quick
@given(st.sets(st.integers(0, 499)))
def test_a_set_of_ids_below_n_takes_n_bytes_at_most(nodes):
    assert measure_encoded(np.array(sorted(nodes), np.int32)) <= 500


def test_the_example_of_the_docstring():
    assert encode(np.array([3, 4, 200])).tobytes().hex() == "0300c301"


@pytest.mark.parametrize("nodes", [[5, 5], [5, 4], [-1], [-1, 3], [0, LARGEST + 1], [3, 1, 2]])
def test_only_distinct_rising_ids_in_range_can_be_encoded(nodes):
    for function in (encode, measure_encoded):
        with pytest.raises(ProtocolError, match="must contain increasing ids"):
            function(np.array(nodes, np.int64))
    assert is_increasing(np.array(nodes)) == (sorted(set(nodes)) == nodes)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32])
def test_ids_may_have_any_integer_type_that_holds_them(kind):
    nodes = np.array([7, 8, 1000], kind)
    assert encode(nodes).tobytes() == by_hand([7, 8, 1000])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("80", "ends inside an id"),
        ("05ff", "ends inside an id"),
        ("8000", "longer than necessary"),
        ("05808000", "longer than necessary"),
        ("808080808001", "6 bytes"),
        ("80808080808080808080808080808001", "16 bytes"),
        ("8080808008", "gap of 2147483648"),  # 2^31
        ("ffffffff7f", "gap of 34359738367"),  # 2^35 - 1
        ("ffffffff0700", "id 2147483648"),  # LARGEST, then the next
        ("feffffff070000", "id 2147483648"),
        ("ffffffff07ffffffff07", "id 4294967295"),
    ],
)
def test_bytes_that_stand_for_no_node_set_are_refused(data, reason):
    with pytest.raises(ProtocolError, match=reason):
        decode_bytes(bytes.fromhex(data))


@settings(deadline=None, max_examples=1000)
@given(st.one_of(st.binary(max_size=40), st.lists(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]), max_size=40).map(bytes)))
def test_any_bytes_are_refused_or_are_the_one_encoding_of_a_rising_set(data):
    try:
        nodes = decode_bytes(data)
    except ProtocolError:
        return
    assert is_increasing(nodes)
    assert len(nodes) <= len(data)  # never more than one id per byte
    assert encode(nodes).tobytes() == data


@quick
@given(st.one_of(node_sets.map(lambda nodes: by_hand(nodes.tolist())), st.binary(max_size=40)), st.integers(6, 12))
def test_the_number_of_bytes_per_read_does_not_matter(data, at_once):
    def outcome(**keys):
        try:
            return decode(np.frombuffer(data, np.uint8), **keys).tolist()
        except ProtocolError as error:
            return str(error)

    found, whole = outcome(at_once=at_once), outcome()
    assert type(found) is type(whole)
    assert isinstance(found, str) or found == whole


@pytest.mark.parametrize("value", [0x00, 0x7F, 0x80, 0xFF])
def test_memory_is_a_small_multiple_of_the_received_bytes(value):
    data = np.full(4_000_000, value, np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) if value >= 0x80 else nullcontext():
            decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(data) + 60 * ids.AT_ONCE  # four bytes per id, one to count them, and what is at hand


def test_ids_of_a_sampled_set_take_little_more_than_a_byte():
    nodes = np.sort(np.random.default_rng(0).choice(233_000, 5000, replace=False))
    assert measure_encoded(nodes) < 1.4 * len(nodes)
