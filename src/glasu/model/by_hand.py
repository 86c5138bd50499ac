"""The passes through gcnii's layers with their gradients written out.

They compute what the plain layers compute, to rounding, with fewer passes over memory and no tape: torch's products
between compiled loops, several times as fast where blocks are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
Drops = tuple[np.uint8, Any, Array]  # a mask: the threshold, the scale, a byte per value
Norm = tuple[Tensor, Tensor, Tensor]  # what was normalised, means, reciprocal deviations
NO_HALF = np.uint64(0)
NO_DRAWS = np.empty((0, 0), np.uint8)
NOTHING = np.empty((0, 0))


@dataclass(frozen=True, eq=False)
class _Linear:
    """Weight and bias of a linear layer, and where their gradients belong; views, which follow the model."""

    weight: Tensor
    bias: Tensor
    at_weight: Tensor
    at_bias: Tensor
    arrays: tuple[tuple[Array, Array], tuple[Array, Array]]  # the same again: weights, gradients

    @classmethod
    def of(cls, module: Any) -> _Linear:
        weight, bias = module.weight.detach(), module.bias.detach()
        at_weight, at_bias = module.weight.grad, module.bias.grad
        arrays = (weight.numpy(), bias.numpy()), (at_weight.numpy(), at_bias.numpy())
        return cls(weight, bias, at_weight, at_bias, arrays)


@dataclass(frozen=True, eq=False)
class _GCNII:
    """The weight of a gcnii layer, where its gradient belongs, and the layer's constants."""

    weight: Tensor
    transposed: Tensor
    at_weight: Tensor
    share: Any  # s of `ByHand`
    kept: Any  # k
    turned: Any  # t

    @classmethod
    def of(cls, layer: GCNIILayer) -> _GCNII:
        weight, gradient = layer.linear.weight.detach(), layer.linear.weight.grad
        assert gradient is not None
        kind = weight.numpy().dtype.type
        constants = kind(layer.alpha / layer.larger), kind(layer.kept), kind(layer.turned)
        return cls(weight, weight.t(), gradient, *constants)


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


class _Kept(NamedTuple):
    """What a layer needs to go back: what its product read and made, what it was dropped by, what undoes its norm."""

    read: Tensor
    made: Array
    drops: Drops
    norm: Norm | None


