"""Draw neighbours of S[l+1], and build the block A(E(S[l+1], S[l])) that one layer multiplies by.

Node sets are sorted arrays of node numbers. The functions take O(N) or O(E) time only if they are called for all nodes.
A draw is a function of a key (`Stream.key`) and uses the counter-based hash of `glasu.randomness`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from glasu.data.graph import Graph
from glasu.model import kernels
from glasu.model.sparse import SparseRows
from glasu.randomness import draw_distinct, draw_smallest, find_members, split_key

NodeSet = NDArray[np.int64]
NodeLabels = NDArray[np.int32]  # a scratch array of one client: a number per node, -1 between calls; see `kernels`
Normalization = Literal["symmetric", "mean", "none"]
NORMALIZATION_NUMBERS: dict[Normalization, int] = {"none": 0, "mean": 1, "symmetric": 2}  # codes of `fill_block`
DENSE_SHARE = 0.12  # a dense product is faster above this share of nonzero entries; measured with 4,057 nodes
DENSE_LIMIT = 2**26  # entries of a dense block: 256 MiB in single precision
NO_WEIGHTS: NDArray[np.float64] = np.empty(0)


def make_labels(num_nodes: int) -> NodeLabels:
    """Return the scratch array for draws and blocks of one client. Reuse it, because it has one entry per node."""
    return np.full(num_nodes, -1, np.int32)


def is_everything(rows: NDArray[np.int64], size: int) -> bool:
    """Return whether `rows` is 0, 1, ..., size - 1."""
    return len(rows) == size and np.array_equal(rows, np.arange(size))


class Draw(NamedTuple):
    """The edges into S[l+1] that one client drew, before the clients agree on S[l]."""

    nodes: NodeSet  # S_m[l]: the sources of the drawn edges, and all nodes of S[l+1]
    starts: NDArray[np.int64]  # edges[starts[i]:starts[i + 1]] lead to node i of S[l+1]
    edges: NDArray[np.int64]  # for each drawn edge: its position in the graph's edge list
    scale: NDArray[np.float64] | None = None  # for each drawn edge: a factor that makes the block unbiased; None: 1


@dataclass(frozen=True, eq=False)
class Block:
    """One layer's share of the graph: the matrix A restricted to S[l+1] x S[l]."""

    matrix: SparseRows
    positions: NDArray[np.int64]  # the position in S[l] of each node of S[l+1]
    dense: NDArray[np.floating] | None = None  # a dense copy of the matrix, if a dense product is faster

    def edge_index(self) -> NDArray[np.int64]:
        """Return the edges as two rows: positions of the sources in S[l], positions of the targets in S[l+1]."""
        target = np.repeat(np.arange(self.matrix.shape[0]), np.diff(self.matrix.indptr))
        return np.stack([self.matrix.indices.astype(np.int64), target])

    def at(self, rows: NDArray[np.int64]) -> Block:
        """Return the block restricted to these rows."""
        if is_everything(rows, self.matrix.shape[0]):
            return self
        return Block(self.matrix.rows(rows), self.positions[rows])

    def add_dense_copy(self) -> Block:
        """Return the block with a dense copy of its matrix, if a dense product is faster and the copy small enough."""
        if self.dense is not None:
            return self
        rows, columns = self.matrix.shape
        crowded = self.matrix.nnz > DENSE_SHARE * rows * columns and rows * columns <= DENSE_LIMIT
        return replace(self, dense=self.matrix.toarray()) if crowded else self

    def compact(self, labels: NodeLabels) -> tuple[Block, NDArray[np.int64]]:
        """Return the block without unused columns, and the positions of the remaining columns."""
        matrix = self.matrix
        columns = np.sort(kernels.find_distinct(np.concatenate([matrix.indices, self.positions]), labels))
        if len(columns) == matrix.width:
            return self, columns
        labels[columns] = np.arange(len(columns))
        indices, positions = labels[matrix.indices], labels[self.positions].astype(np.int64)
        labels[columns] = -1
        return Block(SparseRows(matrix.indptr, indices, matrix.data, len(columns)), positions), columns


