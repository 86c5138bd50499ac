"""Estimate the size of draws, to check the memory of a run before the run allocates it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from glasu.data.graph import Graph


class DrawEstimate(NamedTuple):
    """The expected size of a draw for layer l."""

    nodes: int  # |S_m[l]|
    numbers: int  # 64-bit numbers that are stored for each round; 0: all rounds share one draw

    @classmethod
    def of_edges(cls, num_targets: int, nodes: int, edges: int) -> DrawEstimate:
        """Return the estimate for a draw that stores its own nodes, row starts, edges and factors of the edges."""
        return cls(nodes, nodes + num_targets + 1 + 2 * edges)


class EdgeCounts:
    """Estimates the number of edges into a set of nodes, and the number of these edges that are drawn."""

    def __init__(self, graph: Graph, fanout: int) -> None:
        degrees = np.diff(graph.indptr)
        limited = np.minimum(degrees, fanout)
        self.num_nodes, self._entering, self._drawn = graph.num_nodes, graph.num_edges, int(limited.sum())
        # A node with many edges is drawn more often, so the mean over drawn nodes is weighted by degree.
        self._per_node = float(degrees.astype(np.float64) @ limited) / max(1, graph.num_edges)

    def count_entering(self, size: int) -> int:
        """Return the expected number of edges into `size` random nodes."""
        return self._entering * size // max(1, self.num_nodes)

    def count_drawn(self, size: int) -> int:
        """Return the expected number of drawn edges into `size` nodes, with at most `fanout` edges per node."""
        return min(self._drawn, int(self._per_node * size))

    def count_kept(self, size: int, reached: int, found: int) -> int:
        """Return the expected number of edges from drawn nodes into `size` nodes.

        `found` of `reached` possible source nodes are drawn.
        """
        return self.count_entering(size) * found // max(1, reached)
