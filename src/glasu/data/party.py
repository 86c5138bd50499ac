"""PartyData, the data of one party: node ids, features X_m, edges E_m, and labels y if the party has them."""

from __future__ import annotations

import hashlib
import hmac
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.data.graph import Graph, sort_distinct
from glasu.data.party_name import check_party_name
from glasu.data.preprocessing import CSR_PARTS, Features, are_finite, compact_features, measure_mean_length
from glasu.errors import DataError

Labels = NDArray[np.int64] | NDArray[np.float64]  # class numbers, or numbers to predict
MAX_LABEL = 1e100  # bound of numeric labels, so that squared errors stay finite
SPLITS = ("train", "validation", "test")
MISSING_REMEDY = (
    "fill it in, or choose a replacement: --missing zero or mean at `glasu join` and `glasu doctor`, "
    'data.missing = "zero" or "mean" in the settings of `glasu train`'
)


@dataclass(frozen=True, eq=False)
class Splits:
    """Sorted, disjoint positions of the nodes for training, validation and test."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]

    def digest(self) -> str:
        """Return the SHA-256 of the three lists of positions."""
        parts = (np.ascontiguousarray(part, "<i8").tobytes() for part in (self.train, self.validation, self.test))
        return hashlib.sha256(b"|".join(parts)).hexdigest()

    def check(self, num_nodes: int, where: str) -> None:
        """Raise DataError unless the positions are in range, sorted, distinct and disjoint."""
        chosen = np.concatenate([self.train, self.validation, self.test]).astype(np.int64)
        if chosen.min(initial=0) < 0 or chosen.max(initial=-1) >= num_nodes:
            raise DataError(f"{where}: a split names a node that does not exist; nodes are 0..{num_nodes - 1}.")
        for name in SPLITS:  # sorted, because batches keep this order and the nodes of a batch must be sorted
            part = getattr(self, name)
            if part.dtype.kind not in "iu" or (part[1:] <= part[:-1]).any():
                raise DataError(
                    f"{where}: the positions of the split {name!r} must be increasing integers; use "
                    "np.unique(positions), or np.flatnonzero(mask) for a mask."
                )
        count = len(chosen)
        if len(sort_distinct(chosen)) != count:
            raise DataError(f"{where}: a node is in two splits; use disjoint splits.")


@dataclass(frozen=True, eq=False)
class CheckedArrays:
    """Arrays that were already checked, and their properties. The properties hold for these array objects only."""

    ids: NDArray[np.int64] | NDArray[np.str_]
    ids_sha256: str
    features: Features
    mean_length: float  # mean length of the feature rows that are not zero
    graph: Graph
    key: str | None = None  # the cache key: equal keys mean equal arrays


@dataclass(frozen=True, eq=False)
class PartyData:
    """The data of one party; valid once constructed."""

    name: str
    ids: NDArray[np.int64] | NDArray[np.str_]  # one distinct id per node, in the common order of all parties
    features: Features  # X_m, shape (N, d_m)
    graph: Graph  # E_m
    # One class per node: shape (N,), -1 if unknown. Multi-label: shape (N, C), 0 and 1, or -1 if unknown. Numbers to
    # predict: shape (N,), floats, NaN if unknown.
    labels: Labels | None = None
    classes: tuple[str, ...] = ()  # class names; () for numeric labels
    splits: Splits | None = None
    feature_names: tuple[str, ...] = ()  # names of the columns; () if they have none
    checked: CheckedArrays | None = field(default=None, repr=False)  # arrays that need no further check
    alignment_key: bytes | None = field(default=None, repr=False)  # common key of the aligned parties; never sent

    @property
    def num_nodes(self) -> int:
        return len(self.ids)

    @property
    def num_features(self) -> int:
        return int(self.features.shape[1])

    @property
    def has_numeric_labels(self) -> bool:
        """Whether the labels are numbers, as for regression, and not classes."""
        return self.labels is not None and are_numbers(self.labels)

    def __post_init__(self) -> None:
        checked = self.checked
        checks_features = checked is None or checked.features is not self.features
        if checks_features:
            object.__setattr__(self, "features", compact_features(self.features))
        object.__setattr__(self, "ids", _convert_ids(self.ids))
        nodes, where = self.num_nodes, f"party {self.name!r}"
        check_party_name(self.name)
        if (checked is None or checked.ids is not self.ids) and not _are_distinct(self.ids):
            raise DataError(f"{where}: two nodes have the same id; ids must be distinct.")
        if len(self.features.shape) != 2 or self.features.shape[1] == 0:
            raise DataError(
                f"{where}: features of shape {self.features.shape} need one row per node and at least one column."
            )
        for what, count in (("features", self.features.shape[0]), ("edges", self.graph.num_nodes)):
            if count != nodes:
                raise DataError(f"{where}: {what} are for {count} nodes, but there are {nodes} ids.")
        if checks_features and not are_finite(self.features):
            raise DataError(f"{where}: features contain NaN or infinity; {MISSING_REMEDY}.")
        if self.feature_names and len(self.feature_names) != self.num_features:
            raise DataError(f"{where}: {len(self.feature_names)} names for {self.num_features} feature columns.")
        if len(set(self.feature_names)) != len(self.feature_names):
            twice = next(name for name in self.feature_names if self.feature_names.count(name) > 1)
            raise DataError(f"{where}: two columns have the name {twice!r}; feature names must be distinct.")
        if self.labels is not None:
            self._check_labels(where)
        if self.splits is not None:
            self.splits.check(nodes, where)

    def _check_labels(self, where: str) -> None:
        labels, count = self.labels, len(self.classes)
        assert labels is not None
        if len(labels) != self.num_nodes:
            raise DataError(f"{where}: {len(labels)} labels for {self.num_nodes} nodes.")
        if self.has_numeric_labels:
            self._check_numbers(labels, where)
            return
        if count < 2:
            raise DataError(
                f"{where}: the labels have {count} class(es); a classifier needs at least two. Pass all class names "
                "in classes, or set labels=None if the party has no labels."
            )
        high = 1 if labels.ndim == 2 else count - 1
        if labels.ndim == 2 and labels.shape[1] != count:
            raise DataError(f"{where}: {labels.shape[1]} label columns for {count} classes.")
        if labels.size and (labels.min() < -1 or labels.max() > high):
            wrong = ((labels < -1) | (labels > high)).reshape(len(labels), -1).any(axis=1)
            raise DataError(
                f"{where}: the label of node {np.flatnonzero(wrong)[0]} is out of range; labels are 0..{high}, or -1 "
                "if unknown."
            )

    def _check_numbers(self, labels: Labels, where: str) -> None:
        if self.classes or labels.ndim != 1:
            raise DataError(
                f"{where}: labels have shape {labels.shape} and type {labels.dtype}, with {len(self.classes)} classes; "
                "give integer labels for classification, or one float per node and no classes for regression."
            )
        labels = labels.astype(np.float64, copy=False)
        huge = np.flatnonzero(np.abs(labels) > MAX_LABEL)
        if len(huge):
            raise DataError(
                f"{where}: the label of node {huge[0]} is infinite or beyond {MAX_LABEL:g}; use another unit, or NaN "
                "for an unknown label."
            )
        object.__setattr__(self, "labels", labels)

    def restrict(self, rows: NDArray[np.int64]) -> PartyData:
        """Return the party with only these nodes, in this order."""
        splits = self.splits
        if splits is not None:
            position = np.full(self.num_nodes, -1, np.int64)
            position[rows] = np.arange(len(rows))
            parts = (position[part] for part in (splits.train, splits.validation, splits.test))
            splits = Splits(*(np.sort(part[part >= 0]) for part in parts))
        return replace(
            self,
            ids=self.ids[rows],
            features=self.features[rows],
            graph=self.graph.restrict(rows),
            labels=None if self.labels is None else self.labels[rows],
            splits=splits,
        )

    def columns_digest(self) -> str:
        """Return the SHA-256 of the feature names in their order; empty if the columns have no names."""
        return hashlib.sha256("\0".join(self.feature_names).encode()).hexdigest() if self.feature_names else ""

    def ids_digest(self) -> str:
        """Return the SHA-256 of the list of ids in its order."""
        if self.checked is not None and self.checked.ids is self.ids:
            return self.checked.ids_sha256
        return digest_ids(self.ids)

    @cached_property
    def set_digest(self) -> str:
        """The SHA-256 of the sorted ids. It does not depend on the order of the nodes."""
        return digest_ids(self.ids[np.argsort(self.ids)])

    def mean_length(self) -> float:
        """Return the mean Euclidean length of the feature rows that are not zero; 0 if all are zero."""
        if self.checked is not None and self.checked.features is self.features:
            return self.checked.mean_length
        return measure_mean_length(self.features)

    def cache_key(self) -> str | None:
        """Return the cache key of ids, features and edges; None unless all of them come from one cache entry."""
        own = self.checked
        same = own is not None and own.ids is self.ids and own.features is self.features and own.graph is self.graph
        return own.key if own is not None and same else None

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all arrays of this party by name."""
        features, graph = self.features, self.graph
        found: dict[str, NDArray[Any]] = {"ids": self.ids, "indptr": graph.indptr, "indices": graph.indices}
        if isinstance(features, np.ndarray):
            found["x"] = features
        else:
            found |= {f"x_{part}": getattr(features, part) for part in CSR_PARTS}
        if graph.weights is not None:
            # The degrees are included, because computing them again would read all weights.
            found |= {"weights": graph.weights, "degree": graph.degree}
        if self.labels is not None:
            found["labels"] = self.labels
        if self.splits is not None:
            found |= {part: getattr(self.splits, part) for part in SPLITS}
        return found

    def data_digest(self) -> str:
        """Return the SHA-256 of all data that a run reads. A run can only continue on the same data.

        Features and edges from the cache are not read; their cache key is hashed instead.
        """
        key = self.cache_key()
        texts = (self.name, self.ids_digest(), self.columns_digest(), *self.classes, key or "")
        found = hashlib.sha256("\0".join(texts).encode())
        for name, array in self.arrays().items():
            if name in ("labels", *SPLITS) or (key is None and name not in ("ids", "degree")):
                found.update(f"|{name}{array.dtype.str}{array.shape}|".encode())
                found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()