def find_draw_error(graph: Graph, targets: NodeSet, draw: object) -> str:
    """Return a description of the first error in a draw into `targets`, or "" if it is valid.

    The compiled loops read beyond the ends of the arrays if a draw is invalid.
    """
    if not isinstance(draw, Draw):
        return f"it must be a glasu.model.blocks.Draw, got {type(draw).__name__}"
    for name in ("nodes", "starts", "edges"):
        values = getattr(draw, name)
        if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind != "i":
            return f"{name} must be a vector of signed integers, as int64"
    nodes, starts, edges, scale = draw
    if len(nodes) and not (0 <= nodes[0] <= nodes[-1] < graph.num_nodes and (nodes[1:] > nodes[:-1]).all()):
        return "nodes must be sorted, distinct numbers of nodes in the graph"
    if not find_members(nodes, targets).all():
        return "nodes must contain all targets"
    if len(starts) != len(targets) + 1:
        return f"starts must have one entry more than there are targets, {len(targets) + 1}, got {len(starts)}"
    if starts[0] != 0 or starts[-1] != len(edges) or (starts[1:] < starts[:-1]).any():
        return "starts must begin with 0, never decrease and end with the number of edges"
    counts = np.diff(starts)
    first, last = np.repeat(graph.indptr[targets], counts), np.repeat(graph.indptr[targets + 1], counts)
    if not ((first <= edges) & (edges < last)).all():
        return "edges[starts[i]:starts[i + 1]] must be positions in row i of the graph, where i is the target"
    if not find_members(nodes, graph.indices[edges]).all():
        return "nodes must contain the sources of all edges"
    if scale is None:
        return ""
    is_vector = isinstance(scale, np.ndarray) and scale.shape == edges.shape and scale.dtype.kind == "f"
    return "" if is_vector and np.isfinite(scale).all() else "scale must be None or a vector of a finite float per edge"


