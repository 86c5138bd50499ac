"""The product of dense matrices: torch's own, called through torch or, inside compiled loops, by its address.

Where matrices are small, calling torch between two loops costs a good part of what the product does. Most builds of
torch contain BLAS under the names that Fortran gave it; loops then call the same code directly, with the same bits.
Where a build has no such names, `GEMM` is None, and loops have torch called between them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

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


def _addresses(*names: str) -> list[int] | None:
    """Return where torch's library has these functions; None: it has no such names."""
    for file in (Path(torch.__file__).parent / "lib").glob("*torch_cpu.*"):
        try:
            library = ctypes.CDLL(str(file))
            found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
        except (OSError, AttributeError):
            continue
        return [address for address in found if address] if all(found) else None
    return None


def _external(*names: str) -> tuple[Any, ...] | None:
    """Return functions for loops to call: BLAS's products of single and of double precision."""
    addresses = _addresses(*names) if COMPILES else None
    if addresses is None:
        return None
    import llvmlite.binding
    from numba import types

    for name, address in zip(names, addresses, strict=True):
        llvmlite.binding.add_symbol(f"glasu_{name}", address)
    pointers = types.void(*[types.voidptr] * 13)
    return tuple(types.ExternalFunction(f"glasu_{name}", pointers) for name in names)


GEMM = _external("sgemm_", "dgemm_")
