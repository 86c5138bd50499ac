"""Feature matrices: one form for equal values, and the length of their rows. Importing this module loads no scipy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from glasu.data.cache.arrays import Workspace, row_pieces

if TYPE_CHECKING:
    import scipy.sparse as sp

Features: TypeAlias = "NDArray[np.float32] | sp.csr_array"
CSR_PARTS = ("data", "indices", "indptr")  # the arrays of a sparse matrix
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


def make_csr(shape: tuple[int, int], data: Any, indices: Any, indptr: Any) -> sp.csr_array:
    """Return a sparse matrix in canonical form without reading the arrays, which the constructor of scipy does."""
    import scipy.sparse as sp

    sparse = sp.csr_array(shape, dtype=np.float32)
    sparse.data, sparse.indices, sparse.indptr = data, indices, indptr
    sparse.has_sorted_indices = sparse.has_canonical_format = True
    return sparse


def place_features(features: Features, prefix: str, workspace: Workspace) -> Features:
    """Write compact features to `<prefix>x`, or `<prefix>x_data`, ..., of a workspace with a folder; return maps."""
    if workspace.folder is None:
        return features
    if isinstance(features, np.ndarray):
        return workspace.arrays[workspace.keep(f"{prefix}x", features)]
    names = [workspace.keep(f"{prefix}x_{part}", getattr(features, part)) for part in CSR_PARTS]
    return make_csr(features.shape, *(workspace.arrays[name] for name in names))


def are_finite(features: Features) -> bool:
    """Return whether no value is infinite or NaN."""
    values = features if isinstance(features, np.ndarray) else features.data
    return all(np.isfinite(values[rows]).all() for rows in row_pieces(values))


def mean_length(features: Features) -> float:
    """Return the mean Euclidean length of the rows that are not zero; 0 if all are zero."""
    if isinstance(features, np.ndarray):
        squares = np.empty(len(features))
        for rows in row_pieces(features):
            squares[rows] = np.einsum("ij,ij->i", features[rows], features[rows], dtype=np.float64)
    else:
        squares = np.asarray(features.multiply(features).sum(axis=1), np.float64).ravel()
    lengths = np.sqrt(squares[squares > 0])
    return float(lengths.mean()) if len(lengths) else 0.0
