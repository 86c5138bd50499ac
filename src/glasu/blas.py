"""The product of dense matrices that torch's library contains, as functions that compiled loops can call.

Most builds of torch have BLAS inside, under the names that Fortran gave it. Where a build has no such names, `GEMM` is
None, and whoever wants a product calls torch.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glasu.compiling import COMPILES


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
