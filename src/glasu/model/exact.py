"""Exact, unsampled layers over all nodes: every node once per layer, in row chunks of bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from glasu.model.blocks import NodeSet
from glasu.model.layers import Hidden, rows_of
from glasu.model.sampler import Sampler
from glasu.model.split import ClientModel, no_dropout


@torch.no_grad()
def exact_layer(
    model: ClientModel, sampler: Sampler, layer: int, hidden: Hidden, initial: Tensor | None, targets: NodeSet
) -> Tensor:
    """Compute H_m^+[l] at the rows `targets` from H_m[l] at all nodes."""
    module, hidden = model.layers[layer], model.layer_input(layer, hidden, no_dropout())
    prepared = module.prepare(hidden)  # type: ignore[operator]
    result = torch.empty(len(targets), model.config.hidden, dtype=next(model.parameters()).dtype)
    for rows, block, columns in sampler.exact_blocks(targets):  # a chunk's cost is that of its edges
        at_rows = None if initial is None else rows_of(initial, targets[rows])
        ready, read = rows_of(prepared, columns), rows_of(hidden, columns)
        result[rows] = model.activation(module.propagate(ready, read, at_rows, block))  # type: ignore[operator]
    return result
