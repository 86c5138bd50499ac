"""How large a data set is, and whether that is what the paper's table says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import scipy.sparse as sp

from glasu.data.cache.store import stored
from glasu.data.partition import WholeGraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from glasu.data.party import Graph, PartyData

Counted = Literal["directed", "undirected"]


@dataclass(frozen=True)
class Statistics:
    """One row of the paper's Table 1."""

    nodes: int
    edges: int
    features: int
    classes: int
    counted: Counted = "directed"  # undirected: each linked pair once, over the union of the parties' graphs

    def __str__(self) -> str:
        return (
            f"{self.nodes} nodes, {self.edges} {self.counted} edges, {self.features} features, {self.classes} classes"
        )


PAPER_TABLE = {
    "cora": Statistics(2_708, 10_556, 1_433, 7),
    "pubmed": Statistics(19_717, 88_648, 500, 3),
    "citeseer": Statistics(3_327, 9_104, 3_703, 6),
    "suzhou": Statistics(3_137, 916_496, 979, 9, "undirected"),
    "venice": Statistics(2_951, 534_513, 979, 9, "undirected"),
    "amsterdam": Statistics(3_727, 1_271_171, 979, 9, "undirected"),
    "reddit": Statistics(232_965, 114_615_892, 602, 41),
}


def describe(data: WholeGraph | Sequence[PartyData]) -> Statistics:
    """Count as the paper does: one graph by its directed edges, several by the undirected edges of their union."""
    if isinstance(data, WholeGraph):
        return Statistics(len(data.ids), data.graph.num_edges, int(data.features.shape[1]), len(data.classes))
    features = sum(party.num_features for party in data)
    classes = max(len(party.classes) for party in data)
    keys = [party.stored_as() for party in data]
    if None in keys:
        pairs = _linked_pairs([party.graph for party in data])
    else:
        about = {"kind": "linked pairs", "parties": keys}
        pairs = stored(about, lambda _: {"pairs": _linked_pairs([party.graph for party in data])}).facts["pairs"]
    return Statistics(data[0].num_nodes, pairs, features, classes, "undirected")


def differences(found: Statistics, name: str) -> dict[str, tuple[int, int]] | None:
    """Return {what: (found, in the paper's table)} where they differ, or None if the table has no such set."""
    paper = PAPER_TABLE.get(name.removeprefix("heri_"))
    if paper is None:
        return None
    pairs = {key: (getattr(found, key), getattr(paper, key)) for key in ("nodes", "edges", "features", "classes")}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def summary(found: Statistics, name: str) -> str:
    """Return one line: the sizes and, for a set of the paper, whether they equal its table."""
    differing = differences(found, name)
    line = f"{name or 'the parties'}: {found}"
    if differing is None:
        return line
    if not differing:
        return f"{line}; equal to the paper's table"
    listed = ", ".join(f"{key} {ours} (paper: {theirs})" for key, (ours, theirs) in differing.items())
    return f"{line}; unlike the paper's table: {listed}"


def _linked_pairs(graphs: Sequence[Graph]) -> int:
    """Count the pairs of nodes that some graph links in some direction, in O(E)."""
    size = graphs[0].num_nodes
    held = [
        sp.csr_array((np.ones(graph.num_edges, bool), graph.indices, graph.indptr), (size, size)) for graph in graphs
    ]
    union = held[0]
    for more in held[1:]:
        union = union + more
    both = union + union.T.tocsr()
    return int(both.nnz) // 2  # no graph has self loops
