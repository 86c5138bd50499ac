"""Exact inference: layers over all nodes and all edges, every node once per layer, in chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
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
from glasu.model.step import ForwardStep, Report

CHUNK_VALUES = 2**24  # feature values that are read at a time


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """X_m where it is stored, perhaps in a file. Rows are read, and scaled, when they are needed."""

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
        """All rows. They stay in memory, because a product that reads all rows is followed by others that do."""
        return self.read(np.arange(self.shape[0]))

    def rows(self, positions: NodeSet) -> Hidden:
        """Return the rows at `positions`, which are distinct."""
        return self.whole if len(positions) == self.shape[0] else self.read(positions)


class ExactInference(ForwardStep):
    """The forward pass at all nodes; the last layer computes the requested nodes only.

    All rows of the lower layers are computed, so no node set has to travel.
    """

    def __init__(self, model: ClientModel, sampler: Sampler, features: Hidden | FeatureRows, nodes: NodeSet) -> None:
        """Prepare a pass.

        Args:
            model: the network.
            sampler: builds the blocks.
            features: X_m at all nodes, in memory or where it is stored.
            nodes: the rows of H[L], in the order of the result.
        """
        self.model, self.sampler, self.features, self.nodes = model, sampler, features, nodes
        self._initial: Tensor | None = None

    def encode(self) -> Hidden | FeatureRows:
        if isinstance(self.features, FeatureRows):
            hidden, self._initial = start_exact(self.model, self.features)
            return hidden
        with torch.no_grad():
            hidden, self._initial = self.model.encode(self.features, no_dropout())
        return hidden

    def layer(self, layer: int, hidden: Hidden | FeatureRows) -> Tensor:
        made, parts = self._start_layer(layer, hidden)
        for rows, computed in parts:
            made[rows] = computed
        return made

    def layer_in_parts(
        self, layer: int, hidden: Hidden | FeatureRows, report: Callable[[float], Report]
    ) -> Generator[Report, None, Tensor]:
        num_nodes = self.features.shape[0]
        total = (self.model.config.num_layers - 1) * num_nodes + len(self.nodes)
        done = layer * num_nodes
        made, parts = self._start_layer(layer, hidden)
        for rows, computed in parts:
            made[rows] = computed
            done += len(computed)
            if len(computed) < len(made):  # a small graph needs one product and no progress report
                yield report(done / total)
        return made

    def _start_layer(self, layer: int, hidden: Hidden | FeatureRows) -> tuple[Tensor, Iterator[tuple[slice, Tensor]]]:
        """Return an array for H_m^+[l], and the parts to write into it."""
        config = self.model.config
        targets = self.nodes if layer == config.num_layers - 1 else np.arange(self.features.shape[0])
        made = torch.empty(len(targets), config.hidden, dtype=next(self.model.parameters()).dtype)
        return made, compute_exact_layer(self.model, self.sampler, layer, hidden, self._initial, targets)

    @torch.no_grad()
    def logits(self, joint: Tensor) -> Tensor:
        return self.model.classify(joint, no_dropout())


@torch.no_grad()
def start_exact(model: ClientModel, features: FeatureRows) -> tuple[Hidden | FeatureRows, Tensor | None]:
    """Return H_m[0] of all nodes and, with an encoder, H_m^0."""
    if model.encoder is None:
        return features, None
    initial = torch.empty(features.shape[0], model.config.hidden, dtype=next(model.parameters()).dtype)
    for nodes in features.chunks():
        encoded, _ = model.encode(features.read(nodes), no_dropout())
        assert isinstance(encoded, Tensor)
        initial[nodes[0] : nodes[-1] + 1] = encoded
    return initial, initial


@torch.no_grad()
def compute_exact_layer(
    model: ClientModel,
    sampler: Sampler,
    layer: int,
    hidden: Hidden | FeatureRows,
    initial: Tensor | None,
    targets: NodeSet,
) -> Iterator[tuple[slice, Tensor]]:
    """Compute H_m^+[l] at the rows `targets` from H_m[l] at all nodes, some rows at a time.

    Yields:
        A slice of the targets, and their rows of H_m^+[l].
    """
    module = model.layers[layer]
    assert isinstance(module, Layer)
    if not isinstance(hidden, FeatureRows):
        hidden = model.layer_input(layer, hidden, no_dropout())
    prepared = _prepare(module, hidden)
    for rows, block, columns in sampler.exact_blocks(targets):  # a chunk costs as much as it has edges
        at_rows = None if initial is None else rows_of(initial, targets[rows])
        assert at_rows is None or isinstance(at_rows, Tensor)
        ready = _rows(prepared, columns)
        read = ready if prepared is hidden else _rows(hidden, columns) if module.reads_input else None
        yield rows, model.activation(module.propagate(ready, read, at_rows, block))


def _rows(hidden: Hidden | FeatureRows, positions: NodeSet) -> Hidden:
    return hidden.rows(positions) if isinstance(hidden, FeatureRows) else rows_of(hidden, positions)


def _prepare(module: Layer, hidden: Hidden | FeatureRows) -> Hidden | FeatureRows:
    """Apply `Layer.prepare` to all rows; features that it leaves unchanged stay where they are stored."""
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
