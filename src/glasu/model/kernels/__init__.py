"""The inner loops of sampling and of layers, compiled by numba.

The loops are in `loops.py`, which is loaded at the first use of one, because importing numba takes a second and the
server never needs it. Numba compiles a loop when it is first called, and again for arguments of other types.

`labels` is an array of the caller: one int32 per node, -1 everywhere. A kernel resets every entry that it marked, so no
call costs time or memory in proportion to the graph. Two threads must not use one array at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glasu.model.kernels.loops import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name == "loops":  # `import` finds the module itself
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from glasu.model.kernels import loops

    globals()[name] = getattr(loops, name)  # the next use finds it without this function
    return globals()[name]
