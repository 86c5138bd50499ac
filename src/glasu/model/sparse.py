"""SparseRows: a sparse matrix by rows, as plain arrays: blocks, and features of which few differ from zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from glasu.model import kernels

if TYPE_CHECKING:
    import scipy.sparse as sp

Array = NDArray[Any]


@dataclass(slots=True, eq=False)
class SparseRows:
    """The entries of row i are data[indptr[i]:indptr[i + 1]], in the columns indices[indptr[i]:indptr[i + 1]].

    What scipy's csr_array is, without the checks that cost more than a small product.
    """

    indptr: Array
    indices: Array
    data: Array
    width: int

    @classmethod
    def of(cls, matrix: sp.csr_array) -> Self:
        """Return scipy's matrix, sharing its arrays."""
        indptr, indices, data = (np.asarray(part) for part in (matrix.indptr, matrix.indices, matrix.data))
        return cls(indptr, indices, data, matrix.shape[1])  # memory maps as the plain arrays that they are

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.indptr) - 1, self.width

    @property
    def parts(self) -> tuple[Array, Array, Array]:
        return self.indptr, self.indices, self.data

    @property
    def nnz(self) -> int:
        return len(self.data)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.data.dtype

    def rows(self, positions: NDArray[np.int64]) -> SparseRows:
        """Return some rows, in the order asked."""
        return SparseRows(*kernels.gather_rows(self.indptr, self.indices, self.data, positions), self.width)

    def with_data(self, data: Array) -> SparseRows:
        """Return a matrix with other values in the same places."""
        return SparseRows(self.indptr, self.indices, data, self.width)

    def toarray(self) -> Array:
        """Return the dense matrix."""
        dense = np.zeros(self.shape, self.dtype)
        np.add.at(dense, (np.repeat(np.arange(len(dense)), np.diff(self.indptr)), self.indices), self.data)
        return dense

    def __matmul__(self, dense: Array) -> Array:
        total = np.zeros((len(self.indptr) - 1, dense.shape[1]), np.result_type(self.dtype, dense.dtype))
        kernels.add_product(self.indptr, self.indices, self.data, np.ascontiguousarray(dense), total)
        return total
