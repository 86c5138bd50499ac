"""Feature matrices: their storage format, the length of their rows, and their preparation for the model.

`fit_preparation` chooses the treatment of each column from its values at all nodes of a party. The result, a
`Preparation`, can be applied to any rows. Importing this module loads no scipy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from glasu.data.cache.arrays import ARRAY_PIECE, Workspace, divide_rows
from glasu.errors import DataError
from glasu.records import Bounds

if TYPE_CHECKING:
    import scipy.sparse as sp

Features: TypeAlias = "NDArray[np.float32] | sp.csr_array"
CSR_PARTS = ("data", "indices", "indptr")  # the arrays of a sparse matrix
Column: TypeAlias = Annotated[int, Bounds(0, 2**31)]
NORMAL_IQR = 1.3489795003921634  # distance between the quartiles of a standard normal distribution
LIMIT = 5.0  # prepared values of a scaled column are clipped to -5..5
MEASURED_ROWS = 1 << 16  # quantiles and lengths of larger graphs are measured at this many rows
# `measure_mean_length` ignores a column whose mean square is more than this factor times the median of all columns.
LARGE_COLUMN = 1e4
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
    """Return a sparse matrix in canonical form. The arrays are not read, unlike in scipy's constructor."""
    import scipy.sparse as sp

    sparse = sp.csr_array(shape, dtype=np.float32)
    sparse.data, sparse.indices, sparse.indptr = data, indices, indptr
    sparse.has_sorted_indices = sparse.has_canonical_format = True
    return sparse


def place_features(features: Features, prefix: str, workspace: Workspace) -> Features:
    """Write compact features to the arrays `<prefix>x`, or `<prefix>x_data`, ..., of a workspace; return its arrays."""
    if workspace.folder is None:
        return features
    if isinstance(features, np.ndarray):
        return workspace.arrays[workspace.keep(f"{prefix}x", features)]
    names = [workspace.keep(f"{prefix}x_{part}", getattr(features, part)) for part in CSR_PARTS]
    return make_csr(features.shape, *(workspace.arrays[name] for name in names))


def are_finite(features: Features) -> bool:
    """Return whether no value is infinite or NaN."""
    values = features if isinstance(features, np.ndarray) else features.data
    return all(np.isfinite(values[rows]).all() for rows in divide_rows(values))


def measure_mean_length(features: Features) -> float:
    """Return the mean Euclidean length of the rows that are not zero; 0 if all are zero.

    The length serves as the unit of the raw features. Columns that are far larger than the other columns, such as
    timestamps, are ignored. A column is ignored if its mean square is more than 10,000 times the median. The median is
    taken over the columns that are not zero.
    """
    columns = np.zeros(features.shape[1])
    for values, indices in _divide_values(features):
        if indices is None:
            columns += np.einsum("ij,ij->j", values, values, dtype=np.float64)  # makes no copy
        else:
            columns += np.bincount(indices, np.square(values, dtype=np.float64), len(columns))
    large = columns > LARGE_COLUMN * np.median(columns[columns > 0]) if columns.any() else columns > 0
    if isinstance(features, np.ndarray):
        squares = np.empty(len(features))
        for rows in divide_rows(features):
            counted = np.where(large, np.float32(0), features[rows]) if large.any() else features[rows]
            squares[rows] = np.einsum("ij,ij->i", counted, counted, dtype=np.float64)
    else:
        if large.any():
            data = np.where(large[features.indices], np.float32(0), features.data)
            features = make_csr(features.shape, data, features.indices, features.indptr)
        squares = np.asarray(features.multiply(features).sum(axis=1), np.float64).ravel()
    return _average_roots(squares)


def _average_roots(squares: NDArray[np.float64]) -> float:
    """Return the mean of the square roots of the values that are not zero."""
    roots = np.sqrt(squares[squares > 0])
    return float(roots.mean()) if len(roots) else 0.0


def _find_row_numbers(indptr: NDArray[Any]) -> NDArray[np.int64]:
    """Return the row number of each stored value of a sparse matrix."""
    return np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))


