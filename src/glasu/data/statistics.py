"""The size of a data set, and whether it equals the paper's Table 1."""

from __future__ import annotations

from collections.abc import Sequence

from glasu.data.cache.store import Cache
from glasu.data.graph import count_linked_pairs
from glasu.data.party import PartyData
from glasu.data.sources import Statistics, find_source


def count_statistics(parties: Sequence[PartyData], cache: Cache | None = None, *, divided: bool = False) -> Statistics:
    """Count nodes, edges, features and classes as the paper does.

    Args:
        parties: one graph that is divided among the clients, or the data of each party.
        cache: stores the number of pairs, for parties that come from the cache.
        divided: whether to count the directed edges of a single graph. If False, count the pairs of nodes that have an
            edge in at least one graph.
    """
    if divided:
        (whole,) = parties
        return Statistics(whole.num_nodes, whole.graph.num_edges, whole.num_features, len(whole.classes))
    graphs = [party.graph for party in parties]
    keys = [party.cache_key() for party in parties]
    if None in keys:
        pairs = count_linked_pairs(graphs)
    else:
        about = {"kind": "linked pairs", "parties": keys}
        entry = (cache or Cache()).open(about, lambda _: {"pairs": count_linked_pairs(graphs)})
        pairs = entry.facts["pairs"]
    features = sum(party.num_features for party in parties)
    classes = max(len(party.classes) for party in parties)
    return Statistics(parties[0].num_nodes, pairs, features, classes, "undirected")


def compare_with_paper(found: Statistics, name: str) -> dict[str, tuple[int, int]] | None:
    """Return {quantity: (found, in the paper)} where they differ; None if the data set is not in the paper's table."""
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
    return f"{line}; different from the paper's table: {listed}"
