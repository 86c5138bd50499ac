"""The passes through gcnii's layers with their gradients written out.

They compute what the plain layers compute, to rounding, with fewer passes over memory, one compiled loop per layer and
no tape: several times as fast where blocks are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from glasu.model import kernels
from glasu.model.dropout import ENCODER, Dropout
from glasu.model.layers import GCNIILayer, Hidden
from glasu.model.passes import Inputs, Passes
from glasu.model.split import ClientModel

Array = NDArray[Any]
Drops = tuple[int, Any, Array]  # a mask: the threshold, the scale, a byte per value
Norm = tuple[Tensor, Tensor, Tensor]  # what was normalised, means, reciprocal deviations
NO_DRAWS, NO_KEY = np.empty((0, 0), np.uint8), np.uint64(0)
NOTHING = np.empty((0, 0))


@dataclass(frozen=True, eq=False)
class _Linear:
    """Weight and bias of a linear layer, and where their gradients belong; views, which follow the model."""

    weight: Array
    bias: Array
    at_weight: Array
    at_bias: Array

    @classmethod
    def of(cls, module: Any) -> _Linear:
        weights = module.weight, module.bias
        return cls(*(each.detach().numpy() for each in weights), *(each.grad.numpy() for each in weights))


@dataclass(frozen=True, eq=False)
class _GCNII:
    """The weight of a gcnii layer, where its gradient belongs, and the layer's constants."""

    weight: Array
    at_weight: Array
    constants: tuple[Any, Any, Any]  # s, k, t of `ByHand`

    @classmethod
    def of(cls, layer: GCNIILayer) -> _GCNII:
        weight, gradient = layer.linear.weight.detach().numpy(), layer.linear.weight.grad
        assert gradient is not None
        kind = weight.dtype.type
        return cls(weight, gradient.numpy(), (kind(layer.alpha / layer.larger), kind(layer.kept), kind(layer.turned)))


@dataclass(frozen=True, eq=False)
class Hand:
    """The weights of a gcnii network as arrays, once they have been laid out (`optimizer.laid_out`)."""

    encoder: _Linear
    layers: tuple[_GCNII, ...]
    classifier: _Linear | None
    norms: tuple[nn.LayerNorm, ...]

    @classmethod
    def of(cls, model: ClientModel) -> Hand | None:
        """Return the weights, where all layers are gcnii's without a projection in front; else None."""
        layers = [layer for layer in model.layers if isinstance(layer, GCNIILayer)]
        if len(layers) < len(model.layers) or any(layer.reduce or layer.alpha >= 1 - layer.alpha for layer in layers):
            return None
        classifier = None if model.classifier is None else _Linear.of(model.classifier)
        norms: Any = tuple(model.norms or ())
        return cls(_Linear.of(model.encoder), tuple(map(_GCNII.of, layers)), classifier, norms)


@dataclass(frozen=True, eq=False)
class _Kept:
    """What a layer needs to go back: what its product read and made, what it was dropped by, what undoes its norm."""

    read: Array
    made: Array
    drops: Drops
    norm: Norm | None


@dataclass(frozen=True, eq=False)
class _Classified:
    """What the classifier needs to go back; `factors` is the mask of its input, empty for none."""

    read: Array
    factors: Array
    norm: Norm | None


