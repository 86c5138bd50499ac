"""PartyData: what one party owns before any message: node ids, features X_m, edges E_m, labels y or None."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from glasu.data.cache.workspace import row_pieces
from glasu.data.party_name import check_party_name
from glasu.errors import DataError

Features: TypeAlias = NDArray[np.float32] | sp.csr_array
SPARSE_BELOW = 0.2  # features with a smaller share of non-zeros are kept, and multiplied, as a sparse matrix
PIECE_EDGES = 1 << 22  # edges of a large graph that are worked on at a time
MISSING_REMEDY = (
    "fill it in, or say what stands for it: --missing zero or mean at `glasu join` and `glasu doctor`, "
    'data.missing = "zero" or "mean" in the settings of `glasu train`'
)


@dataclass(frozen=True, eq=False)
class Graph:
    """Edges as CSC: the sources of the edges into node i are indices[indptr[i]:indptr[i + 1]], sorted.

    No self loops (each layer adds its own), no edge twice.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None  # None: every edge weighs 1

    def __post_init__(self) -> None:
        indptr, nodes = self.indptr, self.num_nodes
        if nodes < 0 or indptr[0] != 0 or indptr[-1] != len(self.indices) or (np.diff(indptr) < 0).any():
            raise DataError("a graph's indptr must rise from 0 to the number of edges; use Graph.from_edges.")
        if len(self.indices) and (self.indices.min() < 0 or self.indices.max() >= nodes):
            raise DataError(f"a graph's indices must lie in 0..{nodes - 1}; use Graph.from_edges.")
        if self.weights is not None and len(self.weights) != len(self.indices):
            raise DataError(f"{len(self.weights)} weights for {len(self.indices)} edges; each edge needs one.")
        if self.weights is not None and len(self.weights) and self.weights.min() < 0:
            raise DataError("an edge weight is negative; a neighbour's share cannot be: use weights of 0 or more.")

    @classmethod
    def opened(
        cls,
        indptr: NDArray[np.int64],
        indices: NDArray[np.int32],
        weights: NDArray[np.float32] | None = None,
        degree: NDArray[np.float64] | None = None,
    ) -> Self:
        """Return a graph that was checked when it was stored; no edge is read."""
        graph = object.__new__(cls)
        graph.__dict__.update(indptr=indptr, indices=indices, weights=weights)
        if degree is not None:
            graph.__dict__["degree"] = degree
        return graph

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    @cached_property
    def degree(self) -> NDArray[np.float64]:
        """The sum of the weights of the edges into each node, without self loops."""
        if self.weights is None:
            return np.diff(self.indptr).astype(np.float64)
        degree = np.zeros(self.num_nodes)
        for nodes in self.node_pieces():
            edges = slice(self.indptr[nodes.start], self.indptr[nodes.stop])
            count = nodes.stop - nodes.start
            row = np.repeat(np.arange(count), np.diff(self.indptr[nodes.start : nodes.stop + 1]))
            degree[nodes] = np.bincount(row, self.weights[edges].astype(np.float64), count)
        return degree

    def node_pieces(self, num_edges: int | None = None) -> Iterator[slice]:
        """Divide the nodes so that no piece has more edges into it than `num_edges`, unless a single node has."""
        limit, start = num_edges or PIECE_EDGES, 0
        while start < self.num_nodes:
            stop = int(np.searchsorted(self.indptr, self.indptr[start] + limit, side="right")) - 1
            stop = min(max(stop, start + 1), self.num_nodes)
            yield slice(start, stop)
            start = stop

    @classmethod
    def from_edges(
        cls,
        source: NDArray[np.integer],
        target: NDArray[np.integer],
        num_nodes: int,
        weights: NDArray[np.floating] | None = None,
    ) -> Self:
        """Sort edges by target, drop self loops, and merge duplicates (their weights add up)."""
        source, target = np.asarray(source, np.int64), np.asarray(target, np.int64)
        for name, ends in (("source", source), ("target", target)):
            if len(ends) and (ends.min() < 0 or ends.max() >= num_nodes):
                bad = int(np.flatnonzero((ends < 0) | (ends >= num_nodes))[0])
                raise DataError(f"edge {bad}: its {name} is out of range; nodes are numbered 0..{num_nodes - 1}.")
        if weights is not None and not np.isfinite(weights).all():
            bad = int(np.flatnonzero(~np.isfinite(weights))[0])
            raise DataError(f"edge {bad}: its weight is not a finite number; remove the edge or give it a weight.")
        kept = source != target
        key = target[kept] * num_nodes + source[kept]
        merged = None
        if weights is None:
            key = distinct(key)
        else:
            key, where = np.unique(key, return_inverse=True)
            merged = np.bincount(where, weights=weights[kept], minlength=len(key)).astype(np.float32)
        indptr = np.zeros(num_nodes + 1, np.int64)
        np.cumsum(np.bincount(key // num_nodes, minlength=num_nodes), out=indptr[1:])
        return cls(indptr, (key % num_nodes).astype(np.int32), merged)

    def edge_index(self) -> NDArray[np.int64]:
        """Return the edges as two rows, source and target, ordered by target."""
        target = np.repeat(np.arange(self.num_nodes, dtype=np.int64), np.diff(self.indptr))
        return np.stack([self.indices.astype(np.int64), target])

    def restricted_to(self, nodes: NDArray[np.int64]) -> Self:
        """Return the graph induced by `nodes`, which become 0, 1, ... in the order given."""
        position = np.full(self.num_nodes, -1, np.int64)
        position[nodes] = np.arange(len(nodes))
        source, target = position[self.edge_index()]
        kept = (source >= 0) & (target >= 0)
        weights = None if self.weights is None else self.weights[kept]
        return type(self).from_edges(source[kept], target[kept], len(nodes), weights)


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what `np.unique` returns, and sort the values in place; hashing them, as numpy does, takes far longer."""
    values.sort()
    first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


@dataclass(frozen=True)
class SplitFacts:
    """What must be known of splits, found out once."""

    sha256: str  # of the three position lists
    lowest: int  # of all positions; 0 where there is none
    highest: int  # -1 where there is none
    disjoint: bool


@dataclass(frozen=True, eq=False)
class Splits:
    """Sorted positions of the nodes that train, select and test the model; disjoint."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]

    @classmethod
    def opened(cls, parts: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], facts: SplitFacts) -> Self:
        """Return splits that are known already; no position is read."""
        splits = cls(*parts)
        splits.__dict__["facts"] = facts
        return splits

    @cached_property
    def facts(self) -> SplitFacts:
        """What must be known of them."""
        parts = [np.ascontiguousarray(part, "<i8") for part in (self.train, self.validation, self.test)]
        chosen = np.concatenate(parts)
        return SplitFacts(
            hashlib.sha256(b"|".join(part.tobytes() for part in parts)).hexdigest(),
            lowest=int(chosen.min(initial=0)),
            highest=int(chosen.max(initial=-1)),
            disjoint=len(distinct(chosen)) == len(parts[0]) + len(parts[1]) + len(parts[2]),
        )

    def digest(self) -> str:
        """Return the SHA-256 of the three position lists."""
        return self.facts.sha256


@dataclass(frozen=True, eq=False)
class Known:
    """What was found out about a party's data when it was stored; it holds for these very arrays only."""

    key: str  # names the stored data: equal keys, equal data
    ids: NDArray[np.int64] | NDArray[np.str_]
    ids_sha256: str
    features: Features
    mean_length: float  # of the rows that are not empty; 0 where all are
    graph: Graph
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PartyData:
    """What one party brings; valid once constructed."""

    name: str
    ids: NDArray[np.int64] | NDArray[np.str_]  # one id per node, distinct, in the order common to all parties
    features: Features  # X_m, shape (N, d_m)
    graph: Graph  # E_m
    labels: NDArray[np.int64] | None = None  # (N,), -1 where unknown; multi-label: (N, C) of 0 and 1
    classes: tuple[str, ...] = ()
    splits: Splits | None = None
    feature_names: tuple[str, ...] = ()  # of the columns, where they have names
    known: Known | None = field(default=None, repr=False)  # of stored data: it is not read to be checked once more

    @property
    def num_nodes(self) -> int:
        return len(self.ids)

    @property
    def num_features(self) -> int:
        return int(self.features.shape[1])

    def __post_init__(self) -> None:
        known = self.known
        if known is None or known.features is not self.features:
            object.__setattr__(self, "features", compact(self.features))
        object.__setattr__(self, "ids", _normalized(self.ids))
        nodes, where = self.num_nodes, f"party {self.name!r}"
        check_party_name(self.name)
        if (known is None or known.ids is not self.ids) and not _are_distinct(self.ids):
            raise DataError(f"{where}: an id stands for two nodes; ids must be distinct.")
        if len(self.features.shape) != 2 or self.features.shape[1] == 0:
            raise DataError(f"{where}: features of shape {self.features.shape}: one row per node, at least one column.")
        for what, count in (("features", self.features.shape[0]), ("edges", self.graph.num_nodes)):
            if count != nodes:
                raise DataError(f"{where}: {what} are for {count} nodes, but there are {nodes} ids.")
        if (known is None or known.features is not self.features) and not _are_finite(self.features):
            raise DataError(f"{where}: features contain NaN or infinity; {MISSING_REMEDY}.")
        if self.feature_names and len(self.feature_names) != self.num_features:
            raise DataError(f"{where}: {len(self.feature_names)} names for {self.num_features} feature columns.")
        if len(set(self.feature_names)) != len(self.feature_names):
            twice = next(name for name in self.feature_names if self.feature_names.count(name) > 1)
            raise DataError(f"{where}: two columns are called {twice!r}; feature names must be distinct.")
        if self.labels is not None:
            self._check_labels(where)
        if self.splits is not None:
            facts = self.splits.facts
            if facts.lowest < 0 or facts.highest >= nodes:
                raise DataError(f"{where}: a split names a node that is not there; nodes are 0..{nodes - 1}.")
            if not facts.disjoint:
                raise DataError(f"{where}: a node is in two splits; every node may be in one of them.")

    def _check_labels(self, where: str) -> None:
        labels, count = self.labels, len(self.classes)
        assert labels is not None
        if len(labels) != self.num_nodes:
            raise DataError(f"{where}: {len(labels)} labels for {self.num_nodes} nodes.")
        if count < 2:
            raise DataError(f"{where}: labels of {count} class(es); a classifier needs at least two.")
        if self.known is not None and self.known.labels is labels and self.known.classes == self.classes:
            return
        high = 1 if labels.ndim == 2 else count - 1
        if labels.ndim == 2 and labels.shape[1] != count:
            raise DataError(f"{where}: {labels.shape[1]} label columns for {count} classes.")
        if labels.size and (labels.min() < -1 or labels.max() > high):
            wrong = ((labels < -1) | (labels > high)).reshape(len(labels), -1).any(axis=1)
            raise DataError(
                f"{where}: the label of node {np.flatnonzero(wrong)[0]} is out of range; labels are 0..{high}, or -1 "
                "where unknown."
            )

    def columns_digest(self) -> str:
        """Return the SHA-256 of the feature names in their order; empty where they have none."""
        return hashlib.sha256("\0".join(self.feature_names).encode()).hexdigest() if self.feature_names else ""

    def ids_digest(self) -> str:
        """Return the SHA-256 of the id list in its order."""
        if self.known is not None and self.known.ids is self.ids:
            return self.known.ids_sha256
        return ids_sha256(self.ids)

    @cached_property
    def set_digest(self) -> str:
        """The SHA-256 of the ids, sorted: it tells another order from other ids."""
        return ids_sha256(self.ids[np.argsort(self.ids)])

    def mean_length(self) -> float:
        """Return the mean length of the feature rows that are not empty; 0 where all are."""
        if self.known is not None and self.known.features is self.features:
            return self.known.mean_length
        return mean_length(self.features)

    def stored_as(self) -> str | None:
        """Return the key of the stored data that this is, or None where ids, features or edges are others."""
        known = self.known
        if known is None or known.ids is not self.ids:
            return None
        return known.key if known.features is self.features and known.graph is self.graph else None


def ids_sha256(ids: NDArray[np.int64] | NDArray[np.str_]) -> str:
    """Return the SHA-256 of an id list in its order."""
    if ids.dtype.kind == "i":
        return hashlib.sha256(np.ascontiguousarray(ids, "<i8").tobytes()).hexdigest()
    return hashlib.sha256("\0".join(ids.tolist()).encode()).hexdigest()


def labelled(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell which nodes have a known label; of several labels per node, all must be known."""
    return np.asarray(labels >= 0 if labels.ndim == 1 else (labels >= 0).all(axis=1))


def _normalized(ids: NDArray[np.generic]) -> NDArray[np.int64] | NDArray[np.str_]:
    ids = np.asarray(ids)
    return ids.astype(np.int64, copy=False) if ids.dtype.kind in "iu" else ids.astype(np.str_, copy=False)


def _are_distinct(ids: NDArray[np.int64] | NDArray[np.str_]) -> bool:
    rising = np.sort(ids)
    return not (rising[1:] == rising[:-1]).any()


def _are_finite(features: Features) -> bool:
    values = features if isinstance(features, np.ndarray) else features.data
    return all(np.isfinite(values[rows]).all() for rows in row_pieces(values))


def mean_length(features: Features) -> float:
    """Return the mean length of the rows that are not empty; 0 where all are."""
    if not isinstance(features, np.ndarray):
        return mean_root(squared_lengths(features))
    squares = np.empty(len(features))
    for rows in row_pieces(features):
        squares[rows] = squared_lengths(features[rows])
    return mean_root(squares)


def squared_lengths(rows: Features) -> NDArray[np.float64]:
    """Return the squared length of each row."""
    if isinstance(rows, np.ndarray):
        return np.asarray(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    return np.asarray(rows.multiply(rows).sum(axis=1), np.float64).ravel()


def mean_root(squares: NDArray[np.float64]) -> float:
    """Return the mean of the square roots of what is not 0; 0 where all is."""
    lengths = np.sqrt(squares[squares > 0])
    return float(lengths.mean()) if len(lengths) else 0.0


def compact(features: np.ndarray | sp.spmatrix | sp.sparray) -> Features:
    """Return features as float32, sparse where few values differ from zero: the same form for equal values."""
    if sp.issparse(features):
        sparse = sp.csr_array(features, dtype=np.float32)
        sparse.sum_duplicates()
        sparse.eliminate_zeros()
        share = sparse.nnz / max(1, sparse.shape[0] * sparse.shape[1])
        return sparse if share < SPARSE_BELOW else np.ascontiguousarray(sparse.toarray())
    dense = np.ascontiguousarray(features, np.float32)
    if dense.ndim == 2 and np.count_nonzero(dense) / max(1, dense.size) < SPARSE_BELOW:
        return sp.csr_array(dense)
    return dense
