"""Counter-based randomness: every draw is a function of (seed, purpose, round, step, layer, client).

The seed is `train.seed`, which is public, or a `Secret` that only one party knows.

There is no generator state to save or to share. A restarted client that repeats a round draws the same numbers, and
the order in which clients run does not change any bit.

Small draws, and draws in compiled loops, use words of a 64-bit hash:

    word(key, i) = mix(mix(low + i * GOLDEN) ^ high)    modulo 2^64, for key = high * 2^64 + low

`mix` is the finaliser of SplitMix64 (Steele, Lea and Flood 2014). For one key, the word is a bijection of i. Words at
distinct counters are distinct, so sorting items by their words gives a uniform random order without ties.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from glasu.secret import Secret

TORCH_GENERATOR = threading.Lock()  # held while torch's global generator is seeded and weights are drawn from it
EVERYONE = -1  # the client index of draws that all clients share
_COUNTERS = struct.Struct("<5q")


class Stream(NamedTuple):
    """One independent source of random numbers, named by its purpose."""

    seed: int | Secret
    purpose: str
    round: int = 0
    step: int = 0
    layer: int = 0
    client: int = EVERYONE

    def _digest(self) -> bytes:
        number, key = (0, self.seed.value) if isinstance(self.seed, Secret) else (self.seed, b"")
        counters = _COUNTERS.pack(number, self.round, self.step, self.layer, self.client)
        return hashlib.blake2b(counters + self.purpose.encode(), digest_size=16, key=key).digest()

    def key(self) -> int:
        """Return the 128-bit key of this stream."""
        return int.from_bytes(self._digest(), "little")

    def key_halves(self) -> tuple[np.uint64, np.uint64]:
        """Return the low and the high 64 bits of the key."""
        low, high = np.frombuffer(self._digest(), "<u8")
        return low, high

    def numpy(self) -> np.random.Generator:
        """Return a fresh numpy generator (Philox) at the start of this stream."""
        return np.random.Generator(np.random.Philox(key=self.key()))

    def torch_seed(self) -> int:
        """Return a seed for torch's generators: a non-negative 63-bit integer. `model.seeding` sets their state."""
        return self.key() >> 65


GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # the factors of SplitMix64
SPARSE = 3  # a draw is sparse, and repeats are rare, if population > SPARSE * (drawn and excluded numbers)


def split_key(key: int) -> tuple[np.uint64, np.uint64]:
    """Return the low and the high 64 bits of a key."""
    return np.uint64(key & 0xFFFFFFFFFFFFFFFF), np.uint64(key >> 64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * FIRST
    values = (values ^ (values >> np.uint64(27))) * SECOND
    return values ^ (values >> np.uint64(31))


def draw_words(low: np.uint64, high: np.uint64, counters: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return the random words of a key at an array of counters."""
    return _mix(_mix(low + counters.astype(np.uint64) * GOLDEN) ^ high)


def scale_words(words: NDArray[np.uint64], bounds: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Map each word to an integer in 0..bound-1, uniformly up to a relative error of 2^-53 * bound."""
    return np.asarray((words >> np.uint64(11)) * 2.0**-53 * bounds).astype(np.int64)


def draw_smallest(candidates: NDArray[np.int64], count: int, low: np.uint64, high: np.uint64) -> NDArray[np.int64]:
    """Draw `count` of the distinct candidates uniformly: take those with the smallest words, and sort them."""
    if count >= len(candidates):
        return np.sort(candidates)
    return np.sort(candidates[np.argpartition(draw_words(low, high, candidates), count)[:count]])


def draw_distinct(
    key: int, population: int, count: int, excluded: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Draw `count` distinct numbers in 0..population-1, uniformly. A sparse draw takes O(count) time.

    Args:
        key: the key of the stream.
        population: the numbers are 0..population-1.
        count: how many to draw; at most population - len(excluded).
        excluded: numbers that are not drawn, sorted and distinct.

    Returns:
        The drawn numbers, sorted, int64.
    """
    low, high = split_key(key)
    excluded = np.empty(0, np.int64) if excluded is None else excluded
    available = population - len(excluded)
    if count > available:
        raise ValueError(f"cannot draw {count} distinct numbers out of {available}")
    if SPARSE * (count + len(excluded)) >= population:  # dense: list all candidates
        left = np.ones(population, bool)
        left[excluded] = False
        return draw_smallest(np.flatnonzero(left), count, low, high)
    # sparse: draw with replacement, and skip excluded and repeated numbers in the order of the counters
    drawn, counter = np.empty(0, np.int64), 0
    while len(drawn) < count:
        more = 2 * (count - len(drawn)) + 8
        fresh = scale_words(draw_words(low, high, np.arange(counter, counter + more)), population)
        counter += more
        merged = np.concatenate([drawn, fresh[~find_members(excluded, fresh)]])
        _, first = np.unique(merged, return_index=True)
        drawn = merged[np.sort(first)][:count]
    return np.sort(drawn)


def find_members(sorted_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return a mask: whether each of `ids` is in the sorted array `sorted_ids`."""
    if len(sorted_ids) == 0:
        return np.zeros(len(ids), bool)
    position = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return np.asarray(sorted_ids[position] == ids)