class ByHand(Passes):
    """gcnii on sparse blocks: with P = A (H * mask) + s H0, a layer makes H+ = ReLU(k P + t P W) of H.

    Its gradients, with G = dL/dH+ where H+ > 0, else 0:

        R = dL/dP = k G + t G W^T      dL/dW = t P^T G      dL/dH0 = s R      dL/dH = (A^T R) * mask
    """

    def __init__(self, hand: Hand, inputs: Inputs, dropout: Dropout) -> None:
        super().__init__(inputs, dropout)
        self.hand = hand
        self._kept: dict[int, _Kept] = {}
        self._classified: _Classified | None = None
        self._read = inputs.features  # X * mask
        self._initial = self._at_initial = NOTHING  # H0, and the gradient there of all layers so far

    def encode(self) -> Hidden:
        encoder = self.hand.encoder
        self._read = self.dropout(self.inputs.features, ENCODER)
        if isinstance(self._read, Tensor):
            weight, bias = torch.from_numpy(encoder.weight), torch.from_numpy(encoder.bias)
            self._initial = torch.addmm(bias, self._read, weight).relu_().numpy()
        else:
            self._initial = np.empty((self._read.shape[0], len(encoder.bias)), encoder.bias.dtype)
            parts = self._read.indptr, self._read.indices, self._read.data
            kernels.rectified(*parts, encoder.weight, encoder.bias, self._initial)
        return torch.from_numpy(self._initial)

    def layer(self, layer: int, hidden: Hidden) -> Tensor:
        assert isinstance(hidden, Tensor)
        own, matrix, rows = self.hand.layers[layer], self.inputs.blocks[layer].matrix, self.inputs.initial_rows[layer]
        hidden, norm = self._normalized(layer, hidden)
        read = hidden.contiguous().numpy()
        mask, kind = self.dropout.mask(layer), read.dtype.type
        if mask is None:
            key, drops = (NO_KEY, NO_KEY), (0, kind(1), NO_DRAWS)
        else:
            key, drops = mask[:2], (mask.threshold, kind(mask.scale), np.empty(read.shape, np.uint8))
        support, made = np.empty((2, len(rows), read.shape[1]), read.dtype)
        about = matrix.indptr, matrix.indices, matrix.data, read, *key, *drops, self._initial, rows
        kernels.gcnii(*about, own.weight, *own.constants, support, made)
        self._kept[layer] = _Kept(support, made, drops, norm)
        self.partials[layer] = torch.from_numpy(made)
        return self.partials[layer]

    def logits(self, joint: Tensor) -> Tensor:
        own, last = self.hand.classifier, len(self.hand.layers)
        assert own is not None
        joint, norm = self._normalized(last, joint)
        read, mask = joint.numpy(), self.dropout.mask(last)
        factors = NOTHING if mask is None else mask.factors(read.size, read.dtype).reshape(read.shape)
        read = read * factors if len(factors) else read
        made = read @ own.weight
        made += own.bias
        self._classified = _Classified(read, factors, norm)
        return torch.from_numpy(made)

    def begin_back(self) -> None:
        """Do nothing: every gradient is written anew."""

    def back_from_logits(self, gradient: Tensor) -> Tensor:
        own, kept, found = self.hand.classifier, self._classified, gradient.numpy()
        assert own is not None
        assert kept is not None
        np.matmul(kept.read.T, found, out=own.at_weight)
        np.add.reduce(found, axis=0, out=own.at_bias)
        back = found @ own.weight.T
        back = back * kept.factors if len(kept.factors) else back
        return self._before_norm(len(self.hand.layers), torch.from_numpy(back), kept.norm)

    def back(self, layer: int, gradient: Tensor) -> Tensor | None:
        own, matrix, rows = self.hand.layers[layer], self.inputs.blocks[layer].matrix, self.inputs.initial_rows[layer]
        kept, found = self._kept.pop(layer), gradient.contiguous().numpy()
        if not len(self._at_initial):
            self._at_initial = np.zeros_like(self._initial)
        back = np.empty((matrix.width, found.shape[1]), found.dtype)
        about = matrix.indptr, matrix.indices, matrix.data, *kept.drops, rows, own.weight, *own.constants
        kernels.gcnii_gradients(*about, kept.read, kept.made, found, own.at_weight, self._at_initial, back)
        return self._before_norm(layer, torch.from_numpy(back), kept.norm)

    def back_to_features(self, gradient: Tensor | None) -> None:
        assert gradient is not None
        own, total = self.hand.encoder, self._at_initial
        total += gradient.numpy()
        if isinstance(self._read, Tensor):
            gated = np.where(self._initial > 0, total, total.dtype.type(0))
            torch.mm(self._read.t(), torch.from_numpy(gated), out=torch.from_numpy(own.at_weight))
            np.add.reduce(gated, axis=0, out=own.at_bias)
        else:
            own.at_weight.fill(0)
            own.at_bias.fill(0)
            parts = self._read.indptr, self._read.indices, self._read.data
            kernels.rectified_gradients(*parts, self._initial, total, own.at_weight, own.at_bias)

    def _normalized(self, layer: int, hidden: Tensor) -> tuple[Tensor, Norm | None]:
        """Return what `ClientModel.layer_input` reads before its dropout, and what undoes the normalisation."""
        if not self.hand.norms or layer == 0:
            return hidden, None
        norm = self.hand.norms[layer - 1]
        about = norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps
        made, mean, deviation = torch.native_layer_norm(hidden, *about)
        return made, (hidden, mean, deviation)

    def _before_norm(self, layer: int, gradient: Tensor, kept: Norm | None) -> Tensor:
        if kept is None:
            return gradient
        norm = self.hand.norms[layer - 1]
        about = norm.normalized_shape, *kept[1:], norm.weight.detach(), norm.bias.detach(), [True, True, True]
        back, *found = torch.ops.aten.native_layer_norm_backward(gradient, kept[0], *about)
        for weight, part in zip((norm.weight, norm.bias), found, strict=True):
            assert weight.grad is not None
            weight.grad.copy_(part)
        return back  # type: ignore[no-any-return]
