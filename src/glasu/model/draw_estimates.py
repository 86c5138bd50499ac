"""The expected size of draws, which limits the memory of a run before it allocates any."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from glasu.data.graph import Graph


class DrawEstimate(NamedTuple):
    """The expected size of a draw for layer l."""

    nodes: int  # |S_m[l]|
    numbers: int  # 64-bit numbers that each round keeps; 0: the draw is the same array in all rounds

    @classmethod
    def of_edges(cls, num_targets: int, nodes: int, edges: int) -> DrawEstimate:
        """Return the estimate for a draw of new edges: nodes, row starts, and edges with their factors."""
        return cls(nodes, nodes + num_targets + 1 + 2 * edges)


class EdgeCounts:
    """Estimates how many edges lead into some nodes of a graph, and how many of them are drawn."""

    def __init__(self, graph: Graph, fanout: int) -> None:
        degrees = np.diff(graph.indptr)
        limited = np.minimum(degrees, fanout)
        self.num_nodes, self._entering, self._drawn = graph.num_nodes, graph.num_edges, int(limited.sum())
        # A node with many edges is drawn often, so the mean over drawn nodes is weighted by their degrees.
        self._per_node = float(degrees.astype(np.float64) @ limited) / max(1, graph.num_edges)

    def count_entering(self, size: int) -> int:
        """Return the expected number of edges into `size` random nodes."""
        return self._entering * size // max(1, self.num_nodes)

    def count_drawn(self, size: int) -> int:
        """Return the number of edges that are drawn into `size` nodes, up to `fanout` per node."""
        return min(self._drawn, int(self._per_node * size))

    def count_kept(self, size: int, reached: int, found: int) -> int:
        """Return the number of edges into `size` nodes whose source is among `found` of `reached` nodes."""
        return self.count_entering(size) * found // max(1, reached)
