"""Graph: the edges E_m of one party, and ways to build and combine graphs.

Importing this module does not load scipy, because a server without scipy imports it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from glasu.data.cache.arrays import ARRAY_PIECE, Workspace
from glasu.errors import DataError

if TYPE_CHECKING:
    import scipy.sparse as sp

# The maximum number of bytes per edge. Edges are processed in pieces of bounded size (see `Workspace`), so a piece of
# b bytes may have b / EDGE_BYTES edges.
EDGE_BYTES = 8


@dataclass(frozen=True, eq=False)
class Graph:
    """Edges as CSC: the sources of the edges into node i are indices[indptr[i]:indptr[i + 1]], sorted.

    There are no duplicate edges and no self loops, because each layer of the model adds self loops itself.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None  # None: every edge weighs 1

    def __post_init__(self) -> None:
        indptr, nodes = self.indptr, self.num_nodes
        if nodes < 0 or indptr[0] != 0 or indptr[-1] != len(self.indices) or (np.diff(indptr) < 0).any():
            raise DataError("a graph's indptr must rise from 0 to the number of edges; use Graph.from_edges.")
        if len(self.indices) and (self.indices.min() < 0 or self.indices.max() >= nodes):
            raise DataError(f"a graph's indices must lie in 0..{nodes - 1}; use Graph.from_edges.")
        if self.weights is not None and len(self.weights) != len(self.indices):
            raise DataError(f"{len(self.weights)} weights for {len(self.indices)} edges; each edge needs one.")
        if self.weights is not None and len(self.weights) and self.weights.min() < 0:
            raise DataError("an edge weight is negative; use weights of 0 or more.")

    @classmethod
    def without_checks(
        cls,
        indptr: NDArray[np.int64],
        indices: NDArray[np.int32],
        weights: NDArray[np.float32] | None = None,
        degree: NDArray[np.float64] | None = None,
    ) -> Self:
        """Return a graph that was checked earlier; no edge is read."""
        graph = object.__new__(cls)
        graph.__dict__.update(indptr=indptr, indices=indices, weights=weights)
        if degree is not None:
            graph.__dict__["degree"] = degree
        return graph

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @cached_property
    def degree(self) -> NDArray[np.float64]:
        """The sum of the weights of the edges into each node, without self loops."""
        if self.weights is None:
            return np.diff(self.indptr).astype(np.float64)
        degree = np.zeros(self.num_nodes)
        for nodes, indptr in self.node_pieces():
            row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
            degree[nodes] = np.bincount(row, self.weights[indptr[0] : indptr[-1]].astype(np.float64), len(indptr) - 1)
        return degree

    def node_pieces(self, num_edges: int = ARRAY_PIECE // EDGE_BYTES) -> Iterator[tuple[slice, NDArray[np.int64]]]:
        """Divide the nodes into pieces. A piece has at most `num_edges` incoming edges, unless it is a single node.

        Yields:
            The nodes of a piece, and their part of `indptr`. The first and last values of this part bound the edges of
            the piece.
        """
        start = 0
        while start < self.num_nodes:
            stop = int(np.searchsorted(self.indptr, self.indptr[start] + num_edges, side="right")) - 1
            stop = min(max(stop, start + 1), self.num_nodes)
            yield slice(start, stop), self.indptr[start : stop + 1]
            start = stop

    @classmethod
    def from_edges(
        cls,
        source: NDArray[np.integer],
        target: NDArray[np.integer],
        num_nodes: int,
        weights: NDArray[np.floating] | None = None,
    ) -> Self:
        """Sort edges by target, drop self loops, and merge duplicates (their weights add up)."""
        source, target = np.asarray(source, np.int64), np.asarray(target, np.int64)
        for name, ends in (("source", source), ("target", target)):
            if len(ends) and (ends.min() < 0 or ends.max() >= num_nodes):
                bad = int(np.flatnonzero((ends < 0) | (ends >= num_nodes))[0])
                raise DataError(f"edge {bad}: its {name} is out of range; nodes are numbered 0..{num_nodes - 1}.")
        if weights is not None and not np.isfinite(weights).all():
            bad = int(np.flatnonzero(~np.isfinite(weights))[0])
            raise DataError(f"edge {bad}: its weight is not a finite number; remove the edge or give it a weight.")
        kept = source != target
        key = target[kept] * num_nodes + source[kept]
        merged = None
        if weights is None:
            key = sort_distinct(key)
        else:
            key, where = np.unique(key, return_inverse=True)
            merged = np.bincount(where, weights=weights[kept], minlength=len(key)).astype(np.float32)
        indptr = np.zeros(num_nodes + 1, np.int64)
        np.cumsum(np.bincount(key // num_nodes, minlength=num_nodes), out=indptr[1:])
        return cls(indptr, (key % num_nodes).astype(np.int32), merged)

    def edge_index(self) -> NDArray[np.int64]:
        """Return the edges as two rows, source and target, ordered by target."""
        target = np.repeat(np.arange(self.num_nodes, dtype=np.int64), np.diff(self.indptr))
        return np.stack([self.indices.astype(np.int64), target])

    def restrict(self, nodes: NDArray[np.int64]) -> Self:
        """Return the subgraph induced by `nodes`, which are renumbered 0, 1, ... in the given order."""
        position = np.full(self.num_nodes, -1, np.int64)
        position[nodes] = np.arange(len(nodes))
        source, target = position[self.edge_index()]
        kept = (source >= 0) & (target >= 0)
        weights = None if self.weights is None else self.weights[kept]
        return type(self).from_edges(source[kept], target[kept], len(nodes), weights)


def sort_distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `np.unique(values)`, but sort `values` in place, which is much faster."""
    values.sort()
    first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


def collect_edges(
    ends: Iterable[tuple[NDArray[np.integer], NDArray[np.integer]]],
    num_nodes: int,
    num_edges: int,
    workspace: Workspace,
) -> Graph:
    """Build the same graph as `Graph.from_edges` in bounded memory, from an edge list that is given in pieces.

    The edges are divided by target into buckets in the workspace, and then sorted bucket by bucket. This takes O(N)
    memory in addition to the pieces. Until the end, the workspace also stores 8 bytes per edge.

    Args:
        ends: the list of edges in pieces. A piece is a pair (sources, targets) of numbers in 0..N-1.
        num_nodes: N.
        num_edges: an estimate of the number of edges.
        workspace: receives the arrays `indptr` and `indices`.
    """
    bucket_edges = max(1, 2 * workspace.piece_bytes // EDGE_BYTES)
    num_buckets = max(1, min(num_nodes, -(-num_edges // bucket_edges)))
    bounds = np.arange(num_buckets + 1) * num_nodes // num_buckets  # the first target of each bucket
    buckets = [workspace.writer(f"bucket{number}", np.int64) for number in range(num_buckets)]
    for source, target in ends:
        kept = source != target
        keys = target[kept].astype(np.int64)
        keys *= num_nodes
        keys += source[kept]
        keys.sort()
        for bucket, piece in zip(buckets, np.split(keys, np.searchsorted(keys, bounds[1:-1] * num_nodes)), strict=True):
            bucket.append(piece)
    indptr, indices = workspace.writer("indptr", np.int64), workspace.writer("indices", np.int32)
    indptr.append(np.zeros(1, np.int64))
    before = 0
    for number, bucket in enumerate(buckets):
        keys = sort_distinct(np.array(bucket.finish()))
        workspace.drop(f"bucket{number}")
        first, last = bounds[number], bounds[number + 1]
        indptr.append(before + np.searchsorted(keys, np.arange(first + 1, last + 1) * num_nodes))
        indices.append((keys % num_nodes).astype(np.int32))
        before += len(keys)
    return Graph(indptr.finish(), indices.finish())


def make_undirected(ends: NDArray[np.integer], num_nodes: int, weights: NDArray[np.floating] | None = None) -> Graph:
    """Return the graph with both directions of each edge in `ends`, shape (2, E), without self loops.

    A duplicate edge counts once, with its largest weight. The weights are not added, because the list may contain both
    directions of an edge, and the sum would be twice the weight.
    """
    if ends.size and (ends.min() < 0 or ends.max() >= num_nodes):
        bad = np.flatnonzero(((ends < 0) | (ends >= num_nodes)).any(axis=0))[0]
        raise DataError(f"edge {bad}: an end is out of range; nodes are numbered 0..{num_nodes - 1}.")
    source, target = np.concatenate([ends, ends[::-1]], axis=1)
    if weights is None:
        return Graph.from_edges(source, target, num_nodes)
    return _keep_largest_weights(source, target, num_nodes, np.concatenate([weights, weights]))


def unite_graphs(graphs: Sequence[Graph]) -> Graph:
    """Return the graph with the edges of all graphs. An edge gets the largest of its weights.

    In a graph without weights, each edge has the weight 1. If several parties hold the same edge of a divided graph,
    the largest weight is the weight in the undivided graph. The sum of the weights is not.
    """
    first = graphs[0]
    if all(graph.indices is first.indices and graph.weights is first.weights for graph in graphs):
        return first
    if all(graph.weights is None for graph in graphs):
        union = _add_patterns(graphs)
        return Graph(union.indptr.astype(np.int64), union.indices.astype(np.int32, copy=False))
    source, target = np.concatenate([graph.edge_index() for graph in graphs], axis=1)
    weights = [np.ones(graph.num_edges, np.float32) if graph.weights is None else graph.weights for graph in graphs]
    return _keep_largest_weights(source, target, first.num_nodes, np.concatenate(weights))


def _keep_largest_weights(
    source: NDArray[np.integer], target: NDArray[np.integer], num_nodes: int, weights: NDArray[np.floating]
) -> Graph:
    """Return the graph in which a duplicate edge has the largest of its weights."""
    keys, where = np.unique(target.astype(np.int64) * num_nodes + source, return_inverse=True)
    largest = np.full(len(keys), -np.inf, np.float32)
    np.maximum.at(largest, where, weights.astype(np.float32))
    return Graph.from_edges(keys % num_nodes, keys // num_nodes, num_nodes, largest)


def count_linked_pairs(graphs: Sequence[Graph]) -> int:
    """Count the pairs of nodes with an edge between them in at least one graph, in either direction, in O(E) time."""
    union = _add_patterns(graphs)
    both = union + union.T.tocsr()
    return int(both.nnz) // 2  # no graph has self loops


def _add_patterns(graphs: Sequence[Graph]) -> sp.csr_array:
    """Return the union of the edges as a matrix of booleans. This takes O(E) time, because both operands are sorted."""
    import scipy.sparse as sp

    size = graphs[0].num_nodes
    union = sp.csr_array((size, size), dtype=bool)
    for graph in graphs:
        union = union + sp.csr_array((np.ones(graph.num_edges, bool), graph.indices, graph.indptr), union.shape)
    return union
