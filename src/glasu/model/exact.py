"""Exact inference: each layer computes every node once, with all edges, in chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from glasu.model.blocks import NodeSet
from glasu.model.dropout import make_no_dropout
from glasu.model.layers import Hidden, Layer, take_rows
from glasu.model.sampler import Sampler
from glasu.model.split import ClientModel
from glasu.model.step import ForwardStep, ProgressEvent


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """The features X_m, in memory or in a file. Rows are read and scaled when they are needed."""

    shape: tuple[int, int]
    read: Callable[[NodeSet], Hidden]
    chunk_values: int | None = 2**24  # limit on the values of one read; None: no limit, for features in memory

    def chunks(self) -> Iterator[NodeSet]:
        """Divide all nodes into chunks whose features have a bounded size."""
        nodes, width = self.shape
        size = max(1, nodes if self.chunk_values is None else self.chunk_values // max(1, width))
        for start in range(0, nodes, size):
            yield np.arange(start, min(start + size, nodes))

    @cached_property
    def whole(self) -> Hidden:
        """All rows. They stay in memory, because later products also read all rows."""
        return self.read(np.arange(self.shape[0]))

    def rows(self, positions: NodeSet) -> Hidden:
        """Return the rows at `positions`, which must be distinct."""
        return self.whole if len(positions) == self.shape[0] else self.read(positions)


class ExactInference(ForwardStep):
    """The forward pass at all nodes. The last layer is computed at the requested nodes only.

    All rows of the lower layers are computed, so clients need not agree on node sets.
    """

    def __init__(self, model: ClientModel, sampler: Sampler, features: FeatureRows, nodes: NodeSet) -> None:
        """Prepare a pass.

        Args:
            model: the network.
            sampler: builds the blocks.
            features: X_m at all nodes.
            nodes: the rows of H[L], in the order of the result.
        """
        self.model, self.sampler, self.features, self.nodes = model, sampler, features, nodes
        self._initial: Tensor | None = None

    @torch.no_grad()
    def encode(self) -> Hidden | FeatureRows:
        if self.model.encoder is None:
            return self.features
        self._initial = self._new_rows(self.features.shape[0])
        for nodes in self.features.chunks():
            encoded, _ = self.model.encode(self.features.read(nodes), make_no_dropout())
            assert isinstance(encoded, Tensor)
            self._initial[nodes[0] : nodes[-1] + 1] = encoded
        return self._initial

    @torch.no_grad()
    def layer_in_parts(
        self, layer: int, hidden: Hidden | FeatureRows, report: Callable[[float], ProgressEvent]
    ) -> Generator[ProgressEvent, None, Tensor]:
        """Compute H_m^+[l] from H_m[l] at all nodes, some rows at a time."""
        num_nodes, last = self.features.shape[0], self.model.config.num_layers - 1
        targets = self.nodes if layer == last else np.arange(num_nodes)
        made, done = self._new_rows(len(targets)), layer * num_nodes
        module = self.model.layers[layer]
        assert isinstance(module, Layer)
        if not isinstance(hidden, FeatureRows):
            hidden = self.model.layer_input(layer, hidden, make_no_dropout())
        prepared = _prepare(module, hidden)
        for rows, block, columns in self.sampler.exact_blocks(targets):
            initial = None if self._initial is None else take_rows(self._initial, targets[rows])
            assert initial is None or isinstance(initial, Tensor)
            ready = _rows(prepared, columns)
            read = ready if prepared is hidden else _rows(hidden, columns) if module.reads_input else None
            made[rows] = self.model.activation(module.propagate(ready, read, initial, block))
            done += len(block.positions)
            if len(block.positions) < len(made):  # a small graph needs one product and no progress report
                yield report(done / (last * num_nodes + len(self.nodes)))
        return made

    @torch.no_grad()
    def logits(self, joint: Tensor) -> Tensor:
        return self.model.classify(joint, make_no_dropout())

    def _new_rows(self, count: int) -> Tensor:
        return torch.empty(count, self.model.config.hidden, dtype=next(self.model.parameters()).dtype)


def _rows(hidden: Hidden | FeatureRows, positions: NodeSet) -> Hidden:
    return hidden.rows(positions) if isinstance(hidden, FeatureRows) else take_rows(hidden, positions)


def _prepare(module: Layer, hidden: Hidden | FeatureRows) -> Hidden | FeatureRows:
    """Apply `Layer.prepare` to all rows. If `prepare` returns features unchanged, do not load all of them."""
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
