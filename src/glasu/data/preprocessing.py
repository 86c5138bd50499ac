"""Feature matrices: one form for equal values, and the length of their rows. Importing this module loads no scipy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from glasu.data.cache.arrays import Workspace, row_pieces

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


def make_csr(shape: tuple[int, int], data: Any, indices: Any, indptr: Any) -> sp.csr_array:
    """Return a sparse matrix in canonical form without reading the arrays, which the constructor of scipy does."""
    import scipy.sparse as sp

    sparse = sp.csr_array(shape, dtype=np.float32)
    sparse.data, sparse.indices, sparse.indptr = data, indices, indptr
    sparse.has_sorted_indices = sparse.has_canonical_format = True
    return sparse


def select_columns(features: Features, columns: slice, prefix: str, workspace: Workspace) -> tuple[Features, float]:
    """Return some columns in the form of `compact_features`, and the mean length of their rows.

    The columns are copied to the workspace in pieces of rows: `<prefix>x`, or `<prefix>x_data`, `x_indices` and
    `x_indptr`.
    """
    import scipy.sparse as sp

    shape, filled, squares = (features.shape[0], columns.stop - columns.start), 0, [np.empty(0)]
    for piece in _column_pieces(features, columns, workspace.piece_bytes):
        filled += int(np.count_nonzero(piece)) if isinstance(piece, np.ndarray) else piece.nnz
        squares.append(squared_lengths(piece))
    length = mean_root(np.concatenate(squares))
    if filled / max(1, shape[0] * shape[1]) >= SPARSE_BELOW:
        dense = workspace.writer(f"{prefix}x", np.float32, shape[1])
        for piece in _column_pieces(features, columns, workspace.piece_bytes):
            dense.append(piece if isinstance(piece, np.ndarray) else piece.toarray())
        return dense.finish(), length
    index = np.int32 if filled < 2**31 else np.int64
    kinds = {"data": np.float32, "indices": index, "indptr": index}
    data, indices, indptr = (workspace.writer(f"{prefix}x_{part}", kind) for part, kind in kinds.items())
    indptr.append(np.zeros(1, index))
    before = 0
    for piece in _column_pieces(features, columns, workspace.piece_bytes):
        sparse = sp.csr_array(piece)
        data.append(sparse.data)
        indices.append(sparse.indices)
        indptr.append(sparse.indptr[1:].astype(index) + index(before))
        before += sparse.nnz
    return make_csr(shape, data.finish(), indices.finish(), indptr.finish()), length


def _column_pieces(features: Features, columns: slice, piece_bytes: int) -> Iterator[Features]:
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
