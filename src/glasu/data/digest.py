"""The digest of a party's data: a run can only continue on the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from glasu.data.party import PartyData


def data_digest(party: PartyData) -> str:
    """Return the SHA-256 of all data of a party that a run reads, in hexadecimal.

    Features and edges from the cache are not read: their cache key replaces them.
    """
    found = hashlib.sha256("\0".join((party.name, party.ids_digest(), party.columns_digest(), *party.classes)).encode())
    for array in _arrays(party):
        found.update(f"|{array.dtype.str}{array.shape}|".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _arrays(party: PartyData) -> Iterator[NDArray[Any]]:
    key = party.cache_key()
    yield from _features_and_edges(party) if key is None else (np.frombuffer(key.encode(), np.uint8),)
    if party.labels is not None:
        yield party.labels
    if party.splits is not None:
        yield from (party.splits.train, party.splits.validation, party.splits.test)


def _features_and_edges(party: PartyData) -> Iterator[NDArray[Any]]:
    """Yield the arrays of features and edges."""
    features, graph = party.features, party.graph
    if isinstance(features, np.ndarray):
        yield features
    else:
        sparse = sp.csr_array(features)
        yield from (sparse.data, sparse.indices, sparse.indptr)
    yield from (graph.indptr, graph.indices)
    if graph.weights is not None:
        yield graph.weights
