"""The inner loops of sampling and of layers, compiled by numba.

The loops are in `loops.py`. They are loaded at the first use of one, because importing numba takes a second and the
server never needs it. Numba compiles a loop when it is first called, and again for arguments of other types.

`labels` is an array of the caller: one int32 per node, -1 everywhere. A kernel resets every entry that it marked, so no
call costs time or memory in proportion to the graph. Two threads must not use one array at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glasu.model.kernels.loops import (
        adam_step,
        add_product,
        add_transposed,
        apply_mask,
        cross_entropy,
        draw_neighbors,
        draw_numbers,
        edges_between,
        fill_block,
        fill_mask,
        find_distinct,
        finish_classifier_gradients,
        gather_rows,
        gcnii_gradients,
        gcnii_result,
        gcnii_support,
        neighbors_outside,
        relu_gradient,
        relu_linear,
        relu_linear_gradients,
        sgd_step,
    )

__all__ = [
    "adam_step",
    "add_product",
    "add_transposed",
    "apply_mask",
    "cross_entropy",
    "draw_neighbors",
    "draw_numbers",
    "edges_between",
    "fill_block",
    "fill_mask",
    "find_distinct",
    "finish_classifier_gradients",
    "gather_rows",
    "gcnii_gradients",
    "gcnii_result",
    "gcnii_support",
    "neighbors_outside",
    "relu_gradient",
    "relu_linear",
    "relu_linear_gradients",
    "sgd_step",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from glasu.model.kernels import loops

    globals().update({each: getattr(loops, each) for each in __all__})  # the next use finds them without this function
    return globals()[name]
