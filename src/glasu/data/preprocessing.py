"""Feature matrices: one form for equal values, and the length of their rows. Importing this module loads no scipy."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from glasu.data.cache.arrays import row_pieces

if TYPE_CHECKING:
    import scipy.sparse as sp

Features: TypeAlias = "NDArray[np.float32] | sp.csr_array"
SPARSE_BELOW = 0.2  # store and multiply features as a sparse matrix if their share of non-zeros is smaller


def compact_features(features: np.ndarray | sp.spmatrix | sp.sparray) -> Features:
    """Return features as float32: dense, or sparse if few values differ from zero."""
    import scipy.sparse as sp

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


def are_finite(features: Features) -> bool:
    """Return whether no value is infinite or NaN."""
    values = features if isinstance(features, np.ndarray) else features.data
    return all(np.isfinite(values[rows]).all() for rows in row_pieces(values))


def mean_length(features: Features) -> float:
    """Return the mean Euclidean length of the rows that are not zero; 0 if all are zero."""
    if not isinstance(features, np.ndarray):
        return mean_root(squared_lengths(features))
    squares = np.empty(len(features))
    for rows in row_pieces(features):
        squares[rows] = squared_lengths(features[rows])
    return mean_root(squares)


def squared_lengths(rows: Features) -> NDArray[np.float64]:
    """Return the squared Euclidean length of each row."""
    if isinstance(rows, np.ndarray):
        return np.asarray(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    return np.asarray(rows.multiply(rows).sum(axis=1), np.float64).ravel()


def mean_root(squares: NDArray[np.float64]) -> float:
    """Return the mean of the square roots of the positive values; 0 if there are none."""
    lengths = np.sqrt(squares[squares > 0])
    return float(lengths.mean()) if len(lengths) else 0.0
