"""The inner loops of sampling and of layers, compiled by numba.

The loops are in `loops.py`. It is imported when a loop is first used, because importing numba takes a second and the
server never needs it. Numba compiles a loop on its first call, and again when it is called with new argument types.

`labels` is a scratch array of the caller: one int32 per node, all -1. A kernel resets every entry that it changed, so
the cost of a call does not grow with the graph. Two threads must not use the same array at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glasu.model.kernels.loops import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name == "loops":  # the import system looks for `loops` here first
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from glasu.model.kernels import loops

    globals()[name] = getattr(loops, name)  # later lookups do not call this function
    return globals()[name]
