"""A random graph of any size. Both features and edges depend on the classes."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np

from glasu.data.cache.arrays import Workspace
from glasu.data.cache.parties import compute_once
from glasu.data.graph import collect_edges
from glasu.data.party import PartyData
from glasu.data.sources import DataSource, RawData
from glasu.randomness import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from glasu.config import DataConfig, RunConfig
    from glasu.data.cache.store import Cache

HOMOPHILY = 0.7  # the share of edges drawn within a class; the other edges ignore classes
SEPARATION = 2.0  # distance of the class centres from the origin; the noise has unit variance in every direction
CHUNK = 1 << 22  # edges or feature values per draw; another value gives a different graph


def draw_graph(config: RunConfig, workspace: Workspace | None = None, chunk: int = CHUNK) -> PartyData:
    """Draw a stochastic block graph of the sizes in `config.data`, without splits.

    Drawing takes O(N d + E) time. The workspace stores features and graph. Until the end, it also stores 8 bytes per
    directed edge. In addition, drawing needs O(N + chunk) memory.

    Args:
        config: sizes and seed.
        workspace: stores features and graph; None: in memory.
        chunk: edges or feature values per draw.
    """
    data, rng = config.data, Stream(config.data_seed, "synthetic").numpy()
    workspace = workspace or Workspace()
    labels = rng.integers(0, data.num_classes, data.num_nodes)
    features = _draw_features(data, labels, rng, workspace, chunk)
    within, anywhere = _count_draws(data, labels)
    ends = _draw_ends(labels, within, within + anywhere, rng, chunk)
    graph = collect_edges(ends, data.num_nodes, 2 * (within + anywhere), workspace)
    classes = tuple(str(label) for label in range(data.num_classes))
    return PartyData("all", np.arange(data.num_nodes), features, graph, labels, classes)


def _read(config: RunConfig, cache: Cache) -> RawData:
    """Draw the graph. A large graph is drawn once and then opened from the cache."""
    data = config.data
    num_bytes = 4 * data.num_nodes * (data.average_degree + data.num_features)
    if num_bytes < 4 * cache.min_bytes:  # drawing is four times as fast as reading files
        return RawData([draw_graph(config)])
    sizes = {key: getattr(data, key) for key in ("num_nodes", "average_degree", "num_features", "num_classes")}
    about = {"kind": "synthetic", "seed": config.data_seed, **sizes}
    return RawData(compute_once(cache, about, lambda workspace: [draw_graph(config, workspace)]))


SYNTHETIC = DataSource(_read)


def _draw_features(
    data: DataConfig, labels: NDArray[np.int64], rng: np.random.Generator, workspace: Workspace, chunk: int
) -> NDArray[np.float32]:
    """Draw noise for all nodes, then class centres, and add them. The noise is drawn twice instead of being stored."""
    again, width = copy.deepcopy(rng), data.num_features
    size = max(1, chunk // width)
    pieces = [slice(start, min(start + size, len(labels))) for start in range(0, len(labels), size)]
    for rows in pieces:
        rng.standard_normal((rows.stop - rows.start, width), np.float32)
    centres = rng.standard_normal((data.num_classes, width), np.float32)
    centres *= SEPARATION / np.linalg.norm(centres, axis=1, keepdims=True)
    features = workspace.writer("x", np.float32, width)
    for rows in pieces:
        noise = again.standard_normal((rows.stop - rows.start, width), np.float32)
        noise += centres[labels[rows]]
        features.append(noise)
    return features.finish()


def _count_draws(data: DataConfig, labels: NDArray[np.int64]) -> tuple[int, int]:
    """Return the number of undirected edges to draw within classes and the number to draw between any nodes."""
    nodes, sizes = len(labels), np.bincount(labels)
    wanted = nodes * data.average_degree / 2
    within = _count_with_replacement(wanted * HOMOPHILY, float((sizes * (sizes - 1.0)).sum()) / 2)
    return within, _count_with_replacement(wanted * (1 - HOMOPHILY), nodes * (nodes - 1.0) / 2)


def _draw_ends(
    labels: NDArray[np.int64], within: int, total: int, rng: np.random.Generator, chunk: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Yield pieces of sources and targets, with both directions of each edge."""
    nodes, sizes = len(labels), np.bincount(labels)
    members, first = np.argsort(labels, kind="stable").astype(np.int32), np.cumsum(sizes) - sizes
    for start in range(0, total, chunk):
        count = min(chunk, total - start)
        source = rng.integers(0, nodes, count, np.int32)
        target = rng.integers(0, nodes, count, np.int32)
        near = labels[source[: max(0, within - start)]]  # the first `within` edges stay within a class
        target[: len(near)] = members[first[near] + rng.integers(0, sizes[near])]
        yield source, target
        yield target, source


def _count_with_replacement(wanted: float, possible: float) -> int:
    """Return the number of draws with replacement from `possible` pairs that give about `wanted` different pairs."""
    if possible < 1:
        return 0
    return round(-possible * math.log1p(-min(wanted / possible, 0.95)))
