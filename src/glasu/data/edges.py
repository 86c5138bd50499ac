"""Collect the edges of a large graph, in whatever order they come, and divide them among clients, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from glasu.data.party import PIECE_EDGES, Graph, distinct
from glasu.errors import ConfigError
from glasu.randomness import Stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from glasu.data.cache.workspace import Workspace

BUCKET_EDGES = 1 << 23  # edges that are sorted at a time


def collected(
    ends: Iterable[tuple[NDArray[np.integer], NDArray[np.integer]]],
    num_nodes: int,
    num_edges: int,
    workspace: Workspace,
) -> Graph:
    """Return the graph of all edges: no self loops, none twice; the same as `Graph.from_edges` makes of them.

    The edges are first divided by their targets into buckets, which the workspace holds, and then sorted bucket by
    bucket. This takes O(N) memory besides the pieces, and 8 bytes per edge in the workspace while it lasts.

    Args:
        ends: pieces of the list of edges: sources and targets, within 0..N-1.
        num_nodes: N.
        num_edges: about how many edges there will be.
        workspace: where the arrays `indptr` and `indices` are made.
    """
    num_buckets = max(1, min(num_nodes, -(-num_edges // BUCKET_EDGES)))
    bounds = np.arange(num_buckets + 1) * num_nodes // num_buckets  # the first target of each bucket
    buckets = [workspace.growing(f"bucket{number}", np.int64) for number in range(num_buckets)]
    for source, target in ends:
        kept = source != target
        keys = target[kept].astype(np.int64)
        keys *= num_nodes
        keys += source[kept]
        keys.sort()
        for bucket, piece in zip(buckets, np.split(keys, np.searchsorted(keys, bounds[1:-1] * num_nodes)), strict=True):
            bucket.append(piece)
    indptr, indices = workspace.growing("indptr", np.int64), workspace.growing("indices", np.int32)
    indptr.append(np.zeros(1, np.int64))
    before = 0
    for number, bucket in enumerate(buckets):
        keys = distinct(np.array(bucket.finish()))
        workspace.drop(f"bucket{number}")
        first, last = bounds[number], bounds[number + 1]
        indptr.append(before + np.searchsorted(keys, np.arange(first + 1, last + 1) * num_nodes))
        indices.append((keys % num_nodes).astype(np.int32))
        before += len(keys)
    return Graph(indptr.finish(), indices.finish())


def divide_edges(
    graph: Graph, names: Sequence[str], edge_fraction: float, seed: int, workspace: Workspace
) -> list[Graph]:
    """Give each client each edge with probability `edge_fraction`.

    In a symmetric graph the earlier direction of an edge decides for both. Besides the result, this takes one byte per
    edge for eight clients, and bounded memory.

    Args:
        graph: the edges of all.
        names: the clients'.
        edge_fraction: the share of the edges that each holds; with 1, all share the graph as it is.
        seed: of the draws.
        workspace: where the arrays `<name>.indptr`, `<name>.indices` and, with weights, `<name>.weights` are made.
    """
    if not 0 <= edge_fraction <= 1:
        raise ConfigError(f"edge_fraction={edge_fraction}: the share of the edges must lie in [0, 1].")
    if edge_fraction == 1:
        return [graph] * len(names)
    parts: list[Graph] = []
    for first in range(0, len(names), 8):
        clients = range(first, min(first + 8, len(names)))
        kept: NDArray[np.uint8] = workspace.scratch("kept", np.uint8, graph.num_edges)
        above = _decide(graph, clients, edge_fraction, seed, kept)
        if not _mirror(graph, above, kept):
            _decide(graph, clients, edge_fraction, seed, kept)  # a directed graph: each edge decides for itself
        parts += (_part(graph, kept, bit, f"{names[client]}.", workspace) for bit, client in enumerate(clients))
        del kept
        workspace.drop("kept")
    return parts


def _decide(
    graph: Graph, clients: range, edge_fraction: float, seed: int, kept: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Draw for each edge who keeps it: bit b of `kept` stands for the b-th of the clients.

    Returns:
        For each node, where its edges from nodes of higher numbers begin.
    """
    streams = [Stream(seed, "edges", client=client).numpy() for client in clients]
    above = np.array(graph.indptr[:-1])
    for nodes in graph.node_pieces():
        indptr = graph.indptr[nodes.start : nodes.stop + 1]
        edges = slice(indptr[0], indptr[-1])
        drawn = np.zeros(edges.stop - edges.start, np.uint8)
        for bit, stream in enumerate(streams):
            drawn |= (stream.random(len(drawn), np.float32) < edge_fraction).astype(np.uint8) << bit
        kept[edges] = drawn
        row = np.repeat(np.arange(nodes.start, nodes.stop, dtype=np.int32), np.diff(indptr))
        above[nodes] += _sums(graph.indices[edges] < row, indptr)
    return above


