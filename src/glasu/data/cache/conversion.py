"""Conversion: graphs, features, splits and parties as arrays of the store, and back without reading them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from glasu.data.cache.workspace import PIECE_BYTES
from glasu.data.edges import divide_edges
from glasu.data.partition import WholeGraph, feature_bounds, party_name
from glasu.data.party import (
    SPARSE_BELOW,
    Features,
    Graph,
    Known,
    PartyData,
    SplitFacts,
    Splits,
    ids_sha256,
    mean_root,
    squared_lengths,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from glasu.data.cache.store import Entry
    from glasu.data.cache.workspace import Workspace

SPLITS = ("train", "validation", "test")
Facts = dict[str, Any]


def write_graph(workspace: Workspace, graph: Graph, prefix: str = "") -> None:
    """Write what `open_graph` opens; the degrees too, where they are sums of weights."""
    workspace.keep(f"{prefix}indptr", graph.indptr)
    workspace.keep(f"{prefix}indices", graph.indices)
    if graph.weights is not None:
        workspace.keep(f"{prefix}weights", graph.weights)
        workspace.keep(f"{prefix}degree", graph.degree)


def open_graph(entry: Entry, prefix: str = "") -> Graph:
    """Return a stored graph."""
    arrays = entry.arrays
    weights, degree = arrays.get(f"{prefix}weights"), arrays.get(f"{prefix}degree")
    return Graph.opened(arrays[f"{prefix}indptr"], arrays[f"{prefix}indices"], weights, degree)


def write_features(
    workspace: Workspace, features: Features, prefix: str = "", columns: slice = slice(None)
) -> dict[str, Any]:
    """Write some columns of features, in the form that `compact` gives them; return what `open_features` must know."""
    filled, squares = 0, [np.empty(0)]
    for piece in _pieces(features, columns):
        filled += int(np.count_nonzero(piece)) if isinstance(piece, np.ndarray) else piece.nnz
        squares.append(squared_lengths(piece))
    rows, width = features.shape[0], len(range(*columns.indices(features.shape[1])))
    if filled / max(1, rows * width) < SPARSE_BELOW:
        _write_sparse(workspace, features, prefix, columns, filled)
    elif isinstance(features, np.ndarray) and columns == slice(None):
        workspace.keep(f"{prefix}x", features)
    else:
        dense = workspace.growing(f"{prefix}x", np.float32, width)
        for piece in _pieces(features, columns):
            dense.append(piece if isinstance(piece, np.ndarray) else piece.toarray())
        dense.finish()
    return {"shape": [rows, width], "mean_length": mean_root(np.concatenate(squares))}


def _write_sparse(workspace: Workspace, features: Features, prefix: str, columns: slice, filled: int) -> None:
    index = np.int32 if filled < 2**31 else np.int64
    data = workspace.growing(f"{prefix}x_data", np.float32)
    indices = workspace.growing(f"{prefix}x_indices", index)
    indptr = workspace.growing(f"{prefix}x_indptr", index)
    indptr.append(np.zeros(1, index))
    before = 0
    for piece in _pieces(features, columns):
        sparse = sp.csr_array(piece)
        data.append(sparse.data)
        indices.append(sparse.indices)
        indptr.append(sparse.indptr[1:].astype(index) + index(before))
        before += sparse.nnz
    for growing in (data, indices, indptr):
        growing.finish()


def _pieces(features: Features, columns: slice) -> Iterator[Features]:
    """Yield some columns of features, some rows at a time, sparse ones without stored zeros."""
    rows, width = features.shape
    filled = rows * width if isinstance(features, np.ndarray) else features.nnz
    size = max(1, rows * PIECE_BYTES // (8 * max(1, filled)))
    for start in range(0, max(1, rows), size):
        piece = features[start : start + size, columns]
        if not isinstance(piece, np.ndarray):
            piece.sum_duplicates()
            piece.eliminate_zeros()
        yield piece


def open_features(entry: Entry, facts: Facts, prefix: str = "") -> Features:
    """Return stored features."""
    arrays = entry.arrays
    if f"{prefix}x" in arrays:
        return arrays[f"{prefix}x"]
    sparse = sp.csr_array(tuple(facts["shape"]), dtype=np.float32)  # filled by hand: scipy would read all indices
    sparse.data, sparse.indices, sparse.indptr = (arrays[f"{prefix}x_{part}"] for part in ("data", "indices", "indptr"))
    sparse.has_sorted_indices = sparse.has_canonical_format = True
    return sparse


def write_splits(workspace: Workspace, splits: Splits, prefix: str = "") -> Facts:
    """Write what `open_splits` opens, and return what it must know."""
    for part in SPLITS:
        workspace.keep(f"{prefix}{part}", getattr(splits, part))
    return dataclasses.asdict(splits.facts)


def open_splits(entry: Entry, facts: Facts, prefix: str = "") -> Splits:
    """Return stored splits."""
    train, validation, test = (entry.arrays[f"{prefix}{part}"] for part in SPLITS)
    return Splits.opened((train, validation, test), SplitFacts(**facts))


def write_data(workspace: Workspace, data: WholeGraph | Sequence[PartyData]) -> Facts:
    """Write one graph, or parties; return what `open_data` must know."""
    return write_whole(workspace, data) if isinstance(data, WholeGraph) else write_parties(workspace, data)


def open_data(entry: Entry) -> WholeGraph | list[PartyData]:
    """Return the stored graph, or the stored parties."""
    return open_parties(entry) if "parties" in entry.facts else open_whole(entry)


def write_whole(workspace: Workspace, whole: WholeGraph) -> Facts:
    """Write one undivided graph, checked; return what `open_whole` must know."""
    return _write_owned(workspace, whole.as_party(), {})


def open_whole(entry: Entry) -> WholeGraph:
    """Return a stored graph that is still to be divided."""
    party = _open_party(entry, entry.facts, entry.key)
    return WholeGraph(
        party.ids, party.features, party.graph, party.labels, party.classes, party.splits, known=party.known
    )


def write_parties(workspace: Workspace, parties: Sequence[PartyData]) -> Facts:
    """Write parties; what several of them share is written once. Return what `open_parties` must know."""
    shared: dict[int, str] = {}
    return {
        "parties": [
            _write_owned(workspace, party, shared, f"{number}.") | {"name": party.name, "columns": party.feature_names}
            for number, party in enumerate(parties)
        ]
    }


def open_parties(entry: Entry) -> list[PartyData]:
    """Return stored parties."""
    return [
        replace(
            _open_party(entry, facts, f"{entry.key}/{number}"),
            name=facts["name"],
            feature_names=tuple(facts["columns"]),
        )
        for number, facts in enumerate(entry.facts["parties"])
    ]


def _write_owned(workspace: Workspace, party: PartyData, shared: dict[int, str], prefix: str = "") -> Facts:
    """Write all that a party has but its name; `shared` tells where what was written before lies."""
    write_graph(workspace, party.graph, prefix)

    def once(name: str, item: NDArray[Any] | Splits | None) -> str | None:
        if item is None:
            return None
        if id(item) not in shared:
            shared[id(item)] = f"{prefix}{name}"
            if isinstance(item, Splits):
                write_splits(workspace, item, f"{prefix}{name}.")
            else:
                workspace.keep(f"{prefix}{name}", item)
        return shared[id(item)]

    return {
        "prefix": prefix,
        "features": write_features(workspace, party.features, prefix),
        "ids": once("ids", party.ids),
        "ids_sha256": party.ids_digest(),
        "labels": once("labels", party.labels),
        "classes": list(party.classes),
        "splits": once("splits", party.splits),
        "split_facts": None if party.splits is None else dataclasses.asdict(party.splits.facts),
    }


def _open_party(entry: Entry, facts: Facts, key: str) -> PartyData:
    prefix = facts["prefix"]
    labels = None if facts["labels"] is None else entry.arrays[facts["labels"]]
    known = Known(
        key=key,
        ids=entry.arrays[facts["ids"]],
        ids_sha256=facts["ids_sha256"],
        features=open_features(entry, facts["features"], prefix),
        mean_length=facts["features"]["mean_length"],
        graph=open_graph(entry, prefix),
        labels=labels,
        classes=tuple(facts["classes"]),
    )
    splits = None
    if facts["splits"] is not None:
        splits = open_splits(entry, facts["split_facts"], f"{facts['splits']}.")
    return PartyData("all", known.ids, known.features, known.graph, labels, known.classes, splits, known=known)


def write_division(workspace: Workspace, whole: WholeGraph, num_clients: int, edge_fraction: float, seed: int) -> Facts:
    """Write what `partition` gives each client of edges and feature columns; return what `open_division` must know."""
    bounds = feature_bounds(whole.features.shape[1], num_clients)
    names = [party_name(client) for client in range(num_clients)]
    facts = []
    graphs = divide_edges(whole.graph, names, edge_fraction, seed, workspace)
    for name, graph, (start, stop) in zip(names, graphs, pairwise(bounds), strict=True):
        if graph is not whole.graph:
            write_graph(workspace, graph, f"{name}.")
        facts.append(write_features(workspace, whole.features, f"{name}.", slice(start, stop)))
    return {"features": facts}


def open_division(entry: Entry, whole: WholeGraph) -> list[PartyData]:
    """Return the clients of a stored division; ids, labels and splits are those of the whole."""
    ids_digest = whole.known.ids_sha256 if whole.known is not None else ids_sha256(whole.ids)
    parties = []
    for client, facts in enumerate(entry.facts["features"]):
        name = party_name(client)
        known = Known(
            key=f"{entry.key}/{name}",
            ids=whole.ids,
            ids_sha256=ids_digest,
            features=open_features(entry, facts, f"{name}."),
            mean_length=facts["mean_length"],
            graph=open_graph(entry, f"{name}.") if f"{name}.indptr" in entry.arrays else whole.graph,
            labels=whole.labels,
            classes=whole.classes,
        )
        parties.append(replace(whole, features=known.features, graph=known.graph, known=known).as_party(name))
    return parties
