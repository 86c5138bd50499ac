"""An extension as a user would write it: a sampler, an aggregation, an encoding, a backbone and a task.

This module imports without torch, because the server loads it too. `layers` needs torch and is imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glasu import registry
from glasu.config import RunConfig
from glasu.model.aggregation import Aggregation
from glasu.model.backbones import Backbone, ConvolutionBackbone
from glasu.model.blocks import Draw, NodeSet
from glasu.model.sampler import Sampler
from glasu.model.task import Metric, Multiclass
from glasu.wire.encoding import Array, Encoding
from glasu.wire.encodings import Precision, use_for_all_kinds
from glasu.wire.floats import Plain
from glasu.wire.message_key import Key
from glasu.wire.tensor_kinds import PROBABILITIES, TensorKind

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.layers import Layer

__version__ = "1.0"


class FirstNeighbors(Sampler):
    """Takes the first `train.fanout` neighbours of every node, in the order of their ids, in every round."""

    agrees_on_node_sets = True

    def draw(self, targets: NodeSet, round_index: int, layer: int, purpose: str = "neighbors") -> Draw:
        first, last = self.graph.indptr[targets], self.graph.indptr[targets + 1]
        kept = np.minimum(last - first, self.train.fanout)
        starts = np.concatenate([[0], np.cumsum(kept)])
        edges = np.arange(starts[-1]) + np.repeat(first - starts[:-1], kept)
        return Draw(np.union1d(targets, self.graph.indices[edges]), starts, edges)


class Sum(Aggregation):
    """H[l+1] = H_1^+[l] + ... + H_M^+[l]."""

    @property
    def widening(self) -> int:
        return 1

    def extract_others(self, joint: Tensor, partial: Tensor) -> Tensor:
        return (joint - partial).detach()

    def merge(self, others: Tensor, partial: Tensor) -> Tensor:
        return others + partial

    def own_gradient(self, gradient: Tensor) -> Tensor:
        return gradient

    def combine_partials(self, encoding: Encoding, payloads: Sequence[Array], key: Key, first_row: int) -> Array:
        return encoding.combine(payloads, 1, [key], first_row)[0]

    def combine_gradients(
        self, encoding: Encoding, payloads: Sequence[Array], keys: Sequence[Key], first_row: int
    ) -> list[Array]:
        return encoding.combine(payloads, 1, keys, first_row)


class Ring(Encoding):
    """Fixed-point integers modulo 2^32. The server adds them without decoding; the divisor is part of the row.

    Encodings of this kind can be masked: masks that cancel modulo 2^32 leave the sum unchanged.
    """

    name = "ring"
    dtype = np.dtype("<u4")
    step = 2.0**-16

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        limit = 2.0**31 - 1
        scaled = np.clip(np.rint(np.asarray(value, np.float64) / self.step), -limit, limit).astype(np.int64)
        numbers = (scaled % 2**32).astype("<u4")
        return np.hstack([np.ones((len(value), 1), "<u4"), numbers])

    def find_error(self, payload: Array, columns: int | None = None) -> str:
        expected = None if columns is None else columns + 1
        if error := super().find_error(payload, expected):
            return error
        return "" if (payload[:, 0] > 0).all() else "expected a positive divisor, got 0"

    def is_finite(self, payload: Array) -> bool:
        return True

    def decode(self, payload: Array) -> Array:
        signed = np.ascontiguousarray(payload[:, 1:]).view("<i4")
        return (signed * (self.step / payload[:, :1])).astype(np.float32)

    def combine(self, payloads: Sequence[Array], divisor: int, keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        total = np.sum(np.stack([payload[:, 1:] for payload in payloads]), axis=0, dtype="<u4")
        row = np.full((len(total), 1), divisor, "<u4")
        return [np.hstack([row, total]).astype("<u4")] * len(keys)

    def row_bytes(self, columns: int) -> int:
        return super().row_bytes(columns + 1)


def make_rings(config: RunConfig) -> Mapping[TensorKind, Encoding]:
    return {**use_for_all_kinds(Ring()), PROBABILITIES: Plain()}


RING = Precision(make_rings)


class TwoMatrices(Backbone):
    """Layers that add a node's own row, times a second matrix, to the mean of its neighbours' rows."""

    normalization = "mean"

    def build_layer(self, layer: int, width_in: int) -> Layer:
        from support.my_extension.layers import TwoMatricesLayer

        return TwoMatricesLayer(width_in, self.config.hidden)

    def activation(self, hidden: Tensor) -> Tensor:
        return hidden.tanh()


class GraphConvolution(ConvolutionBackbone):
    """Layers of PyG's GraphConv."""

    def convolution(self, width_in: int, width_out: int) -> Any:
        from torch_geometric.nn import GraphConv

        return GraphConv(width_in, width_out)


TOP_2 = Metric("top_2_accuracy", "top-2 accuracy")
BRIER = Metric("brier", "Brier score", is_share=False)


class Smoothed(Multiclass):
    """Cross-entropy with smoothed labels, and two metrics more. A prediction states its probability."""

    metrics = (*Multiclass.metrics, TOP_2, BRIER)
    selected_by = TOP_2
    smoothing = 0.1

    def loss_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
        from support.my_extension.layers import smoothed_loss

        return smoothed_loss(logits, labels, self.smoothing)

    def measure(self, scores: Array, labels: NDArray[np.int64]) -> dict[str, float]:
        likeliest = np.argsort(scores, axis=1)[:, -2:]
        errors = scores - (labels[:, None] == np.arange(scores.shape[1]))
        own = {"top_2_accuracy": (likeliest == labels[:, None]).any(axis=1).mean(), "brier": (errors**2).sum(1).mean()}
        return {**super().measure(scores, labels), **{name: float(value) for name, value in own.items()}}

    def columns(self, scores: Array, classes: Sequence[str]) -> dict[str, Any]:
        columns = super().columns(scores, classes)
        pairs = zip(columns["prediction"], scores.max(axis=1), strict=True)
        return {**columns, "prediction": [f"{name} ({best:.2f})" for name, best in pairs]}


registry.register("sampler", "first-neighbors", FirstNeighbors)
registry.register("aggregation", "sum", Sum)
registry.register("encoding", "ring", "support.my_extension:RING")
registry.register("backbone", "two-matrices", "support.my_extension:TwoMatrices")
registry.register("backbone", "graph-conv", "support.my_extension:GraphConvolution")
registry.register("task", "smoothed", "support.my_extension:Smoothed")
