"""Draw neighbours of S[l+1], and build the block A(E(S[l+1], S[l])) that one layer multiplies by.

Node sets are sorted arrays of node numbers. Nothing here is O(N) or O(E), except where all nodes are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from glasu.data.party import Graph
from glasu.randomness import contains, draw_distinct

NodeSet = NDArray[np.int64]
Normalization = Literal["symmetric", "mean", "none"]
DENSE_SHARE = 0.12  # of a block's entries: with more edges than that, a dense product takes less time (4,057 nodes)
DENSE_LIMIT = 2**26  # entries of a dense block: 256 MiB in single precision


@dataclass(frozen=True, eq=False)
class Draw:
    """What one client drew for the rows S[l+1]: the edges it will use, before S[l] is agreed."""

    nodes: NodeSet  # S_m[l]: the sources of the drawn edges, and S[l+1] itself
    rows: NDArray[np.int64]  # per drawn edge: the position of its target in S[l+1], rising
    edges: NDArray[np.int64]  # per drawn edge: its position in the graph's edge list
    scale: NDArray[np.float64] | None = None  # per drawn edge: what makes the block unbiased; None: 1 everywhere


@dataclass(frozen=True, eq=False)
class Block:
    """One layer's share of the graph: the matrix A restricted to S[l+1] x S[l]."""

    matrix: sp.csr_array
    positions: NDArray[np.int64]  # where each node of S[l+1] stands in S[l]
    dense: NDArray[np.floating] | None = None  # the matrix once more, where a dense product is faster

    def edge_index(self) -> NDArray[np.int64]:
        """Return the edges as two rows: position of the source in S[l], of the target in S[l+1]."""
        target = np.repeat(np.arange(self.matrix.shape[0]), np.diff(self.matrix.indptr))
        return np.stack([self.matrix.indices.astype(np.int64), target])

    def at(self, rows: NDArray[np.int64]) -> Block:
        """Return the block of some of its rows."""
        if np.array_equal(rows, np.arange(self.matrix.shape[0])):
            return self
        return Block(self.matrix[rows], self.positions[rows])

    def densified(self) -> Block:
        """Return the block ready for a dense product, where that is faster and fits; else as it is."""
        if self.dense is not None:
            return self
        rows, columns = self.matrix.shape
        crowded = self.matrix.nnz > DENSE_SHARE * rows * columns and rows * columns <= DENSE_LIMIT
        return Block(self.matrix, self.positions, self.matrix.toarray()) if crowded else self

    def compact(self) -> tuple[Block, NDArray[np.int64]]:
        """Return the block without the columns that no row reads, and which columns are left."""
        columns = np.unique(np.concatenate([self.matrix.indices.astype(np.int64), self.positions]))
        if len(columns) == self.matrix.shape[1]:
            return self, columns
        matrix = sp.csr_array(
            (self.matrix.data, np.searchsorted(columns, self.matrix.indices), self.matrix.indptr),
            shape=(self.matrix.shape[0], len(columns)),
        )
        return Block(matrix, np.searchsorted(columns, self.positions)), columns


def edges_into(graph: Graph, targets: NodeSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """List every edge into `targets`: (row of its target, position in the edge list), ordered by row."""
    starts = graph.indptr[targets]
    degrees = graph.indptr[targets + 1] - starts
    before = np.cumsum(degrees) - degrees
    rows = np.repeat(np.arange(len(targets)), degrees)
    return rows, np.arange(len(rows)) + np.repeat(starts - before, degrees)


def draw_all(graph: Graph, targets: NodeSet) -> Draw:
    """Take every edge; S[l] is every node of the graph."""
    rows, edges = edges_into(graph, targets)
    return Draw(np.arange(graph.num_nodes), rows, edges)


def draw_neighbors(graph: Graph, targets: NodeSet, fanout: int, rng: np.random.Generator) -> Draw:
    """Draw up to `fanout` neighbours of each node, uniformly without replacement (node-wise sampling).

    A drawn edge is scaled by deg / min(deg, fanout), the inverse of its probability.
    """
    starts = graph.indptr[targets]
    degrees = graph.indptr[targets + 1] - starts
    counts = np.minimum(degrees, fanout)
    before = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(len(targets)), counts)
    offsets = np.arange(len(rows)) - np.repeat(before, counts)  # the first ones; right where all are taken
    crowded = np.flatnonzero(degrees > fanout)
    if len(crowded):
        chosen = _distinct_below(degrees[crowded], fanout, rng)
        offsets[before[crowded][:, None] + np.arange(fanout)] = chosen
    edges = np.repeat(starts, counts) + offsets
    scale = np.repeat(degrees / np.maximum(counts, 1), counts)
    return Draw(_union(targets, graph.indices[edges]), rows, edges, scale)