class _Classified(NamedTuple):
    """What the classifier needs to go back; `factors` is the mask of its input."""

    read: Tensor
    factors: Tensor | None
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
            self._initial = torch.addmm(encoder.bias, self._read, encoder.weight).relu_().numpy()
        else:
            weight, bias = encoder.arrays[0]
            self._initial = np.empty((self._read.shape[0], len(bias)), bias.dtype)
            kernels.rectified(self._read.indptr, self._read.indices, self._read.data, weight, bias, self._initial)
        return torch.from_numpy(self._initial)

    def layer(self, layer: int, hidden: Hidden) -> Tensor:
        assert isinstance(hidden, Tensor)
        own, matrix, rows = self.hand.layers[layer], self.inputs.blocks[layer].matrix, self.inputs.initial_rows[layer]
        norm = None
        if self.hand.norms and layer > 0:
            hidden, norm = self._normalized(layer, hidden)
        read = hidden.contiguous().numpy()
        mask, kind = self.dropout.mask(layer), read.dtype.type
        drops: Drops = np.uint8(0), kind(1), NO_DRAWS
        if mask is not None:
            drops = mask.threshold, kind(mask.scale), np.empty(read.shape, np.uint8)
        low, high = (NO_HALF, NO_HALF) if mask is None else mask[:2]
        shape = (len(rows), read.shape[1])
        support, made = np.empty(shape, read.dtype), np.empty(shape, read.dtype)
        parts = matrix.indptr, matrix.indices, matrix.data
        kernels.gcnii_support(*parts, read, low, high, *drops, self._initial, rows, own.share, support)
        product, result = torch.from_numpy(support), torch.from_numpy(made)
        torch.mm(product, own.weight, out=result)
        kernels.gcnii_result(support, own.kept, own.turned, made)
        self._kept[layer] = _Kept(product, made, drops, norm)
        self.partials[layer] = result
        return result

    def logits(self, joint: Tensor) -> Tensor:
        own, last = self.hand.classifier, len(self.hand.layers)
        assert own is not None
        norm = None
        if self.hand.norms:
            joint, norm = self._normalized(last, joint)
        mask = self.dropout.mask(last)
        factors = None if mask is None else mask.factors_like(joint)
        read = joint if factors is None else joint * factors
        self._classified = _Classified(read, factors, norm)
        return torch.addmm(own.bias, read, own.weight)

    def begin_back(self) -> None:
        """Do nothing: every gradient is written anew."""

    def back_from_logits(self, gradient: Tensor) -> Tensor:
        own, kept = self.hand.classifier, self._classified
        assert own is not None
        assert kept is not None
        torch.mm(kept.read.t(), gradient, out=own.at_weight)
        torch.sum(gradient, 0, out=own.at_bias)
        back = torch.mm(gradient, own.weight.t())
        back = back if kept.factors is None else back.mul_(kept.factors)
        return back if kept.norm is None else self._before_norm(len(self.hand.layers), back, kept.norm)

    def back(self, layer: int, gradient: Tensor) -> Tensor | None:
        own, matrix, rows = self.hand.layers[layer], self.inputs.blocks[layer].matrix, self.inputs.initial_rows[layer]
        kept, found = self._kept.pop(layer), gradient.contiguous().numpy()
        if not len(self._at_initial):
            self._at_initial = np.zeros_like(self._initial)
        gated, at_support = np.empty_like(found), np.empty_like(found)
        back = np.empty((matrix.width, found.shape[1]), found.dtype)
        kernels.gate(found, kept.made, own.turned, gated)
        turned = torch.from_numpy(gated)
        torch.mm(kept.read.t(), turned, out=own.at_weight)
        torch.mm(turned, own.transposed, out=torch.from_numpy(at_support))
        about = matrix.indptr, matrix.indices, matrix.data, *kept.drops, rows, own.share, own.kept, kept.made, found
        kernels.gcnii_gradients(*about, at_support, self._at_initial, back)
        at_hidden = torch.from_numpy(back)
        return at_hidden if kept.norm is None else self._before_norm(layer, at_hidden, kept.norm)

    def back_to_features(self, gradient: Tensor | None) -> None:
        assert gradient is not None
        own, found = self.hand.encoder, gradient.numpy()
        if isinstance(self._read, Tensor):
            gated = np.where(self._initial > 0, self._at_initial + found, found.dtype.type(0))
            torch.mm(self._read.t(), torch.from_numpy(gated), out=own.at_weight)
            torch.sum(torch.from_numpy(gated), 0, out=own.at_bias)
        else:
            parts = self._read.indptr, self._read.indices, self._read.data
            kernels.rectified_gradients(*parts, self._initial, self._at_initial, found, *own.arrays[1])

    def _normalized(self, layer: int, hidden: Tensor) -> tuple[Tensor, Norm]:
        """Return what `ClientModel.layer_input` reads before its dropout, and what undoes the normalisation."""
        norm = self.hand.norms[layer - 1]
        about = norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps
        made, mean, deviation = torch.native_layer_norm(hidden, *about)
        return made, (hidden, mean, deviation)

    def _before_norm(self, layer: int, gradient: Tensor, kept: Norm) -> Tensor:
        norm = self.hand.norms[layer - 1]
        about = norm.normalized_shape, *kept[1:], norm.weight.detach(), norm.bias.detach(), [True, True, True]
        back, *found = torch.ops.aten.native_layer_norm_backward(gradient, kept[0], *about)
        for weight, part in zip((norm.weight, norm.bias), found, strict=True):
            assert weight.grad is not None
            weight.grad.copy_(part)
        return back  # type: ignore[no-any-return]
