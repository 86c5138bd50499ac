"""Infer edges from node sets: nodes that are proposed together more often than by chance are neighbours.

If a client adds a node v to the targets T, then v has an edge to some u in T. For each pair, the attacker compares two
rates: how often v was drawn while u was a target, and how often v was drawn in all rounds (its base rate). Rounds in
which v itself was a target do not count. The attacker computes the logarithm of the likelihood ratio

    C log(r / b) + (E - C) log((1 - r) / (1 - b)),   r = C / E > b

E is the number of rounds in which u was a target and v was not. C is the number of these rounds in which v was drawn. b
is the base rate. If the attacker does not know the targets, it takes the drawn nodes as targets: E is the number of
rounds in which u was drawn, C the number of rounds in which both were drawn, and b the share of rounds in which v was
drawn. The logarithms for both directions and for all layers are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

NodeIds = NDArray[np.int64]
Ratios = NDArray[np.float64]
SMALL = 1e-6


class Draws(NamedTuple):
    """The node sets of one layer, one pair of sets per round."""

    targets: Sequence[NodeIds] | None  # S[l+1]; None: the attacker does not know them
    drawn: Sequence[NodeIds]  # S_m[l], or the union of all clients


def rank_pairs(layers: Iterable[Draws], num_nodes: int) -> NodeIds:
    """Return pairs u < v as u * N + v, the most likely edge first. Pairs that never occurred together are omitted."""
    codes: list[NodeIds] = []
    scores: list[Ratios] = []
    for draws in layers:
        first, second, ratio = _score_layer(draws, num_nodes)
        codes.append(np.minimum(first, second) * num_nodes + np.maximum(first, second))
        scores.append(ratio)
    if not codes:
        return np.empty(0, np.int64)
    pairs, place = np.unique(np.concatenate(codes), return_inverse=True)
    total = np.bincount(place, np.concatenate(scores), len(pairs))
    return pairs[np.argsort(-total, kind="stable")]


def _score_layer(draws: Draws, num_nodes: int) -> tuple[NodeIds, NodeIds, Ratios]:
    """Return the ordered pairs (u, v) of a layer that occurred together, and their likelihood ratios."""
    rounds = len(draws.drawn)
    if draws.targets is None:
        targets = drawn = _mark(draws.drawn, num_nodes)
    else:
        targets = _mark(draws.targets, num_nodes)
        added = [np.setdiff1d(own, known) for own, known in zip(draws.drawn, draws.targets, strict=True)]
        drawn = _mark(added, num_nodes)
    together = (targets.T @ drawn).tocoo()
    apart = together.row != together.col
    first, second = together.row[apart].astype(np.int64), together.col[apart].astype(np.int64)
    count = together.data[apart].astype(np.float64)
    as_target, as_drawn = (np.asarray(marks.sum(axis=0)).ravel().astype(np.float64) for marks in (targets, drawn))
    exposed, base = as_target[first], as_drawn[second] / max(1, rounds)
    if draws.targets is not None:  # a target cannot be drawn
        exposed = exposed - np.asarray((targets.T @ targets).tocsr()[first, second]).ravel()
        base = as_drawn[second] / np.maximum(1, rounds - as_target[second])
    rate, base = np.clip(count / np.maximum(1, exposed), SMALL, 1 - SMALL), np.clip(base, SMALL, 1 - SMALL)
    ratio = count * np.log(rate / base) + (exposed - count) * np.log((1 - rate) / (1 - base))
    return first, second, np.where(rate > base, ratio, 0.0)


def _mark(sets: Sequence[NodeIds], num_nodes: int) -> sp.csr_array:
    """Return the sets as the rows of a 0-1 matrix."""
    ends = np.cumsum([0, *map(len, sets)])
    nodes = np.concatenate([*sets, np.empty(0, np.int64)]).astype(np.int64)
    return sp.csr_array((np.ones(len(nodes), np.float32), nodes, ends), (len(sets), num_nodes))


def encode_edges(source: NodeIds, target: NodeIds, num_nodes: int) -> NodeIds:
    """Return undirected edges as sorted numbers u * N + v with u < v."""
    low, high = np.minimum(source, target).astype(np.int64), np.maximum(source, target).astype(np.int64)
    return np.unique((low * num_nodes + high)[low < high])


def measure_edge_share(ranked: NodeIds, edges: NodeIds) -> float:
    """Return the share of the edges that are among the first E guesses, where E is the number of edges."""
    return float(np.isin(ranked[: len(edges)], edges).sum() / max(1, len(edges)))


def put_first(own: NodeIds, ranked: NodeIds) -> NodeIds:
    """Return the attacker's own edges, then the ranked pairs that are not among them."""
    return np.concatenate([own, ranked[~np.isin(ranked, own)]])
