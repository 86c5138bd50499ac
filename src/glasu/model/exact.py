"""Exact, unsampled layers over all nodes: every node once per layer, in row chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from glasu.data.party import Graph
from glasu.model.blocks import NodeSet
from glasu.model.layers import Hidden, rows_of
from glasu.model.sampler import Sampler
from glasu.model.split import ClientModel, no_dropout

CHUNK_ROWS = 8192  # rows per product
CHUNK_EDGES = 2**20  # edges per product


def _product_chunks(graph: Graph, targets: NodeSet) -> Iterator[slice]:
    """Divide rows so that no chunk has too many rows, nor too many edges unless a single row has."""
    ends = np.cumsum(graph.indptr[targets + 1] - graph.indptr[targets])
    start = 0
    while start < len(targets):
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + CHUNK_EDGES, side="right"))
        stop = min(max(stop, start + 1), start + CHUNK_ROWS, len(targets))
        yield slice(start, stop)
        start = stop


@torch.no_grad()
def exact_layer(
    model: ClientModel, sampler: Sampler, layer: int, hidden: Hidden, initial: Tensor | None, targets: NodeSet
) -> Tensor:
    """Compute H_m^+[l] at the rows `targets` from H_m[l] at all nodes."""
    module, hidden = model.layers[layer], model.layer_input(layer, hidden, no_dropout())
    prepared = module.prepare(hidden)  # type: ignore[operator]
    result = torch.empty(len(targets), model.config.hidden, dtype=next(model.parameters()).dtype)
    for rows in _product_chunks(sampler.graph, targets):
        block, columns = sampler.exact_block(targets[rows]).compact()  # a chunk's cost is that of its edges
        at_rows = None if initial is None else rows_of(initial, targets[rows])
        ready, read = rows_of(prepared, columns), rows_of(hidden, columns)
        result[rows] = model.activation(module.propagate(ready, read, at_rows, block))  # type: ignore[operator]
    return result
