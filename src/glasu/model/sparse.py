"""`SparseRows`: a sparse matrix in row format, stored as plain arrays. Blocks and sparse features use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from glasu.model import kernels

if TYPE_CHECKING:
    import scipy.sparse as sp


@dataclass(slots=True, eq=False)
class SparseRows:
    """The entries of row i are data[indptr[i]:indptr[i + 1]], in the columns indices[indptr[i]:indptr[i + 1]].

    This is the format of scipy's csr_array, but without its checks, which take longer than a small product.
    """

    indptr: NDArray[Any]
    indices: NDArray[Any]
    data: NDArray[Any]
    width: int

    @classmethod
    def of(cls, matrix: sp.csr_array) -> Self:
        """Wrap a scipy matrix without copying its arrays."""
        indptr, indices, data = (np.asarray(part) for part in (matrix.indptr, matrix.indices, matrix.data))
        return cls(indptr, indices, data, matrix.shape[1])  # np.asarray: numba requires plain arrays, not memory maps

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.indptr) - 1, self.width

    @property
    def parts(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        return self.indptr, self.indices, self.data

    @property
    def nnz(self) -> int:
        return len(self.data)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.data.dtype

    def rows(self, positions: NDArray[np.int64]) -> SparseRows:
        """Return the rows at `positions`, in that order."""
        return SparseRows(*kernels.gather_rows(self.indptr, self.indices, self.data, positions), self.width)

    def with_data(self, data: NDArray[Any]) -> SparseRows:
        """Return a matrix with the same sparsity and other values."""
        return SparseRows(self.indptr, self.indices, data, self.width)

    def toarray(self) -> NDArray[Any]:
        """Return the dense matrix."""
        dense = np.zeros(self.shape, self.dtype)
        np.add.at(dense, (np.repeat(np.arange(len(dense)), np.diff(self.indptr)), self.indices), self.data)
        return dense

    def __matmul__(self, dense: NDArray[Any]) -> NDArray[Any]:
        total = np.zeros((len(self.indptr) - 1, dense.shape[1]), np.result_type(self.dtype, dense.dtype))
        kernels.add_product(self.indptr, self.indices, self.data, np.ascontiguousarray(dense), total)
        return total
