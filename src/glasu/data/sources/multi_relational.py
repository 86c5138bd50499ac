"""Several graphs over one list of nodes, as in HeriGraph and in `.npz` files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from glasu.data.partition import name_client
from glasu.data.party import PartyData, Splits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from glasu.data.cache.parties import Dataset
    from glasu.data.graph import Graph
    from glasu.data.preprocessing import Features


@dataclass(frozen=True, eq=False)
class Relations:
    """Nodes with one graph and one block of feature columns per relation."""

    ids: NDArray[np.int64] | NDArray[np.str_]
    graphs: dict[str, Graph]  # relation -> E_m
    blocks: tuple[Features, ...]  # X_m, one per relation
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    splits: Splits | None = None

    def make_parties(self) -> Dataset:
        """Return one graph to divide if there is one relation; otherwise a party a, b, c, ... per relation."""
        if len(self.graphs) == 1:
            (graph,), (features,) = self.graphs.values(), self.blocks
            return PartyData("all", self.ids, features, graph, self.labels, self.classes, self.splits)
        return [
            PartyData(name_client(client), self.ids, features, graph, self.labels, self.classes, self.splits)
            for client, (features, graph) in enumerate(zip(self.blocks, self.graphs.values(), strict=True))
        ]