def _sums(flags: NDArray[np.bool_], indptr: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the flags of each node's edges; `indptr` may begin anywhere."""
    before = np.zeros(len(flags) + 1, np.int64)
    np.cumsum(flags, out=before[1:])
    return np.asarray(np.diff(before[indptr - indptr[0]]))


def _mirror(graph: Graph, above: NDArray[np.int64], kept: NDArray[np.uint8]) -> bool:
    """Let every edge from a lower to a higher node do what its reverse does; False where some have no reverse.

    Visiting the targets in their order, the edges from one source meet their reverses one after the other.
    """
    following = above.copy()  # per node: the next of its edges from higher nodes
    size = graph.num_nodes
    for nodes in graph.node_pieces(max(PIECE_EDGES, size)):
        indptr = graph.indptr[nodes.start : nodes.stop + 1]
        sources = graph.indices[indptr[0] : indptr[-1]]
        row = np.repeat(np.arange(nodes.start, nodes.stop, dtype=np.int32), np.diff(indptr))
        lower = np.flatnonzero(sources < row)
        counts = above[nodes] - indptr[:-1]
        starts = np.concatenate([[0], np.cumsum(counts)])
        by_source = sp.csr_array((lower, sources[lower], starts), shape=(len(counts), size)).tocsc()  # O(edges + nodes)
        visits = np.diff(by_source.indptr)
        following_after = following + visits
        if (following_after > graph.indptr[1:]).any():
            return False
        reverse = np.arange(len(lower)) + np.repeat(following - by_source.indptr[:-1], visits)
        if not np.array_equal(graph.indices[reverse], by_source.indices + np.int32(nodes.start)):
            return False
        kept[indptr[0] + by_source.data] = kept[reverse]
        following = following_after
    return np.array_equal(following, graph.indptr[1:])


def _part(graph: Graph, kept: NDArray[np.uint8], bit: int, prefix: str, workspace: Workspace) -> Graph:
    """Return the graph with the edges that a client keeps, in their order."""
    indptr = workspace.growing(f"{prefix}indptr", np.int64)
    indices = workspace.growing(f"{prefix}indices", graph.indices.dtype)
    weights = None if graph.weights is None else workspace.growing(f"{prefix}weights", np.float32)
    indptr.append(np.zeros(1, np.int64))
    before = 0
    for nodes in graph.node_pieces():
        own = graph.indptr[nodes.start : nodes.stop + 1]
        edges = slice(own[0], own[-1])
        chosen = (kept[edges] >> bit & 1).astype(bool)
        ends = before + np.cumsum(_sums(chosen, own))
        before = int(ends[-1])
        indptr.append(ends)
        indices.append(graph.indices[edges][chosen])
        if weights is not None and graph.weights is not None:
            weights.append(graph.weights[edges][chosen])
    return Graph.opened(indptr.finish(), indices.finish(), None if weights is None else weights.finish())
