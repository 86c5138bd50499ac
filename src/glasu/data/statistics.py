"""The size of a data set, and whether it equals the paper's Table 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasu.data.cache.store import Cache
from glasu.data.graph import count_linked_pairs
from glasu.data.party import PartyData
from glasu.data.sources import find_source
from glasu.data.sources.source import Statistics

if TYPE_CHECKING:
    from glasu.data.cache.parties import Dataset


def describe(data: Dataset, cache: Cache | None = None) -> Statistics:
    """Count as the paper does: the directed edges of one graph, or the undirected edges in the union of several."""
    if isinstance(data, PartyData):
        return Statistics(data.num_nodes, data.graph.num_edges, data.num_features, len(data.classes))
    graphs = [party.graph for party in data]
    keys = [party.cache_key() for party in data]
    if None in keys:
        pairs = count_linked_pairs(graphs)
    else:
        about = {"kind": "linked pairs", "parties": keys}
        entry = (cache or Cache()).open(about, lambda _: {"pairs": count_linked_pairs(graphs)})
        pairs = entry.facts["pairs"]
    features = sum(party.num_features for party in data)
    classes = max(len(party.classes) for party in data)
    return Statistics(data[0].num_nodes, pairs, features, classes, "undirected")


def compare_with_paper(found: Statistics, name: str) -> dict[str, tuple[int, int]] | None:
    """Return {quantity: (found, in the paper)} where they differ, or None if the paper's table has no such set."""
    paper = find_source(name).paper
    if paper is None:
        return None
    pairs = {key: (getattr(found, key), getattr(paper, key)) for key in ("nodes", "edges", "features", "classes")}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def describe_size(found: Statistics, name: str) -> str:
    """Return one line with the sizes and, for data sets of the paper, a comparison with its table."""
    differing = compare_with_paper(found, name)
    line = f"{name or 'the parties'}: {found}"
    if differing is None:
        return line
    if not differing:
        return f"{line}; equal to the paper's table"
    listed = ", ".join(f"{key} {ours} (paper: {theirs})" for key, (ours, theirs) in differing.items())
    return f"{line}; unlike the paper's table: {listed}"
