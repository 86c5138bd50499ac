from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from glasu.randomness import (
    EVERYONE,
    Stream,
    draw_distinct,
    draw_smallest,
    draw_words,
    find_members,
    scale_words,
    split_key,
)

STREAM = Stream(7, "neighbors", round=3, step=2, layer=1, client=0)
KEY = 246358335422138557279996904055706715348
NUMBERS = [495, 697, 712, 640]
PLAIN_KEY = 276110587376590200732264040013306161099
PROGRAM = """
from glasu.randomness import Stream
stream = Stream(7, "neighbors", round=3, step=2, layer=1, client=0)
print(stream.key(), stream.torch_seed(), stream.numpy().integers(0, 1000, 4).tolist())
"""


# Streams


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"purpose": "batch"}, {"round": 4}, {"step": 3}, {"layer": 2}, {"client": 1}]
)
def test_streams_differ_in_every_field(change):
    other = STREAM._replace(**change)
    assert other.key() != STREAM.key()
    assert other.torch_seed() != STREAM.torch_seed()
    assert not np.array_equal(other.numpy().random(8), STREAM.numpy().random(8))


def test_no_two_of_many_streams_have_one_key():
    fields = itertools.product((0, 1, 2), ("a", "ab"), range(-1, 3), range(3), range(-1, 3), (EVERYONE, 0, 1))
    keys = [Stream(*values).key() for values in fields]
    assert len(set(keys)) == len(keys) == 3 * 2 * 4 * 3 * 4 * 3


def test_a_stream_starts_anew_whenever_it_is_asked_for():
    np.testing.assert_array_equal(STREAM.numpy().random(8), STREAM.numpy().random(8))


def test_the_numbers_of_a_stream_are_pinned():
    assert STREAM.key() == KEY
    assert STREAM.torch_seed() == KEY >> 65
    assert STREAM.numpy().integers(0, 1000, 4).tolist() == NUMBERS
    assert Stream(0, "weights").key() == PLAIN_KEY


def test_another_process_draws_the_same_numbers():
    finished = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == f"{KEY} {KEY >> 65} {NUMBERS}"


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_the_seed_for_torch_is_one_that_torch_accepts(seed, round_index):
    assert 0 <= Stream(seed, "weights", round=round_index).torch_seed() < 2**63


# Words


def mix_bits(value: int) -> int:
    """Return the finaliser of SplitMix64, in Python's integers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@given(st.integers(0, 2**128 - 1), st.integers(0, 2**63 - 1))
def test_a_word_is_the_documented_function_of_key_and_counter(key, counter):
    low, high = split_key(key)
    assert int(low) + (int(high) << 64) == key
    expected = mix_bits(mix_bits((int(low) + counter * 0x9E3779B97F4A7C15) % 2**64) ^ int(high))
    assert draw_words(low, high, np.array([counter])).tolist() == [expected]


def test_a_stream_has_the_halves_of_its_key():
    for stream in (Stream(0, "dropout", round=3, layer=2), Stream(1, "batch")):
        assert stream.key_halves() == split_key(stream.key())


def test_words_at_different_counters_differ_and_so_do_those_of_keys_that_differ_in_one_bit():
    found = draw_words(*split_key(KEY), np.arange(10_000))
    assert len(np.unique(found)) == 10_000
    for bit in range(0, 128, 7):
        other = draw_words(*split_key(KEY ^ (1 << bit)), np.arange(10_000))
        assert not np.isin(other, found).any()
        flipped = np.bitwise_count(found ^ other)
        assert abs(flipped.mean() - 32) < 0.3  # half of the bits, within seven standard errors


def test_every_bit_of_a_word_is_fair_and_successive_words_are_independent():
    found = draw_words(*split_key(KEY), np.arange(20_000))
    bits = (found[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / 20_000**0.5
    pairs = np.bincount((found[:-1] >> np.uint64(60)) * 16 + (found[1:] >> np.uint64(60)), minlength=256)
    assert chisquare(pairs).pvalue > 1e-4


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 2**52))
def test_a_word_becomes_a_number_below_its_bound(values, bound):
    found = scale_words(np.array([*values, 2**64 - 1, 0], np.uint64), bound)
    assert (found >= 0).all()
    assert (found < bound).all()
    assert (found[-2], found[-1]) == (bound - 1, 0)


def test_every_part_of_the_candidates_is_chosen_equally_often():
    candidates, possible = np.array([3, 8, 9, 20, 21]), list(itertools.combinations([3, 8, 9, 20, 21], 2))
    keys = (split_key(Stream(1, "x", round=index).key()) for index in range(2000))
    counts = Counter(tuple(draw_smallest(candidates, 2, *key).tolist()) for key in keys)
    assert chisquare([counts[pair] for pair in possible]).pvalue > 1e-4


# Distinct numbers


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, np.ndarray, int]:
    population = draw(st.one_of(st.integers(0, 30), st.integers(100, 10_000)))
    excluded = draw(st.sets(st.integers(0, max(0, population - 1)), max_size=min(population, 20)))
    excluded = excluded if population else set()
    count = draw(st.integers(0, min(population - len(excluded), 200)))
    return population, count, np.array(sorted(excluded), np.int64), draw(st.integers(0, 100))


@settings(deadline=None, max_examples=300)
@given(requests())
def test_drawn_numbers_are_sorted_distinct_in_range_and_not_excluded(request_):
    population, count, excluded, seed = request_
    drawn = draw_distinct(seed, population, count, excluded)
    assert len(drawn) == count
    assert (np.diff(drawn) > 0).all()
    assert drawn.dtype == np.int64
    assert not count or (drawn[0] >= 0 and drawn[-1] < population)
    assert not np.isin(drawn, excluded).any()


@pytest.mark.parametrize(
    ("population", "count", "excluded"),
    [(5, 2, []), (6, 3, [1, 4]), (5, 5, []), (30, 2, []), (40, 2, [0, 7, 39]), (25, 1, [3])],
    ids=["dense", "dense without some", "dense, all", "sparse", "sparse without some", "sparse, one"],
)
def test_every_subset_is_drawn_equally_often(population, count, excluded):
    possible = list(itertools.combinations(sorted(set(range(population)) - set(excluded)), count))
    draws, excluded = 6 * len(possible) + 500, np.array(excluded, np.int64)
    counts = Counter(
        tuple(draw_distinct(Stream(1, "x", round=index).key(), population, count, excluded).tolist())
        for index in range(draws)
    )
    assert set(counts) <= set(possible)
    if len(possible) > 1:
        assert chisquare([counts[subset] for subset in possible]).pvalue > 1e-4


def test_more_numbers_than_there_are_cannot_be_drawn():
    with pytest.raises(ValueError, match="cannot draw 3 distinct numbers out of 2"):
        draw_distinct(0, 4, 3, np.array([0, 1]))


def test_drawing_few_of_a_billion_numbers_needs_little_memory():
    tracemalloc.start()
    try:
        assert len(draw_distinct(0, 10**9, 1000, np.arange(1000))) == 1000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@settings(deadline=None)
@given(st.sets(st.integers(-5, 20)), st.lists(st.integers(-10, 30), max_size=20))
def test_contains_says_what_isin_says(members, asked):
    sorted_ids, ids = np.array(sorted(members), np.int64), np.array(asked, np.int64)
    np.testing.assert_array_equal(find_members(sorted_ids, ids), np.isin(ids, sorted_ids))
