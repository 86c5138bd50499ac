"""Parties and splits as cache entries: written once, opened without reading features or edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from glasu.data.cache.arrays import Workspace
from glasu.data.graph import Graph
from glasu.data.partition import divide_edges, draw_splits_by_fraction, feature_bounds, name_client, partition
from glasu.data.party import CachedFacts, PartyData, SplitFacts, Splits
from glasu.data.preprocessing import SPARSE_BELOW, Features, mean_root, squared_lengths
from glasu.records import read_record, to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from glasu.data.cache.store import Cache, Entry, Facts

Dataset: TypeAlias = PartyData | list[PartyData]  # one graph to divide among clients, or the data of each party
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class PartyFacts:
    """The facts of an entry about one party. The entry of a partition holds no ids, labels and splits."""

    prefix: str  # of the names of the party's own arrays
    name: str
    feature_names: tuple[str, ...]
    feature_shape: tuple[int, int]
    mean_length: float
    graph: bool  # whether the entry holds the edges
    ids: str | None
    ids_sha256: str
    labels: str | None
    classes: tuple[str, ...]
    splits: str | None
    split_facts: SplitFacts | None


def read_files(
    cache: Cache, about: Mapping[str, object], files: Sequence[Path], read: Callable[[Workspace], Dataset]
) -> Dataset:
    """Read files; convert large files once and then open the converted data.

    Args:
        cache: holds the converted data.
        about: everything beside the content of the files that decides the result, as JSON.
        files: all files that `read` reads.
        read: reads them; it may write large arrays to the workspace.
    """
    if not cache.covers(files):
        return read(Workspace())
    return open_dataset(cache.open_for_files(files, about, lambda workspace: write_dataset(workspace, read(workspace))))


def compute_once(cache: Cache, about: Mapping[str, object], compute: Callable[[Workspace], Dataset]) -> Dataset:
    """Return the data that `about` describes; compute it once and then open it."""
    return open_dataset(cache.open(about, lambda workspace: write_dataset(workspace, compute(workspace))))


def partition_once(
    cache: Cache, whole: PartyData, num_clients: int, edge_fraction: float, seed: int
) -> list[PartyData]:
    """Return `partition(whole, ...)`; if the graph comes from the cache, so does its partition."""
    key = whole.cache_key()
    if key is None:
        return partition(whole, num_clients, edge_fraction, seed)
    about = {
        "kind": "division",
        "source": key,
        "num_clients": num_clients,
        "edge_fraction": edge_fraction,
        "seed": seed if edge_fraction < 1 else None,
    }
    entry = cache.open(about, lambda workspace: write_partition(workspace, whole, num_clients, edge_fraction, seed))
    return open_partition(entry, whole)


def draw_splits_once(cache: Cache, source: PartyData, fractions: tuple[float, float, float], seed: int) -> Splits:
    """Return `draw_splits_by_fraction(labels, ...)`; if the labels come from the cache, so do the splits."""
    labels = source.labels
    assert labels is not None
    if source.cached is None or source.cached.labels is not labels:
        return draw_splits_by_fraction(labels, fractions, seed)
    about = {"kind": "splits", "source": source.cached.key, "fractions": fractions, "seed": seed}

    def build(workspace: Workspace) -> Facts:
        splits = draw_splits_by_fraction(labels, fractions, seed)
        _write_splits(workspace, splits, "")
        return to_plain(splits.facts)

    entry = cache.open(about, build)
    return _open_splits(entry, read_record(SplitFacts, entry.facts, entry.key), "")


# Writing


def write_dataset(workspace: Workspace, data: Dataset) -> Facts:
    """Write one graph, or parties; return the facts for `open_dataset`. Arrays that parties share are written once."""
    if isinstance(data, PartyData):  # no prefix: `collect_edges` may have made these arrays in the workspace
        return {"graph": to_plain(_write_party(workspace, data, "", {}, slice(None)))}
    shared: dict[int, str] = {}
    return {
        "parties": [
            to_plain(_write_party(workspace, party, f"{number}.", shared, slice(None)))
            for number, party in enumerate(data)
        ]
    }


def write_partition(workspace: Workspace, whole: PartyData, num_clients: int, edge_fraction: float, seed: int) -> Facts:
    """Write edges and feature columns of each client of a partition; return the facts for `open_partition`."""
    names = [name_client(client) for client in range(num_clients)]
    graphs = divide_edges(whole.graph, names, edge_fraction, seed, workspace)
    bounds = pairwise(feature_bounds(whole.num_features, num_clients))
    facts = []
    for name, graph, (start, stop) in zip(names, graphs, bounds, strict=True):
        # The party keeps all columns here, because a copy of some columns might not fit into memory.
        party = replace(whole, name=name, graph=graph)
        facts.append(to_plain(_write_party(workspace, party, f"{name}.", {}, slice(start, stop), whole)))
    return {"clients": facts}


def _write_party(
    workspace: Workspace,
    party: PartyData,
    prefix: str,
    shared: dict[int, str],
    columns: slice,
    whole: PartyData | None = None,
) -> PartyFacts:
    """Write some feature columns of a party, and its other arrays unless they belong to the undivided graph.

    Args:
        workspace: receives the arrays.
        party: the data.
        prefix: of the names of its arrays.
        shared: the names of the arrays written so far, by the id of the object.
        columns: of the features.
        whole: the undivided graph.
    """

    def write_once(name: str, item: NDArray[Any] | Splits | None) -> str | None:
        if item is None or whole is not None:
            return None
        if id(item) not in shared:
            shared[id(item)] = f"{prefix}{name}"
            if isinstance(item, Splits):
                _write_splits(workspace, item, f"{prefix}{name}.")
            else:
                workspace.keep(f"{prefix}{name}", item)
        return shared[id(item)]

    has_own_graph = whole is None or party.graph is not whole.graph
    if has_own_graph:
        _write_graph(workspace, party.graph, prefix)
    width = len(range(*columns.indices(party.num_features)))
    return PartyFacts(
        prefix=prefix,
        name=party.name,
        feature_names=party.feature_names[columns],
        feature_shape=(party.num_nodes, width),
        mean_length=_write_features(workspace, party.features, prefix, columns, width),
        graph=has_own_graph,
        ids=write_once("ids", party.ids),
        ids_sha256=party.ids_digest(),
        labels=write_once("labels", party.labels),
        classes=party.classes,
        splits=write_once("splits", party.splits),
        split_facts=None if party.splits is None else party.splits.facts,
    )


def _write_graph(workspace: Workspace, graph: Graph, prefix: str) -> None:
    """Write the edges; if they have weights, write the degrees too, because computing them reads all weights."""
    workspace.keep(f"{prefix}indptr", graph.indptr)
    workspace.keep(f"{prefix}indices", graph.indices)
    if graph.weights is not None:
        workspace.keep(f"{prefix}weights", graph.weights)
        workspace.keep(f"{prefix}degree", graph.degree)


def _write_features(workspace: Workspace, features: Features, prefix: str, columns: slice, width: int) -> float:
    """Write `width` columns of features in the form of `compact_features`; return the mean length of their rows."""
    filled, squares = 0, [np.empty(0)]
    for piece in _feature_pieces(features, columns, workspace.piece_bytes):
        filled += int(np.count_nonzero(piece)) if isinstance(piece, np.ndarray) else piece.nnz
        squares.append(squared_lengths(piece))
    if filled / max(1, features.shape[0] * width) < SPARSE_BELOW:
        _write_sparse(workspace, features, prefix, columns, filled)
    elif isinstance(features, np.ndarray) and columns == slice(None):
        workspace.keep(f"{prefix}x", features)
    else:
        dense = workspace.writer(f"{prefix}x", np.float32, width)
        for piece in _feature_pieces(features, columns, workspace.piece_bytes):
            dense.append(piece if isinstance(piece, np.ndarray) else piece.toarray())
        dense.finish()
    return mean_root(np.concatenate(squares))


def _write_sparse(workspace: Workspace, features: Features, prefix: str, columns: slice, filled: int) -> None:
    index = np.int32 if filled < 2**31 else np.int64
    data = workspace.writer(f"{prefix}x_data", np.float32)
    indices = workspace.writer(f"{prefix}x_indices", index)
    indptr = workspace.writer(f"{prefix}x_indptr", index)
    indptr.append(np.zeros(1, index))
    before = 0
    for piece in _feature_pieces(features, columns, workspace.piece_bytes):
        sparse = sp.csr_array(piece)
        data.append(sparse.data)
        indices.append(sparse.indices)
        indptr.append(sparse.indptr[1:].astype(index) + index(before))
        before += sparse.nnz
    for writer in (data, indices, indptr):
        writer.finish()


def _feature_pieces(features: Features, columns: slice, piece_bytes: int) -> Iterator[Features]:
    """Yield some columns of features in pieces of rows; sparse pieces hold no explicit zeros."""
    rows, width = features.shape
    filled = rows * width if isinstance(features, np.ndarray) else features.nnz
    size = max(1, rows * piece_bytes // (8 * max(1, filled)))
    for start in range(0, max(1, rows), size):
        piece = features[start : start + size, columns]
        if not isinstance(piece, np.ndarray):
            piece.sum_duplicates()
            piece.eliminate_zeros()
        yield piece


def _write_splits(workspace: Workspace, splits: Splits, prefix: str) -> None:
    for part in SPLITS:
        workspace.keep(f"{prefix}{part}", getattr(splits, part))


# Opening


def open_dataset(entry: Entry) -> Dataset:
    """Return the graph, or the parties, of an entry."""
    if "graph" in entry.facts:
        return _open_party(entry, entry.key, _read_facts(entry, entry.facts["graph"]))
    return [
        _open_party(entry, f"{entry.key}/{number}", _read_facts(entry, facts))
        for number, facts in enumerate(entry.facts["parties"])
    ]


def open_partition(entry: Entry, whole: PartyData) -> list[PartyData]:
    """Return the clients of a partition; ids, labels, splits and undivided edges are those of the whole graph."""
    every = [_read_facts(entry, facts) for facts in entry.facts["clients"]]
    return [_open_party(entry, f"{entry.key}/{facts.name}", facts, whole) for facts in every]


def _read_facts(entry: Entry, facts: object) -> PartyFacts:
    return read_record(PartyFacts, facts, entry.key)


def _open_party(entry: Entry, key: str, facts: PartyFacts, whole: PartyData | None = None) -> PartyData:
    arrays = entry.arrays
    labels, splits, classes = None, None, facts.classes
    if whole is not None:
        labels, splits, classes = whole.labels, whole.splits, whole.classes
    if facts.labels is not None:
        labels = arrays[facts.labels]
    if facts.splits is not None and facts.split_facts is not None:
        splits = _open_splits(entry, facts.split_facts, f"{facts.splits}.")
    cached = CachedFacts(
        key=key,
        ids=whole.ids if whole is not None else arrays[facts.ids or ""],
        ids_sha256=facts.ids_sha256,
        features=_open_features(entry, facts),
        mean_length=facts.mean_length,
        graph=whole.graph if whole is not None and not facts.graph else _open_graph(entry, facts.prefix),
        labels=labels,
        classes=classes,
    )
    return PartyData(
        facts.name,
        cached.ids,
        cached.features,
        cached.graph,
        labels,
        cached.classes,
        splits,
        facts.feature_names,
        cached,
    )


def _open_graph(entry: Entry, prefix: str) -> Graph:
    arrays = entry.arrays
    weights, degree = arrays.get(f"{prefix}weights"), arrays.get(f"{prefix}degree")
    return Graph.without_checks(arrays[f"{prefix}indptr"], arrays[f"{prefix}indices"], weights, degree)


def _open_features(entry: Entry, facts: PartyFacts) -> Features:
    arrays, prefix = entry.arrays, facts.prefix
    if f"{prefix}x" in arrays:
        return arrays[f"{prefix}x"]
    sparse = sp.csr_array(facts.feature_shape, dtype=np.float32)  # the constructor would read all indices
    sparse.data, sparse.indices, sparse.indptr = (arrays[f"{prefix}x_{part}"] for part in ("data", "indices", "indptr"))
    sparse.has_sorted_indices = sparse.has_canonical_format = True
    return sparse


def _open_splits(entry: Entry, facts: SplitFacts, prefix: str) -> Splits:
    train, validation, test = (entry.arrays[f"{prefix}{part}"] for part in SPLITS)
    return Splits.with_facts((train, validation, test), facts)
