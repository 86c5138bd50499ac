"""Counter-based randomness: every draw is a function of (seed, purpose, round, step, layer, client).

There is no generator state to save or to share: a crashed client that computes a round again draws the same
numbers, and the order in which clients run cannot change a bit.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

EVERYONE = -1  # the client index of draws that all clients share


@dataclass(frozen=True)
class Stream:
    """One independent source of random numbers, named by what it is for."""

    seed: int
    purpose: str
    round: int = 0
    step: int = 0
    layer: int = 0
    client: int = EVERYONE

    def key(self) -> int:
        """Return the 128-bit key of this stream's Philox generator."""
        counters = struct.pack("<5q", self.seed, self.round, self.step, self.layer, self.client)
        digest = hashlib.blake2b(counters + self.purpose.encode(), digest_size=16).digest()
        return int.from_bytes(digest, "little")

    def numpy(self) -> np.random.Generator:
        """Return a fresh numpy generator at the start of this stream."""
        return np.random.Generator(np.random.Philox(key=self.key()))

    def torch_seed(self) -> int:
        """Return a seed for torch's generators: a non-negative 63-bit integer."""
        return self.key() >> 65


def draw_distinct(
    rng: np.random.Generator, population: int, count: int, excluded: np.ndarray | None = None
) -> np.ndarray:
    """Draw `count` distinct numbers below `population`, uniformly, in O(count) unless most of them are asked for.

    Args:
        rng: where the randomness comes from.
        population: the numbers to draw from are 0..population-1 ...
        count: how many to draw; at most the size of what is left.
        excluded: ... without these, sorted and distinct.

    Returns:
        The drawn numbers, sorted, int64.
    """
    excluded = np.empty(0, np.int64) if excluded is None else excluded
    available = population - len(excluded)
    if count > available:
        raise ValueError(f"cannot draw {count} distinct numbers out of {available}")
    if 3 * (count + len(excluded)) >= population:  # dense: listing what is left costs no more than the answer
        left = np.ones(population, bool)
        left[excluded] = False
        return np.sort(rng.permutation(np.flatnonzero(left))[:count])
    drawn = np.empty(0, np.int64)
    # sparse: draw again what is excluded or came twice; keeping the first of each is unbiased
    while len(drawn) < count:
        fresh = rng.integers(0, population, size=2 * (count - len(drawn)) + 8)
        fresh = fresh[~contains(excluded, fresh)]
        merged = np.concatenate([drawn, fresh])
        _, first = np.unique(merged, return_index=True)
        drawn = merged[np.sort(first)][:count]
    return np.sort(drawn)


def contains(sorted_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Tell for each of `ids` whether it stands in the sorted array `sorted_ids`."""
    if len(sorted_ids) == 0:
        return np.zeros(len(ids), bool)
    position = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return np.asarray(sorted_ids[position] == ids)
