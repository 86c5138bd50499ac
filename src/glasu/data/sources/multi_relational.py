"""Several graphs over one list of nodes: what HeriGraph and the `.npz` sets hold before it is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from glasu.data.partition import WholeGraph, party_name
from glasu.data.party import Features, Graph, PartyData, Splits
from glasu.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Relations:
    """Nodes with one graph and one block of feature columns per relation; labels and the source's own splits."""

    ids: NDArray[np.int64] | NDArray[np.str_]
    graphs: dict[str, Graph]  # relation -> E_m
    blocks: tuple[Features, ...]  # X_m, one per relation
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    splits: Splits | None = None

    def opened(self) -> WholeGraph | list[PartyData]:
        """Return one graph, still to be divided, if there is one relation; else a party a, b, c, ... per relation."""
        if len(self.graphs) == 1:
            (graph,), (features,) = self.graphs.values(), self.blocks
            return WholeGraph(self.ids, features, graph, self.labels, self.classes, self.splits)
        return [
            PartyData(party_name(client), self.ids, features, graph, self.labels, self.classes, self.splits)
            for client, (features, graph) in enumerate(zip(self.blocks, self.graphs.values(), strict=True))
        ]


def undirected_graph(ends: NDArray[np.integer], num_nodes: int, weights: NDArray[np.floating] | None = None) -> Graph:
    """Return both directions of each edge in `ends`, shape (2, E), without self loops.

    An edge that is listed twice counts once, with the larger of its weights: a list may hold each direction, and adding
    them up would double it. Time is O(E) without weights.
    """
    if ends.size and (ends.min() < 0 or ends.max() >= num_nodes):
        bad = np.flatnonzero(((ends < 0) | (ends >= num_nodes)).any(axis=0))[0]
        raise DataError(f"edge {bad}: an end of it is out of range; nodes are numbered 0..{num_nodes - 1}.")
    kept = ends[0] != ends[1]
    low, high = np.minimum(*ends)[kept], np.maximum(*ends)[kept]
    if weights is None:
        upper = sp.coo_array((np.ones(len(low), bool), (low, high)), shape=(num_nodes, num_nodes)).tocsr()
        both = upper + upper.T.tocsr()
        both.sort_indices()
        return Graph(both.indptr.astype(np.int64), both.indices.astype(np.int32, copy=False))
    weights = weights[kept].astype(np.float32)
    order = np.lexsort((-weights, high, low))
    low, high, weights = low[order], high[order], weights[order]
    first = np.ones(len(low), bool)
    first[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    low, high, weights = low[first], high[first], weights[first]
    both_weights = np.concatenate([weights, weights])
    return Graph.from_edges(np.concatenate([low, high]), np.concatenate([high, low]), num_nodes, both_weights)
