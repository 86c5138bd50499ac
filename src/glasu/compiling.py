"""Numba where it is installed: loops over arrays become machine code, compiled at their first call and kept on disk.

Without numba, or with GLASU_NO_NUMBA=1, nothing is compiled; whoever has loops to compile has a twin in plain numpy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

Loop = TypeVar("Loop", bound=Callable[..., Any])

try:
    if os.environ.get("GLASU_NO_NUMBA", "0") not in ("", "0"):
        raise ImportError("numba is switched off")
    import numba
except ImportError:
    numba = None

COMPILES = numba is not None


def compiled(loop: Loop) -> Loop:
    """Compile a loop: one thread, no lock held, sums in the order written, so that bits depend on nothing else."""
    if numba is None:
        raise ImportError("numba is absent; use the numpy twin of this loop")
    try:
        result: Loop = numba.njit(cache=True, nogil=True, error_model="numpy")(loop)
    except RuntimeError:  # neither beside the source nor in the user's cache can anything be kept
        result = numba.njit(nogil=True, error_model="numpy")(loop)
    return result
