"""A graph of any size whose classes show both in the features and in who is linked to whom."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from glasu.data.partition import WholeGraph
from glasu.data.party import Graph
from glasu.randomness import Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from glasu.config import RunConfig

HOMOPHILY = 0.7  # the share of edges drawn within a class; the rest do not look at classes
SEPARATION = 2.0  # how far class centres lie from the origin, where the noise has unit variance in every direction
CHUNK = 1 << 22  # edges drawn at a time, to keep temporary arrays small


def synthetic(config: RunConfig) -> WholeGraph:
    """Draw a stochastic block graph of the sizes in `config.data`, without splits.

    Time and memory are O(N d + E): 10 bytes per undirected edge while it is drawn, 8 once it is there.
    """
    data, rng = config.data, Stream(config.data_seed, "synthetic").numpy()
    labels = rng.integers(0, data.num_classes, data.num_nodes)
    features = rng.standard_normal((data.num_nodes, data.num_features), np.float32)
    centres = rng.standard_normal((data.num_classes, data.num_features), np.float32)
    centres *= SEPARATION / np.linalg.norm(centres, axis=1, keepdims=True)
    for label, centre in enumerate(centres):
        features[labels == label] += centre
    graph = _block_graph(labels, data.average_degree, rng)
    classes = tuple(str(label) for label in range(data.num_classes))
    return WholeGraph(np.arange(data.num_nodes), features, graph, labels, classes)


def _block_graph(labels: NDArray[np.int64], average_degree: float, rng: np.random.Generator) -> Graph:
    """Draw a symmetric graph with about N * average_degree directed edges."""
    nodes, sizes = len(labels), np.bincount(labels)
    wanted = nodes * average_degree / 2
    within = _draws(wanted * HOMOPHILY, float((sizes * (sizes - 1.0)).sum()) / 2)
    anywhere = _draws(wanted * (1 - HOMOPHILY), nodes * (nodes - 1.0) / 2)
    ends = np.empty((2, within + anywhere), np.int32)
    members, first = np.argsort(labels, kind="stable").astype(np.int32), np.cumsum(sizes) - sizes
    for start in range(0, ends.shape[1], CHUNK):
        source, target = ends[:, start : start + CHUNK]
        source[:] = rng.integers(0, nodes, len(source), np.int32)
        target[:] = rng.integers(0, nodes, len(source), np.int32)
        near = labels[source[: max(0, within - start)]]  # the first `within` edges stay in the source's class
        target[: len(near)] = members[first[near] + rng.integers(0, sizes[near])]
    ends = ends[:, ends[0] != ends[1]]
    rows, columns = np.concatenate([ends[0], ends[1]]), np.concatenate([ends[1], ends[0]])
    present = np.ones(len(rows), bool)
    adjacency = sp.coo_array((present, (rows, columns)), shape=(nodes, nodes)).tocsr()  # O(E); merges duplicates
    adjacency.sort_indices()
    return Graph(adjacency.indptr.astype(np.int64), adjacency.indices.astype(np.int32, copy=False))


def _draws(wanted: float, possible: float) -> int:
    """Return how many pairs to draw with replacement so that about `wanted` of the `possible` ones are seen."""
    if possible < 1:
        return 0
    return round(-possible * math.log1p(-min(wanted / possible, 0.95)))
