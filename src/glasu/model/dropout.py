"""Dropout whose masks are functions of keys: the same round, step and layer drop the same values again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasu.model import kernels
from glasu.model.sparse import SparseRows
from glasu.randomness import Stream

ENCODER = -1  # the "layer" of draws that concern the raw features
ATTENTION = -2  # less l: the "layer" of draws that concern the attention of layer l


class Mask(NamedTuple):
    """A mask before it is drawn: 0 for each value whose byte of the key's words is below the threshold."""

    low: np.uint64
    high: np.uint64
    threshold: np.uint8
    scale: float  # what the values that are kept are multiplied by

    def factors(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return one factor per value: 0, or what makes up for those."""
        mask = np.empty(count, dtype)
        kernels.fill_mask(self.low, self.high, self.threshold, dtype.type(self.scale), mask)
        return mask

    def factors_like(self, hidden: Tensor) -> Tensor:
        """Return one factor for each value of a tensor."""
        dtype = np.dtype(np.float64 if hidden.dtype == torch.float64 else np.float32)
        return torch.from_numpy(self.factors(hidden.numel(), dtype)).view(hidden.shape)


class Dropout:
    """The masks of one step of one client."""

    def __init__(self, rate: float, stream: Callable[[int], Stream]) -> None:
        nearest = min(max(round(rate * 2**8), 1), 2**8 - 1)  # a draw is a byte; something is kept, something dropped
        self.threshold = np.uint8(nearest if rate > 0 else 0)
        self.scale = 2**8 / (2**8 - nearest)
        self.stream = stream

    def mask(self, layer: int) -> Mask | None:
        """Return which values of the input of a layer are dropped; None: none."""
        return Mask(*self.stream(layer).halves(), self.threshold, self.scale) if self.threshold else None

    def __call__(self, hidden: Tensor | SparseRows, layer: int) -> Tensor | SparseRows:
        """Drop values of the input of a layer and scale up the rest; of sparse features, the stored values."""
        mask = self.mask(layer)
        if mask is None:
            return hidden
        if isinstance(hidden, Tensor):
            return hidden * mask.factors_like(hidden)
        return hidden.with_data(hidden.data * mask.factors(hidden.nnz, hidden.dtype))

    def attention(self, shares: Tensor, layer: int) -> Tensor:
        """Drop shares of a layer's attention and scale up the rest; other draws than those for its input."""
        dropped = self(shares, ATTENTION - layer)
        assert isinstance(dropped, Tensor)
        return dropped

    def fork(self, layer: int) -> None:
        """Seed torch's own generator for a layer of another library."""
        torch.default_generator.manual_seed(self.stream(layer).torch_seed())


def no_dropout() -> Dropout:
    """Return the dropout of evaluation: none."""
    return Dropout(0.0, lambda layer: Stream(0, "dropout", layer=layer))
