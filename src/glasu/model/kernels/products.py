"""The product of dense matrices: torch's own, called through torch or, inside compiled loops, by its address.

Where matrices are small, calling torch between two loops costs a good part of what the product does. Most builds of
torch contain BLAS under the names that Fortran gave it; loops then call the same code directly, with the same bits.
Where a build has no such names, `GEMM` is None, and loops have torch called between them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glasu.compiling import COMPILES

Array = NDArray[Any]


def dense_product(
    left: Array, left_turned: bool, right: Array, right_turned: bool, kept: Any, taken: Any, out: Array
) -> None:
    """Make kept * out + taken * left @ right of `out`, with either factor transposed where `turned` says so."""
    one, other, total = (torch.from_numpy(array) for array in (left, right, out))
    one, other = one.t() if left_turned else one, other.t() if right_turned else other
    torch.addmm(total, one, other, beta=float(kept), alpha=float(taken), out=total)


def _functions(*names: str) -> list[Any] | None:
    """Return functions of torch's library; None: it has no such names."""
    for file in (Path(torch.__file__).parent / "lib").glob("*torch_cpu.*"):
        try:
            library = ctypes.CDLL(str(file))
            return [getattr(library, name) for name in names]
        except (OSError, AttributeError):
            continue
    return None


def _multiplies(function: Any, dtype: type[Any]) -> bool:
    """Try a function once: tell whether it multiplies as BLAS's product does, by columns, given addresses only."""
    left, right, out = (np.arange(32, dtype=dtype) for _ in range(3))  # room for one of another precision
    sizes, factors = [ctypes.c_int64(size) for size in (3, 4, 2, 3, 2, 3)], np.array([2, 10, 0, 0], dtype)
    rows, columns, depth, *leading = map(ctypes.byref, sizes)
    plain = ctypes.c_char_p(b"n")
    one, other, made, taken, kept = (
        ctypes.c_void_p(array.ctypes.data) for array in (left, right, out, factors[:1], factors[1:])
    )
    function(plain, plain, rows, columns, depth, taken, one, leading[0], other, leading[1], kept, made, leading[2])
    expected = 2 * right[:8].reshape(4, 2) @ left[:6].reshape(2, 3) + 10 * np.arange(12).reshape(4, 3)
    return np.array_equal(out[:12].reshape(4, 3), expected)


def _external(*names: str) -> tuple[Any, ...] | None:
    """Return functions for loops to call: BLAS's products of single and of double precision."""
    functions = _functions(*names) if COMPILES else None
    if functions is None or not all(map(_multiplies, functions, (np.float32, np.float64))):
        return None
    import llvmlite.binding
    from numba import types

    for name, function in zip(names, functions, strict=True):
        llvmlite.binding.add_symbol(f"glasu_{name}", ctypes.cast(function, ctypes.c_void_p).value)
    pointers = types.void(*[types.voidptr] * 13)
    return tuple(types.ExternalFunction(f"glasu_{name}", pointers) for name in names)


GEMM = _external("sgemm_", "dgemm_")
