"""Several graphs over one list of nodes: what HeriGraph and the `.npz` sets hold before it is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from glasu.data.partition import WholeGraph, party_name
from glasu.data.party import Features, Graph, PartyData, Splits

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


def undirected_graph(
    ends: NDArray[np.integer], num_nodes: int, weights: NDArray[np.floating] | None = None
) -> Graph:
    """Return both directions of each edge in `ends`, shape (2, E); an edge listed twice counts once, with its weight.

    Of different weights for one edge the largest counts: a list may hold each direction, and adding would double it.
    """
    low, high = np.minimum(*ends).astype(np.int64), np.maximum(*ends).astype(np.int64)
    if weights is not None:
        order = np.lexsort((-weights, high, low))
        low, high, weights = low[order], high[order], weights[order]
        first = np.ones(len(low), bool)
        first[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
        low, high, weights = low[first], high[first], weights[first]
        weights = np.concatenate([weights, weights])
    return Graph.from_edges(np.concatenate([low, high]), np.concatenate([high, low]), num_nodes, weights)