def digest_ids(ids: NDArray[np.int64] | NDArray[np.str_]) -> str:
    """Return the SHA-256 of a list of ids in its order."""
    if ids.dtype.kind == "i":
        return hashlib.sha256(np.ascontiguousarray(ids, "<i8").tobytes()).hexdigest()
    return hashlib.sha256("\0".join(ids.tolist()).encode()).hexdigest()


def sign_ids(key: bytes, purpose: str, digest: str) -> str:
    """Return the HMAC-SHA-256 of a digest of ids, keyed with the common key. Each purpose gives a different value."""
    return hmac.new(key, f"glasu {purpose} {digest}".encode(), hashlib.sha256).hexdigest()


def are_numbers(labels: Labels) -> bool:
    """Return whether labels are numbers, and not classes."""
    return labels.dtype.kind == "f"


def have_labels(labels: Labels) -> NDArray[np.bool_]:
    """Return a mask of the nodes whose labels are known. In a multi-label task, all labels of a node must be known."""
    if are_numbers(labels):
        return ~np.isnan(labels)
    return np.asarray(labels >= 0 if labels.ndim == 1 else (labels >= 0).all(axis=1))


def hide_labels(labels: Labels, nodes: NDArray[np.int64]) -> Labels:
    """Return a copy of the labels in which the labels of these nodes are unknown."""
    hidden = labels.copy()
    hidden[nodes] = math.nan if are_numbers(labels) else -1
    return hidden


def measure_labels(labels: Labels) -> tuple[float, float]:
    """Return mean and standard deviation of numeric labels. A deviation of 0 is replaced by 1.

    The sums are exact, so that parties on different machines get the same bits.
    """
    mean = math.fsum(labels) / len(labels)
    deviation = math.sqrt(math.fsum(np.square(labels - mean)) / len(labels))
    return mean, deviation or 1.0


def _convert_ids(ids: NDArray[np.generic]) -> NDArray[np.int64] | NDArray[np.str_]:
    ids = np.asarray(ids)
    return ids.astype(np.int64, copy=False) if ids.dtype.kind in "iu" else ids.astype(np.str_, copy=False)


def _are_distinct(ids: NDArray[np.int64] | NDArray[np.str_]) -> bool:
    rising = np.sort(ids)
    return not (rising[1:] == rising[:-1]).any()
