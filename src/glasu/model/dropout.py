"""Dropout whose masks are functions of a key: the same round, step and layer always give the same mask.

Masks must be reproducible for two reasons. Step 0 of a round reuses the forward pass of the joint inference, so its
backward pass needs the same masks. And a client that repeats a round after a crash must send the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasu.model import kernels
from glasu.model.seeding import seed_torch_generator
from glasu.model.sparse import SparseRows
from glasu.randomness import Stream

ENCODER = -1  # used as the layer number in the keys of masks for the raw features
ATTENTION = -2  # ATTENTION - l is used as the layer number in the keys of masks for the attention of layer l


class Mask(NamedTuple):
    """A mask before it is drawn. Its factor is 0 where the random byte is below the threshold, else `scale`."""

    low: np.uint64
    high: np.uint64
    threshold: np.uint8
    scale: float  # the factor of values that are kept

    def factors(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Draw the mask: one factor per value."""
        mask = np.empty(count, dtype)
        kernels.fill_mask(self.low, self.high, self.threshold, dtype.type(self.scale), mask)
        return mask

    def factors_like(self, hidden: Tensor) -> Tensor:
        """Draw the mask in the shape and precision of a tensor."""
        dtype = np.dtype(np.float64 if hidden.dtype == torch.float64 else np.float32)
        return torch.from_numpy(self.factors(hidden.numel(), dtype)).view(hidden.shape)


class Dropout:
    """The masks of one step of one client."""

    def __init__(self, rate: float, stream: Callable[[int], Stream]) -> None:
        # The rate in multiples of 1/256, because a draw is one byte. With 0 or 256, all or no values would be kept.
        nearest = min(max(round(rate * 2**8), 1), 2**8 - 1)
        self.threshold = np.uint8(nearest if rate > 0 else 0)
        self.scale = 2**8 / (2**8 - nearest)
        self.stream = stream

    def mask(self, layer: int) -> Mask | None:
        """Return the mask of the input of a layer; None if nothing is dropped."""
        return Mask(*self.stream(layer).key_halves(), self.threshold, self.scale) if self.threshold else None

    def __call__(self, hidden: Tensor | SparseRows, layer: int) -> Tensor | SparseRows:
        """Drop values of a layer's input and scale up the rest. In sparse features, drop only stored values."""
        mask = self.mask(layer)
        if mask is None:
            return hidden
        if isinstance(hidden, Tensor):
            return hidden * mask.factors_like(hidden)
        return hidden.with_data(hidden.data * mask.factors(hidden.nnz, hidden.dtype))

    def attention(self, shares: Tensor, layer: int) -> Tensor:
        """Drop attention weights of a layer and scale up the rest. The layer's input has a different mask."""
        dropped = self(shares, ATTENTION - layer)
        assert isinstance(dropped, Tensor)
        return dropped

    def fork(self, layer: int) -> None:
        """Seed torch's generator for a layer that draws from it (a convolution of another library)."""
        seed_torch_generator(self.stream(layer))


def make_no_dropout() -> Dropout:
    """Return a dropout that drops nothing, for evaluation."""
    return Dropout(0.0, lambda layer: Stream(0, "dropout", layer=layer))
