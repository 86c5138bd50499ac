"""The digest of what a party owns, so that a run is not continued on other data."""

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
    """Return the SHA-256 of everything that a run reads of the party, in hexadecimal."""
    found = hashlib.sha256("\0".join((party.name, party.ids_digest(), party.columns_digest(), *party.classes)).encode())
    for array in _arrays(party):
        found.update(f"|{array.dtype.str}{array.shape}|".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _arrays(party: PartyData) -> Iterator[NDArray[Any]]:
    features, graph = party.features, party.graph
    if isinstance(features, np.ndarray):
        yield features
    else:
        sparse = sp.csr_array(features)
        yield from (sparse.data, sparse.indices, sparse.indptr)
    yield from (graph.indptr, graph.indices)
    for optional in (graph.weights, party.labels):
        if optional is not None:
            yield optional
    if party.splits is not None:
        yield from (party.splits.train, party.splits.validation, party.splits.test)
