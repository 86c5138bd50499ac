"""Exact, unsampled layers over all nodes: every node once per layer, in row chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from glasu.model.blocks import NodeSet
from glasu.model.dropout import no_dropout
from glasu.model.layers import Hidden, Layer, rows_of
from glasu.model.sampler import Sampler
from glasu.model.split import ClientModel

CHUNK_VALUES = 2**24  # feature values that are read at a time


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """X_m where it lies, perhaps in a file: rows are read, and scaled, when they are needed."""

    shape: tuple[int, int]
    read: Callable[[NodeSet], Hidden]

    def chunks(self) -> Iterator[NodeSet]:
        """Divide all nodes into chunks whose features have a bounded size."""
        nodes, width = self.shape
        size = max(1, CHUNK_VALUES // max(1, width))
        for start in range(0, nodes, size):
            yield np.arange(start, min(start + size, nodes))

    @cached_property
    def whole(self) -> Hidden:
        """All rows; where every product reads all of them, they are kept from one to the next."""
        return self.read(np.arange(self.shape[0]))

    def rows(self, positions: NodeSet) -> Hidden:
        """Return the rows at `positions`, a set of nodes."""
        return self.whole if len(positions) == self.shape[0] else self.read(positions)


@torch.no_grad()
def exact_start(model: ClientModel, features: FeatureRows) -> tuple[Hidden | FeatureRows, Tensor | None]:
    """Return H_m[0] and, for gcnii, H_m^0, of all nodes."""
    if model.encoder is None:
        return features, None
    initial = torch.empty(features.shape[0], model.config.hidden, dtype=next(model.parameters()).dtype)
    for nodes in features.chunks():
        encoded, _ = model.encode(features.read(nodes), no_dropout())
        assert isinstance(encoded, Tensor)
        initial[nodes[0] : nodes[-1] + 1] = encoded
    return initial, initial


@torch.no_grad()
def exact_layer(
    model: ClientModel,
    sampler: Sampler,
    layer: int,
    hidden: Hidden | FeatureRows,
    initial: Tensor | None,
    targets: NodeSet,
) -> Iterator[tuple[slice, Tensor]]:
    """Compute H_m^+[l] at the rows `targets` from H_m[l] at all nodes, some rows at a time.

    Yields:
        Which of the targets, and their rows of H_m^+[l].
    """
    module = model.layers[layer]
    if not isinstance(hidden, FeatureRows):
        hidden = model.layer_input(layer, hidden, no_dropout())
    prepared = _prepared(module, hidden)  # type: ignore[arg-type]
    for rows, block, columns in sampler.exact_blocks(targets):  # a chunk's cost is that of its edges
        at_rows = None if initial is None else rows_of(initial, targets[rows])
        ready = _rows(prepared, columns)
        read = ready if prepared is hidden else _rows(hidden, columns) if module.reads_input else None
        yield rows, model.activation(module.propagate(ready, read, at_rows, block))  # type: ignore[operator]


def _rows(hidden: Hidden | FeatureRows, positions: NodeSet) -> Hidden:
    return hidden.rows(positions) if isinstance(hidden, FeatureRows) else rows_of(hidden, positions)


def _prepared(module: Layer, hidden: Hidden | FeatureRows) -> Hidden | FeatureRows:
    """Return what the layer makes of single rows; where it leaves features as they are, they stay where they lie."""
    if not isinstance(hidden, FeatureRows):
        return module.prepare(hidden)
    prepared: list[Tensor] = []
    for nodes in hidden.chunks():
        rows = hidden.read(nodes)
        ready = module.prepare(rows)
        if ready is rows:
            return hidden
        assert isinstance(ready, Tensor)
        prepared.append(ready)
    return torch.cat(prepared)