def _divide_values(
    features: Features, piece_bytes: int = ARRAY_PIECE
) -> Iterator[tuple[NDArray[np.float32], NDArray[Any] | None]]:
    """Yield pieces of a matrix: (rows, None) if it is dense, else (stored values, column of each value)."""
    stored = features if isinstance(features, np.ndarray) else np.asarray(features.data)
    for part in divide_rows(stored, piece_bytes):
        yield stored[part], None if isinstance(features, np.ndarray) else np.asarray(features.indices[part])


# Preparation


@dataclass(frozen=True)
class Preparation:
    """The preparation of each feature column of a party before the model reads it; saved with the model.

    In a scaled column, x becomes (x - centre) / spread, clipped to -5..5. Dropped columns are removed. All other
    columns are unchanged. Then all columns are multiplied by the input scale. A column with centre 0 keeps its zeros.
    """

    num_columns: Column  # number of columns before the preparation
    input_scale: float
    dropped: tuple[Column, ...] = ()  # columns with one value
    scaled: tuple[Column, ...] = ()
    centre: tuple[float, ...] = ()  # centres of the scaled columns
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        touched = (*self.dropped, *self.scaled)
        if len(set(touched)) < len(touched) or max(touched, default=-1) >= self.num_columns:
            raise DataError(f"dropped, scaled: must be distinct columns in 0..{self.num_columns - 1}.")
        if not len(self.scaled) == len(self.centre) == len(self.spread) or min(self.spread, default=1.0) <= 0:
            raise DataError("centre, spread: each scaled column needs a centre and a positive spread.")

    @property
    def width(self) -> int:
        """The number of columns after the preparation."""
        return self.num_columns - len(self.dropped)

    @cached_property
    def _columns(self) -> _Columns:
        return _Columns.of(self)

    def apply(self, values: NDArray[Any], dtype: Any) -> NDArray[Any]:
        """Prepare dense rows; `dtype` is the type of the result."""
        columns, scale = self._columns, dtype(self.input_scale)
        # Force row order. For selected columns numpy may choose column order, which changes the last bits of products.
        kept = values if self.width == values.shape[1] else values[:, columns.kept]
        prepared = np.multiply(kept, scale, dtype=dtype, order="C")
        if self.scaled:
            own = list(self.scaled)
            prepared[:, columns.place[own]] = columns.standardize(values[:, own], own, dtype) * scale
        return np.asarray(prepared)

    def apply_sparse(
        self, indptr: NDArray[Any], indices: NDArray[Any], data: NDArray[Any], dtype: Any
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Prepare sparse rows; in the result, the columns whose centre is not 0 come last in every row."""
        columns, scale = self._columns, dtype(self.input_scale)
        if not self.scaled and not self.dropped:
            return indptr, indices, np.multiply(data, scale, dtype=dtype)
        values = columns.standardize(data, indices, dtype) * scale
        if not self.dropped and not len(columns.shifted):
            return indptr, indices, values
        # Every row gets a value in each shifted column: the standardized stored value, or the standardized 0.
        count, shifted, rows = len(indptr) - 1, columns.shifted, _find_row_numbers(indptr)
        rank = np.full(self.num_columns, -1)
        rank[shifted] = np.arange(len(shifted))
        own, kept = rank[indices] >= 0, columns.place[indices] >= 0
        filled = np.tile(columns.standardize(np.zeros(len(shifted)), shifted, dtype) * scale, (count, 1))
        filled[rows[own], rank[indices[own]]] = values[own]
        kept &= ~own
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows[kept], minlength=count) + len(shifted))])
        found, places = np.empty(starts[-1], dtype), np.empty(starts[-1], indices.dtype)
        at = np.arange(np.count_nonzero(kept)) + len(shifted) * rows[kept]
        found[at], places[at] = values[kept], columns.place[indices[kept]]
        at = starts[1:, None] - len(shifted) + np.arange(len(shifted))
        found[at], places[at] = filled, columns.place[shifted]
        return starts.astype(indptr.dtype), places, found

    def count_kinds(self) -> dict[str, int]:
        """Return the number of columns of each kind: unchanged, scaled without or with a centre, dropped."""
        with_centre = sum(centre != 0 for centre in self.centre)
        return {
            "unchanged": self.width - len(self.scaled),
            "scaled": len(self.scaled) - with_centre,
            "standardized": with_centre,
            "dropped": len(self.dropped),
        }


@dataclass(frozen=True, eq=False)
class _Columns:
    """A preparation as arrays with one entry for each column."""

    kept: NDArray[np.int64]
    place: NDArray[np.int64]  # position of the column after the preparation; -1: dropped
    centre: NDArray[np.float64]
    spread: NDArray[np.float64]
    limit: NDArray[np.float64]
    shifted: NDArray[np.int64]  # columns in which 0 becomes another value

    @classmethod
    def of(cls, preparation: Preparation) -> _Columns:
        count, scaled = preparation.num_columns, list(preparation.scaled)
        is_kept = np.ones(count, bool)
        is_kept[list(preparation.dropped)] = False
        place = np.where(is_kept, np.cumsum(is_kept) - 1, -1)
        centre, spread, limit = np.zeros(count), np.ones(count), np.full(count, np.inf)
        centre[scaled], spread[scaled], limit[scaled] = preparation.centre, preparation.spread, LIMIT
        return cls(np.flatnonzero(is_kept), place, centre, spread, limit, np.flatnonzero(centre))

    def standardize(self, values: NDArray[Any], columns: Any, dtype: Any) -> NDArray[Any]:
        """Return (x - centre) / spread, clipped.

        It is computed in double precision, because a centre may be far from 0.
        """
        limit = self.limit[columns]
        found = (values.astype(np.float64) - self.centre[columns]) / self.spread[columns]
        return np.asarray(np.clip(found, -limit, limit), dtype)


def fit_preparation(features: Features, piece_bytes: int = ARRAY_PIECE) -> Preparation:
    """Choose the treatment of each column from its values at all nodes. The input scale stays 1.

    - One value: the column is dropped. If all columns have one value, the first column is kept and becomes 1.
    - Two values: the column is unchanged if they are 0 and 1. Otherwise one value becomes 0, the other 1 or -1; a value
      0 stays 0.
    - One value is more frequent than all others together, like 0 in bags of words: it becomes 0, and the median
      distance of the other values from it becomes 1.
    - Otherwise: the median becomes 0, and the distance between the quartiles becomes 1.35, as in a standard normal
      distribution. This is RobustScaler(unit_variance=True) of scikit-learn.

    Each column is treated independently of the others. All nodes count, not only training nodes, because features are
    known for all nodes. Features are read in blocks of rows, so they can be a memory map. If a graph has more than
    65,536 nodes, medians and quartiles are computed from 65,536 evenly spaced nodes.

    RobustScaler itself is not used: it needs the whole matrix in memory, cannot centre columns of a sparse matrix, and
    is stored with pickle. A test compares the last rule with RobustScaler.

    Args:
        features: the features of all nodes of a party.
        piece_bytes: the size of the blocks that are read.
    """
    low, high, has_two = _find_ranges(features, piece_bytes)
    constant = low == high
    fits: dict[int, tuple[float, float]] = {}
    for column in np.flatnonzero(~constant & has_two).tolist():
        least, most = float(low[column]), float(high[column])
        if (least, most) != (0, 1):
            fits[column] = 0.0 if 0 in (least, most) else least, most - least
    others = np.flatnonzero(~constant & ~has_two)
    for column, (values, zeros) in _read_columns(features, others, piece_bytes):
        fits[column] = _measure(values, zeros, low[column], high[column])
    dropped = np.flatnonzero(constant)
    if len(dropped) == len(low):
        fits[0], dropped = (float(low[0]) - 1.0, 1.0), dropped[1:]
    scaled = sorted(fits)
    return Preparation(
        num_columns=len(low),
        input_scale=1.0,
        dropped=tuple(dropped.tolist()),
        scaled=tuple(scaled),
        centre=tuple(fits[column][0] for column in scaled),
        spread=tuple(fits[column][1] for column in scaled),
    )


def _find_ranges(
    features: Features, piece_bytes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return the minimum and the maximum value of each column, and whether the column has no other values."""
    count, width = features.shape
    low, high, stored = np.full(width, np.inf), np.full(width, -np.inf), np.zeros(width, np.int64)
    for values, indices in _divide_values(features, piece_bytes):
        if indices is None:
            np.minimum(low, values.min(axis=0), out=low)
            np.maximum(high, values.max(axis=0), out=high)
            stored += len(values)
        else:
            np.minimum.at(low, indices, values)
            np.maximum.at(high, indices, values)
            stored += np.bincount(indices, minlength=width)
    partly = stored < count  # the values that are not stored are 0
    low, high = np.where(partly, np.minimum(low, 0), low), np.where(partly, np.maximum(high, 0), high)
    has_two = ~(partly & (low < 0) & (high > 0))
    for values, indices in _divide_values(features, piece_bytes):
        if indices is None:
            has_two &= ((values == low) | (values == high)).all(axis=0)
        else:
            has_two[indices[(values != low[indices]) & (values != high[indices])]] = False
    return low, high, has_two


def _read_columns(
    features: Features, columns: NDArray[np.int64], piece_bytes: int
) -> Iterator[tuple[int, tuple[NDArray[np.float64], int]]]:
    """Yield some columns at the measured rows. A column consists of stored values and a number of implicit zeros."""
    rows = choose_measured_rows(features.shape[0])
    if isinstance(features, np.ndarray):
        size = max(1, piece_bytes // (16 * len(rows)))
        for start in range(0, len(columns), size):
            some = columns[start : start + size]
            for column, values in zip(some.tolist(), features[np.ix_(rows, some)].T, strict=True):
                yield column, (values.astype(np.float64), 0)
        return
    if len(columns):
        by_column = (features if len(rows) == features.shape[0] else features[rows]).tocsc()
        ends = list(pairwise(by_column.indptr.tolist()))
        for column in columns.tolist():
            values = by_column.data[slice(*ends[column])].astype(np.float64)
            yield column, (values, len(rows) - len(values))


def choose_measured_rows(count: int) -> NDArray[np.int64]:
    """Return the rows at which quantiles and lengths are measured: all rows, or 65,536 evenly spaced rows."""
    size = min(count, MEASURED_ROWS)
    return np.arange(size) * count // max(1, size)


def _measure(values: NDArray[np.float64], zeros: int, low: float, high: float) -> tuple[float, float]:
    """Return centre and spread of a column.

    Args:
        values: the stored values at the measured rows.
        zeros: the number of implicit zeros at the measured rows.
        low: the lowest value at all nodes.
        high: the highest value at all nodes.
    """
    count, others = len(values) + zeros, values
    if 2 * zeros > count:
        centre = 0.0
    else:
        values = np.concatenate([values, np.zeros(zeros)])
        first, centre, third = map(float, np.percentile(values, [25, 50, 75]))
        others = values[values != centre]
        if third > first and 2 * (count - len(others)) <= count:
            return centre, (third - first) / NORMAL_IQR
    spread = float(np.median(np.abs(others - centre))) if len(others) else 0.0
    return centre, spread or max(high - centre, centre - low)  # the range, if all measured values are equal


def measure_prepared(features: Features, preparation: Preparation, piece_bytes: int = ARRAY_PIECE) -> float:
    """Return the mean length of the prepared rows at the measured nodes. Rows that are zero are ignored."""
    rows, squares = choose_measured_rows(features.shape[0]), []
    size = max(1, piece_bytes // (32 * features.shape[1])) if isinstance(features, np.ndarray) else len(rows)
    for start in range(0, len(rows), max(1, size)):
        some = features[rows[start : start + size]]
        if isinstance(some, np.ndarray):
            prepared = preparation.apply(some, np.float64)
            squares.append(np.einsum("ij,ij->i", prepared, prepared))
        else:
            indptr, _, data = preparation.apply_sparse(some.indptr, some.indices, some.data, np.float64)
            squares.append(np.bincount(_find_row_numbers(indptr), np.square(data), len(indptr) - 1))
    return _average_roots(np.concatenate([np.zeros(0), *squares]))
