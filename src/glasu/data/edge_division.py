"""Divide the edges of one graph among clients, in bounded memory.

In a symmetric graph, one draw decides about both directions of an edge. In addition to the result, a division stores
one or two bytes per edge, a few numbers per node, and pieces of bounded size. Importing this module does not load
scipy.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from glasu.data.graph import EDGE_BYTES, Graph
from glasu.randomness import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from glasu.config import DataConfig
    from glasu.data.cache.arrays import Workspace

    Draw = Callable[[int], NDArray[np.unsignedinteger[Any]]]  # a number of edges -> the next draws, one per edge


def divide_edges(graph: Graph, data: DataConfig, seed: int, workspace: Workspace) -> list[Graph]:
    """Give each edge to each client with probability `edge_fraction`, independently of the other clients.

    Args:
        graph: the undivided graph. With `edge_fraction = 1` all clients share it.
        data: the number of clients, and the expected share of edges that each client gets.
        seed: the seed of the draws.
        workspace: receives the arrays `<client>.indptr`, `<client>.indices` and, with weights, `<client>.weights`.
    """
    if data.edge_fraction == 1:
        return [graph] * data.num_clients
    parts: list[Graph] = []
    kept = np.empty(graph.num_edges, np.uint8)  # one bit per client
    for first in range(0, data.num_clients, 8):
        clients = range(first, min(first + 8, data.num_clients))
        _draw_per_edge(graph, partial(_draw_bits, clients, data.edge_fraction, seed), kept, workspace)
        parts += (
            _select(graph, kept, 1 << bit, 1 << bit, f"{client}.", workspace) for bit, client in enumerate(clients)
        )
    return parts


def assign_edges(graph: Graph, data: DataConfig, seed: int, workspace: Workspace) -> list[Graph]:
    """Give each edge to one random client. The clients' shares are drawn from a symmetric Dirichlet distribution.

    Args:
        graph: the undivided graph.
        data: the number of clients, and the parameter of the Dirichlet distribution (`concentration`).
        seed: the seed of the shares and draws.
        workspace: receives the arrays `<client>.indptr`, `<client>.indices` and, with weights, `<client>.weights`.
    """
    shares = draw_shares(data.num_clients, data.concentration, Stream(seed, "edge shares"))
    owner = np.empty(graph.num_edges, np.min_scalar_type(data.num_clients - 1))
    _draw_per_edge(graph, partial(_draw_owner, shares, owner.dtype, seed), owner, workspace)
    everything = int(np.iinfo(owner.dtype).max)
    return [_select(graph, owner, everything, client, f"{client}.", workspace) for client in range(data.num_clients)]


def draw_shares(count: int, concentration: float, stream: Stream) -> NDArray[np.float64]:
    """Draw shares that add up to 1 from the symmetric Dirichlet distribution."""
    return stream.numpy().dirichlet(np.full(count, concentration))


def _draw_bits(clients: range, edge_fraction: float, seed: int) -> Draw:
    """Return a function that draws which clients keep an edge: bit b is set if the b-th client keeps it."""
    streams = [Stream(seed, "edges", client=client).numpy() for client in clients]

    def draw(count: int) -> NDArray[np.uint8]:
        drawn = np.zeros(count, np.uint8)
        for bit, stream in enumerate(streams):
            drawn |= (stream.random(count, np.float32) < edge_fraction).astype(np.uint8) << bit
        return drawn

    return draw


def _draw_owner(shares: NDArray[np.float64], dtype: np.dtype[Any], seed: int) -> Draw:
    """Return a function that draws, for each edge, the one client that gets it."""
    stream, heights = Stream(seed, "edge owners").numpy(), np.cumsum(shares)[:-1]
    return lambda count: np.searchsorted(heights, stream.random(count), side="right").astype(dtype)


def _draw_per_edge(
    graph: Graph, start: Callable[[], Draw], drawn: NDArray[np.unsignedinteger[Any]], workspace: Workspace
) -> None:
    """Fill `drawn` with one value per edge. In a symmetric graph, both directions of an edge get the same value.

    Args:
        graph: the undivided graph.
        start: returns a function that makes the draws. The function of every call makes the same draws again.
        drawn: receives the draws.
        workspace: sets the size of the pieces.
    """
    piece_edges = max(1, workspace.piece_bytes // EDGE_BYTES)
    above = _draw(graph, start(), drawn, piece_edges)
    if not _copy_to_reverse(graph, above, drawn, piece_edges):
        _draw(graph, start(), drawn, piece_edges)  # the graph is directed: one draw for every edge


def _draw(graph: Graph, draw: Draw, drawn: NDArray[np.unsignedinteger[Any]], piece_edges: int) -> NDArray[np.int64]:
    """Draw a value for every edge.

    Returns:
        For each node, the position of its first edge from a node with a higher number.
    """
    above = np.array(graph.indptr[:-1])
    for nodes, indptr in graph.node_pieces(piece_edges):
        edges = slice(indptr[0], indptr[-1])
        drawn[edges] = draw(edges.stop - edges.start)
        row = np.repeat(np.arange(nodes.start, nodes.stop, dtype=np.int32), np.diff(indptr))
        above[nodes] += _count_flags(graph.indices[edges] < row, indptr)
    return above


def _count_flags(flags: NDArray[np.bool_], indptr: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the true flags among each node's edges; `indptr` may begin above 0."""
    before = np.zeros(len(flags) + 1, np.int64)
    np.cumsum(flags, out=before[1:])
    return np.asarray(np.diff(before[indptr - indptr[0]]))


def _copy_to_reverse(
    graph: Graph, above: NDArray[np.int64], drawn: NDArray[np.unsignedinteger[Any]], piece_edges: int
) -> bool:
    """Give each edge with a lower-numbered source the draw of its reverse; return False if an edge has no reverse.

    Targets are visited in order, so one pass over the edges finds all reverses.
    """
    import scipy.sparse as sp

    following = above.copy()  # per node: its first edge from a higher-numbered node that is not matched yet
    size = graph.num_nodes
    for nodes, indptr in graph.node_pieces(max(piece_edges, size)):
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
        drawn[indptr[0] + by_source.data] = drawn[reverse]
        following = following_after
    return np.array_equal(following, graph.indptr[1:])


def _select(
    graph: Graph, drawn: NDArray[np.unsignedinteger[Any]], mask: int, value: int, prefix: str, workspace: Workspace
) -> Graph:
    """Return the graph that contains the edges with `drawn & mask == value`, in the same order."""
    indptr = workspace.writer(f"{prefix}indptr", np.int64)
    indices = workspace.writer(f"{prefix}indices", graph.indices.dtype)
    weights = None if graph.weights is None else workspace.writer(f"{prefix}weights", np.float32)
    indptr.append(np.zeros(1, np.int64))
    before = 0
    for _, own in graph.node_pieces(max(1, workspace.piece_bytes // EDGE_BYTES)):
        edges = slice(own[0], own[-1])
        chosen = (drawn[edges] & mask) == value
        ends = before + np.cumsum(_count_flags(chosen, own))
        before = int(ends[-1])
        indptr.append(ends)
        indices.append(graph.indices[edges][chosen])
        if weights is not None and graph.weights is not None:
            weights.append(graph.weights[edges][chosen])
    return Graph.without_checks(indptr.finish(), indices.finish(), None if weights is None else weights.finish())
