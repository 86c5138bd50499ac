"""A graph of any size whose classes show both in the features and in who is linked to whom."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np

from glasu.data.cache.workspace import Memory, Workspace
from glasu.data.edges import collected
from glasu.data.partition import WholeGraph
from glasu.randomness import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from glasu.config import DataConfig, RunConfig

HOMOPHILY = 0.7  # the share of edges drawn within a class; the rest do not look at classes
SEPARATION = 2.0  # how far class centres lie from the origin, where the noise has unit variance in every direction
CHUNK = 1 << 22  # edges, or feature values, drawn at a time; another number of edges would be another graph


def synthetic(config: RunConfig, workspace: Workspace | None = None) -> WholeGraph:
    """Draw a stochastic block graph of the sizes in `config.data`, without splits.

    Time is O(N d + E). Features and graph are made in the workspace; besides them, this takes O(N + CHUNK) memory, and
    in the workspace, while it lasts, 8 bytes per directed edge.
    """
    data, rng = config.data, Stream(config.data_seed, "synthetic").numpy()
    workspace = workspace or Memory()
    labels = rng.integers(0, data.num_classes, data.num_nodes)
    features = _features(data, labels, rng, workspace)
    within, anywhere = _num_draws(data, labels)
    ends = _draw_ends(labels, within, within + anywhere, rng)
    graph = collected(ends, data.num_nodes, 2 * (within + anywhere), workspace)
    classes = tuple(str(label) for label in range(data.num_classes))
    return WholeGraph(np.arange(data.num_nodes), features, graph, labels, classes)


def _features(
    data: DataConfig, labels: NDArray[np.int64], rng: np.random.Generator, workspace: Workspace
) -> NDArray[np.float32]:
    """Draw noise for all nodes, then class centres, and add them up; the noise twice, so that it need not be kept."""
    again, width = copy.deepcopy(rng), data.num_features
    size = max(1, CHUNK // width)
    pieces = [slice(start, min(start + size, len(labels))) for start in range(0, len(labels), size)]
    for rows in pieces:
        rng.standard_normal((rows.stop - rows.start, width), np.float32)
    centres = rng.standard_normal((data.num_classes, width), np.float32)
    centres *= SEPARATION / np.linalg.norm(centres, axis=1, keepdims=True)
    features = workspace.growing("x", np.float32, width)
    for rows in pieces:
        noise = again.standard_normal((rows.stop - rows.start, width), np.float32)
        noise += centres[labels[rows]]
        features.append(noise)
    return features.finish()


def _num_draws(data: DataConfig, labels: NDArray[np.int64]) -> tuple[int, int]:
    """Return how many undirected edges to draw within the classes and anywhere, to have the average degree."""
    nodes, sizes = len(labels), np.bincount(labels)
    wanted = nodes * data.average_degree / 2
    within = _draws(wanted * HOMOPHILY, float((sizes * (sizes - 1.0)).sum()) / 2)
    return within, _draws(wanted * (1 - HOMOPHILY), nodes * (nodes - 1.0) / 2)


def _draw_ends(
    labels: NDArray[np.int64], within: int, total: int, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Yield the sources and targets of both directions of each edge, some at a time."""
    nodes, sizes = len(labels), np.bincount(labels)
    members, first = np.argsort(labels, kind="stable").astype(np.int32), np.cumsum(sizes) - sizes
    for start in range(0, total, CHUNK):
        count = min(CHUNK, total - start)
        source = rng.integers(0, nodes, count, np.int32)
        target = rng.integers(0, nodes, count, np.int32)
        near = labels[source[: max(0, within - start)]]  # the first `within` edges stay in the source's class
        target[: len(near)] = members[first[near] + rng.integers(0, sizes[near])]
        yield source, target
        yield target, source


def _draws(wanted: float, possible: float) -> int:
    """Return how many pairs to draw with replacement so that about `wanted` of the `possible` ones are seen."""
    if possible < 1:
        return 0
    return round(-possible * math.log1p(-min(wanted / possible, 0.95)))
