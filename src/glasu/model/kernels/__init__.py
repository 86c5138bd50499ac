"""The inner loops of sampling and of layers, each twice; with equal bits, but for losses and products of single rows.

`loops` is compiled by numba; `arrays` is plain numpy, for where numba is absent. This package is whichever is there.

`labels` is a caller's array of one int32 per node, -1 everywhere; a kernel resets what it touched, so that no call
costs time or memory in proportion to the graph. One array must not be used by two threads at a time.
"""

from __future__ import annotations

from glasu.compiling import COMPILES

if COMPILES:
    from glasu.model.kernels.loops import (
        add_product,
        add_transposed,
        classifier,
        classifier_gradients,
        cross_entropy,
        dense_product,
        descend,
        descend_adaptively,
        distinct,
        draw_neighbors,
        draw_numbers,
        edges_between,
        fill_block,
        fill_bytes,
        fill_mask,
        gather_rows,
        gcnii_layer,
        gcnii_layer_gradients,
        neighbors_outside,
        rectified,
        rectified_gradients,
    )
else:
    from glasu.model.kernels.arrays import (
        add_product,
        add_transposed,
        classifier,
        classifier_gradients,
        cross_entropy,
        dense_product,
        descend,
        descend_adaptively,
        distinct,
        draw_neighbors,
        draw_numbers,
        edges_between,
        fill_block,
        fill_bytes,
        fill_mask,
        gather_rows,
        gcnii_layer,
        gcnii_layer_gradients,
        neighbors_outside,
        rectified,
        rectified_gradients,
    )

__all__ = [
    "add_product",
    "add_transposed",
    "classifier",
    "classifier_gradients",
    "cross_entropy",
    "dense_product",
    "descend",
    "descend_adaptively",
    "distinct",
    "draw_neighbors",
    "draw_numbers",
    "edges_between",
    "fill_block",
    "fill_bytes",
    "fill_mask",
    "gather_rows",
    "gcnii_layer",
    "gcnii_layer_gradients",
    "neighbors_outside",
    "rectified",
    "rectified_gradients",
]