def _distinct_below(bounds: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `count` distinct numbers below each bound, all subsets equally likely; O(count^2) for each bound."""
    chosen = np.empty((len(bounds), 0), np.int64)
    uniform = rng.random((count, len(bounds)))
    for step in range(count):
        rank = (uniform[step] * (bounds - step)).astype(np.int64)  # among the numbers not chosen yet
        for column in range(step):
            rank += rank >= chosen[:, column]  # skip the chosen ones, smallest first
        chosen = np.sort(np.column_stack([chosen, rank]), axis=1)
    return chosen


def draw_layer(graph: Graph, targets: NodeSet, fanout: int, rng: np.random.Generator) -> Draw:
    """Draw up to fanout x |S[l+1]| nodes out of all new neighbours of S[l+1] together (layer-wise sampling).

    Edges from a drawn node are scaled by |N(S) minus S| / n; those inside S[l+1] are all used, as they are.
    """
    rows, edges = edges_into(graph, targets)
    sources = graph.indices[edges].astype(np.int64)
    inside = contains(targets, sources)
    candidates = np.unique(sources[~inside])
    count = min(len(candidates), fanout * len(targets))
    drawn = candidates[draw_distinct(rng, len(candidates), count)]
    return _keep(targets, drawn, rows, edges, sources, inside, len(candidates))


def draw_shared(graph: Graph, targets: NodeSet, fanout: int, rng: np.random.Generator) -> Draw:
    """Draw n = min(N - |S|, fanout x |S|) nodes from a generator that all clients share, whatever their edges.

    Edges from a drawn node are scaled by (N - |S|) / n; those inside S[l+1] are all used, as they are.
    """
    outside = graph.num_nodes - len(targets)
    drawn = draw_distinct(rng, graph.num_nodes, min(outside, fanout * len(targets)), excluded=targets)
    rows, edges = edges_into(graph, targets)
    sources = graph.indices[edges].astype(np.int64)
    return _keep(targets, drawn, rows, edges, sources, contains(targets, sources), outside)


def _keep(
    targets: NodeSet,
    drawn: NodeSet,
    rows: NDArray[np.int64],
    edges: NDArray[np.int64],
    sources: NDArray[np.int64],
    inside: NDArray[np.bool_],
    population: int,
) -> Draw:
    """Keep the edges from `targets` and from the nodes drawn out of `population`, which are scaled up."""
    used = inside | contains(drawn, sources)
    scale = np.where(inside[used], 1.0, population / max(1, len(drawn)))
    return Draw(_union(targets, drawn), rows[used], edges[used], scale)


def _union(first: NodeSet, second: NDArray[np.integer]) -> NodeSet:
    return np.unique(np.concatenate([first, second.astype(np.int64)]))


def induced(graph: Graph, targets: NodeSet, nodes: NodeSet) -> Draw:
    """Take every edge from `nodes` into `targets`, unscaled."""
    rows, edges = edges_into(graph, targets)
    used = contains(nodes, graph.indices[edges])
    return Draw(nodes, rows[used], edges[used])


class Adjacency:
    """A(E_m) of one client, normalised by the degrees of its full graph, one block at a time.

    symmetric: D^-1/2 (A + I) D^-1/2 with D counting the self loop; mean: D^-1 A, no self loops; none: A + I.
    """

    def __init__(self, graph: Graph, normalization: Normalization, *, double: bool = False) -> None:
        self.graph, self.normalization = graph, normalization
        self.dtype = np.dtype(np.float64) if double else np.dtype(np.float32)
        if normalization == "symmetric":
            self._inverse = _power(graph.degree + 1.0, -0.5)
        elif normalization == "mean":
            self._inverse = _power(graph.degree, -1.0)

    def block(self, targets: NodeSet, nodes: NodeSet, draw: Draw) -> Block:
        """Build the block with rows `targets` and columns `nodes`; columns that others added stay empty."""
        sources = self.graph.indices[draw.edges]
        everything = len(nodes) == self.graph.num_nodes  # then a node's position is its number
        columns = sources if everything else np.searchsorted(nodes, sources)
        positions = targets if everything else np.searchsorted(nodes, targets)
        weights = self._edge_weights(targets[draw.rows], sources, draw)
        counts = np.bincount(draw.rows, minlength=len(targets))
        if self.normalization == "mean":
            return _assemble(weights, columns, counts, positions, len(nodes), self.dtype)
        at_edges = np.arange(len(columns)) + draw.rows + 1  # every row begins with its self loop
        at_loops = np.cumsum(counts + 1) - (counts + 1)
        all_weights = np.empty(len(columns) + len(targets))
        all_columns = np.empty(len(all_weights), np.int64)
        all_weights[at_edges], all_columns[at_edges] = weights, columns
        loops = self._inverse[targets] ** 2 if self.normalization == "symmetric" else 1.0
        all_weights[at_loops], all_columns[at_loops] = loops, positions
        return _assemble(all_weights, all_columns, counts + 1, positions, len(nodes), self.dtype)

    def _edge_weights(
        self, targets: NDArray[np.int64], sources: NDArray[np.integer], draw: Draw
    ) -> NDArray[np.float64]:
        weights = np.ones(len(sources)) if draw.scale is None else draw.scale
        if self.graph.weights is not None:
            weights = weights * self.graph.weights[draw.edges]
        if self.normalization == "symmetric":
            return np.asarray(weights * self._inverse[targets] * self._inverse[sources])
        if self.normalization == "mean":
            return np.asarray(weights * self._inverse[targets])
        return np.ones(len(sources))  # attention and users' convolutions weigh the edges themselves


def _power(degree: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    result = np.zeros_like(degree)
    np.power(degree, exponent, out=result, where=degree > 0)
    return result


def _assemble(
    weights: NDArray[np.float64],
    columns: NDArray[np.integer],
    counts: NDArray[np.int64],
    positions: NDArray[np.int64],
    width: int,
    dtype: np.dtype[Any],
) -> Block:
    index = np.int32 if max(len(columns), width) < 2**31 else np.int64
    indptr = np.zeros(len(counts) + 1, index)
    np.cumsum(counts, out=indptr[1:])
    values = weights.astype(dtype, copy=False)
    matrix = sp.csr_array((values, columns.astype(index, copy=False), indptr), shape=(len(counts), width))
    return Block(matrix, positions)