def list_edges_into(graph: Graph, targets: NodeSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """List every edge into `targets`.

    Returns:
        (starts, edges): edges[starts[i]:starts[i + 1]] are the edges into target i, as positions in the edge list.
    """
    first = graph.indptr[targets]
    degrees = graph.indptr[targets + 1] - first
    starts = np.zeros(len(targets) + 1, np.int64)
    np.cumsum(degrees, out=starts[1:])
    return starts, np.arange(starts[-1]) + np.repeat(first - starts[:-1], degrees)


def draw_all(graph: Graph, targets: NodeSet) -> Draw:
    """Return a draw of every edge into the targets. Its S[l] contains every node of the graph."""
    return Draw(np.arange(graph.num_nodes), *list_edges_into(graph, targets))


def draw_neighbors(graph: Graph, targets: NodeSet, fanout: int, key: int, labels: NodeLabels) -> Draw:
    """Draw up to `fanout` neighbours of each node, uniformly without replacement (node-wise sampling).

    A drawn edge is scaled by deg / min(deg, fanout), the inverse of its probability.
    """
    return Draw(*kernels.draw_neighbors(*_list_edges(graph), targets, fanout, *split_key(key), labels))


def draw_layer(graph: Graph, targets: NodeSet, fanout: int, key: int, labels: NodeLabels) -> Draw:
    """Draw up to fanout x |S[l+1]| nodes from the neighbours of S[l+1] outside S[l+1] (layer-wise sampling).

    Edges from a drawn node are scaled by (number of these neighbours) / (number of drawn nodes). All edges inside
    S[l+1] are used, without scaling.
    """
    candidates = kernels.list_neighbors_outside(*_list_edges(graph), targets, labels)
    count = min(len(candidates), fanout * len(targets))
    drawn = draw_smallest(candidates, count, *split_key(key))
    return _keep(graph, targets, drawn, len(candidates), labels)


def draw_shared(graph: Graph, targets: NodeSet, fanout: int, key: int, labels: NodeLabels) -> Draw:
    """Draw n = min(N - |S|, fanout x |S|) nodes outside S = S[l+1], with a key that all clients share.

    The nodes do not depend on the edges of a client. Edges from a drawn node are scaled by (N - |S|) / n. All edges
    inside S are used, without scaling.
    """
    outside = graph.num_nodes - len(targets)
    count = min(outside, fanout * len(targets))
    drawn = draw_distinct(key, graph.num_nodes, count, targets)
    return _keep(graph, targets, drawn, outside, labels)


def thin_draw(graph: Graph, targets: NodeSet, draw: Draw, room: int, key: int, labels: NodeLabels) -> Draw:
    """Keep at most `room` random nodes of those that a draw added to S[l+1]; scale up the edges from the kept nodes.

    An added node is kept with probability room / added, and its edges are multiplied by added / room, so an unbiased
    block stays unbiased. If `room` is 0, only the edges inside S[l+1] are left, and the block is biased.
    """
    added = len(draw.nodes) - len(targets)
    if added <= room:
        return draw
    labels[draw.nodes] = 1
    labels[targets] = 0
    kept = draw_smallest(draw.nodes[labels[draw.nodes] == 1], room, *split_key(key))
    labels[draw.nodes] = -1
    labels[kept] = 1
    labels[targets] = 0
    found = labels[graph.indices[draw.edges]]
    labels[kept] = -1
    labels[targets] = -1
    used = found >= 0
    scale = np.ones(len(used)) if draw.scale is None else draw.scale
    scale = np.where(found == 1, scale * (added / max(1, room)), scale)[used]
    starts = np.concatenate([[0], np.cumsum(used)])[draw.starts]
    return Draw(_unite(targets, kept), starts, draw.edges[used], scale)


def draw_induced(graph: Graph, targets: NodeSet, nodes: NodeSet, labels: NodeLabels) -> Draw:
    """Return a draw of every edge from `nodes` into `targets`, without scaling."""
    starts, edges, _ = kernels.list_edges_between(*_list_edges(graph), targets, nodes, labels)
    return Draw(nodes, starts, edges)


def _list_edges(graph: Graph) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    return np.asarray(graph.indptr), np.asarray(graph.indices)  # numba requires plain arrays, not memory maps


def _unite(targets: NodeSet, new: NodeSet) -> NodeSet:
    """Return the union of two disjoint sets."""
    return np.sort(np.concatenate([targets, new]))


def _keep(graph: Graph, targets: NodeSet, drawn: NodeSet, population: int, labels: NodeLabels) -> Draw:
    """Keep the edges from `targets` and from the drawn nodes, and scale up the edges from the drawn nodes.

    The nodes were drawn from `population` candidates, so the factor is population / number of drawn nodes.
    """
    starts, edges, outside = kernels.list_edges_between(*_list_edges(graph), targets, drawn, labels)
    scale = np.where(outside, population / max(1, len(drawn)), 1.0)
    return Draw(_unite(targets, drawn), starts, edges, scale)


class Adjacency:
    """Builds blocks of A(E_m), normalised by the degrees of the client's full graph.

    symmetric: D^-1/2 (A + I) D^-1/2, where D counts the self loop; mean: D^-1 A, without self loops; none: A + I.
    """

    def __init__(self, graph: Graph, normalization: Normalization, dtype: np.dtype[Any]) -> None:
        self.graph, self.normalization, self.dtype = graph, normalization, dtype
        self.labels = make_labels(graph.num_nodes)
        self._indices = np.asarray(graph.indices)  # numba requires a plain array, not a memory map
        self._weights = np.empty(0, np.float32) if graph.weights is None else np.asarray(graph.weights)
        if normalization == "symmetric":
            self._inverse = _raise_degrees(graph.degree + 1.0, -0.5)
        else:
            self._inverse = _raise_degrees(graph.degree, -1.0) if normalization == "mean" else NO_WEIGHTS

    def block(self, targets: NodeSet, nodes: NodeSet, draw: Draw) -> Block:
        """Build the block with rows `targets` and columns `nodes`.

        If only other clients drew a node, its column is empty.
        """
        rows, loops = len(targets), self.normalization != "mean"
        size = len(draw.edges) + (rows if loops else 0)
        index = np.int32 if max(size, len(nodes)) < 2**31 else np.int64
        indptr, columns = np.empty(rows + 1, index), np.empty(size, index)
        values, positions = np.empty(size, self.dtype), np.empty(rows, np.int64)
        kernels.fill_block(
            self._indices,
            self._weights,
            targets,
            nodes,
            draw.starts,
            draw.edges,
            NO_WEIGHTS if draw.scale is None else draw.scale,
            self._inverse,
            NORMALIZATION_NUMBERS[self.normalization],
            self.labels,
            indptr,
            columns,
            values,
            positions,
        )
        return Block(SparseRows(indptr, columns, values, len(nodes)), positions)


def _raise_degrees(degree: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    result = np.zeros_like(degree)
    np.power(degree, exponent, out=result, where=degree > 0)
    return result
