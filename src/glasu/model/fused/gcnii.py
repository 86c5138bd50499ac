"""The passes through gcnii's layers with their gradients written out.

They compute what the plain layers compute, to rounding, with fewer passes over memory and no tape: a compiled call per
layer, products included, several times as fast where blocks are small. Weights change after everything else of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from glasu.model import kernels
from glasu.model.dropout import ENCODER, Dropout
from glasu.model.kernels.arrays import Constants, Drops
from glasu.model.layers import GCNIILayer, Hidden
from glasu.model.optimizer import ALL
from glasu.model.split import ClientModel
from glasu.model.step import Inputs, Step

Array = NDArray[Any]
Norm = tuple[Tensor, Tensor, Tensor]  # what was normalised, means, reciprocal deviations
NO_KEY = np.uint64(0), np.uint64(0)
NO_DRAWS = np.empty((0, 0), np.uint8)
NOTHING = np.empty((0, 0))
NOWHERE = np.empty(0, np.int64)
TO_WRITE = (0.0, 1.0)  # a target keeps nothing of itself, and takes the gradient as it is


@dataclass(frozen=True, eq=False)
class _Linear:
    """Weight and bias of a linear layer and where their gradients go; views, which follow the model."""

    weight: Array
    bias: Array
    target: Array  # what changes by dL/dW: its gradient, or the weight itself
    at_bias: Array

    @classmethod
    def of(cls, module: Any, *, directly: bool = False) -> _Linear:
        weight, bias = module.weight.detach().numpy(), module.bias.detach().numpy()
        return cls(weight, bias, weight if directly else module.weight.grad.numpy(), module.bias.grad.numpy())


@dataclass(frozen=True, eq=False)
class _GCNII:
    """The weight of a gcnii layer, what changes by its gradient, and the layer's constants."""

    weight: Array
    target: Array
    constants: Constants  # s, k and t of `FusedStep`

    @classmethod
    def of(cls, layer: GCNIILayer, *, directly: bool) -> _GCNII:
        weight, gradient = layer.linear.weight.detach().numpy(), layer.linear.weight.grad
        assert gradient is not None
        kind = weight.dtype.type
        constants = kind(layer.alpha / layer.larger), kind(layer.kept), kind(layer.turned)
        return cls(weight, weight if directly else gradient.numpy(), constants)


@dataclass(frozen=True, eq=False)
class Hand:
    """The weights of a gcnii network as arrays, once they have been laid out (`optimizer.laid_out`)."""

    encoder: _Linear
    layers: tuple[_GCNII, ...]
    classifier: _Linear | None
    norms: tuple[nn.LayerNorm, ...]
    pending: Sequence[slice]  # the weights that have only a gradient when the passes are over

    @classmethod
    def of(cls, model: ClientModel, *, directly: bool = False) -> Hand | None:
        """Return the weights, where all layers are gcnii's without a projection in front; else None.

        Args:
            model: whose weights.
            directly: whether products change the weights of encoder and layers, not their gradients (`Optimizer`).
        """
        layers = [layer for layer in model.layers if isinstance(layer, GCNIILayer)]
        if len(layers) < len(model.layers) or any(layer.reduce or layer.alpha >= 1 - layer.alpha for layer in layers):
            return None
        assert model.encoder is not None
        changed = [model.encoder.weight, *(layer.linear.weight for layer in layers)]
        return cls(
            encoder=_Linear.of(model.encoder, directly=directly),
            layers=tuple(_GCNII.of(layer, directly=directly) for layer in layers),
            classifier=None if model.classifier is None else _Linear.of(model.classifier),
            norms=tuple(model.norms or ()),  # type: ignore[arg-type]
            pending=_all_but(changed) if directly else ALL,
        )


def _all_but(weights: Sequence[Tensor]) -> list[slice]:
    """Return where the other weights lie in the vector of all."""
    parts, end = [], 0
    for weight in sorted(weights, key=Tensor.storage_offset):
        start = int(weight.storage_offset())
        if end < start:
            parts.append(slice(end, start))
        end = start + weight.numel()
    return [*parts, slice(end, None)]


class _Kept(NamedTuple):
    """What a layer needs to go back: what its product read and made, what it was dropped by, what undoes its norm."""

    read: Array
    made: Array
    drops: Drops
    norm: Norm | None


class FusedStep(Step):
    """gcnii on sparse blocks: with P = A (H * mask) + s H0, a layer makes H+ = ReLU(k P + t P W) of H.

    Its gradients, with G = dL/dH+ where H+ > 0, else 0:

        R = dL/dP = k G + t G W^T      dL/dW = t P^T G      dL/dH0 = s R      dL/dH = (A^T R) * mask
    """

    def __init__(self, hand: Hand, inputs: Inputs, dropout: Dropout, descent: tuple[float, float] = TO_WRITE) -> None:
        """Begin a step.

        Args:
            hand: the weights.
            inputs: what the layers read.
            dropout: the masks of this step.
            descent: what a target keeps of itself, and takes of a gradient.
        """
        super().__init__(inputs, dropout)
        self.hand, self.pending, self.descent = hand, hand.pending, descent
        self._kept: dict[int, _Kept] = {}
        self._products: list[tuple[Array, Array, Array]] = []  # what changes by dL/dW = P^T G, P and G
        self._read = inputs.features  # X * mask
        self._initial = NOTHING  # H0
        self._at_initial: Array | None = None  # the gradient there of the layers so far, at the rows of the last one

    def encode(self) -> Hidden:
        own = self.hand.encoder
        self._read = self.dropout(self.inputs.features, ENCODER)
        if isinstance(self._read, Tensor):
            weight, bias = torch.from_numpy(own.weight), torch.from_numpy(own.bias)
            self._initial = torch.addmm(bias, self._read, weight).relu_().numpy()
        else:
            self._initial = np.empty((self._read.shape[0], len(own.bias)), own.bias.dtype)
            kernels.rectified(self._read.parts, own.weight, own.bias, self._initial)
        return torch.from_numpy(self._initial)

    def layer(self, layer: int, hidden: Hidden) -> Tensor:
        assert isinstance(hidden, Tensor)
        own, matrix, rows = self.hand.layers[layer], self.inputs.blocks[layer].matrix, self.inputs.initial_rows[layer]
        read, norm = self._normalized(layer, hidden)
        drops, shape = self._drops(layer, read), (len(rows), read.shape[1])
        support, made = np.empty(shape, read.dtype), np.empty(shape, read.dtype)
        about = matrix.parts, read, drops, self._initial, rows, own.constants, own.weight, support, made
        kernels.gcnii_layer(*about)
        self._kept[layer] = _Kept(support, made, drops, norm)
        self.partials[layer] = torch.from_numpy(made)
        return self.partials[layer]

    def logits(self, joint: Tensor) -> Tensor:
        own, last = self.hand.classifier, len(self.hand.layers)
        assert own is not None
        hidden, norm = self._normalized(last, joint)
        drops, read = self._drops(last, hidden), np.empty_like(hidden)
        made = np.empty((len(hidden), len(own.bias)), hidden.dtype)
        kernels.classifier(hidden, drops, own.weight, own.bias, read, made)
        self._kept[last] = _Kept(read, made, drops, norm)
        return torch.from_numpy(made)

    def begin_back(self) -> None:
        """Do nothing: every gradient is written anew."""

    def back_from_logits(self, gradient: Tensor) -> Tensor:
        own, last = self.hand.classifier, len(self.hand.layers)
        assert own is not None
        kept = self._kept.pop(last)
        back = np.empty_like(kept.read)
        found = gradient.contiguous().numpy()
        kernels.classifier_gradients(kept.read, found, kept.drops, own.weight, own.target, own.at_bias, back)
        return self._before_norm(last, torch.from_numpy(back), kept.norm)

    def back(self, layer: int, gradient: Tensor) -> Tensor | None:
        own, matrix = self.hand.layers[layer], self.inputs.blocks[layer].matrix
        kept, found = self._kept.pop(layer), gradient.contiguous().numpy()
        gated, at_initial = np.empty(found.shape, found.dtype), np.empty(found.shape, found.dtype)
        back = np.empty((matrix.width, found.shape[1]), found.dtype)
        more, places = found[:0], NOWHERE
        if self._at_initial is not None:
            more, places = self._at_initial, self.inputs.blocks[layer + 1].positions
        about = matrix.parts, kept.drops, own.constants, own.weight, kept.made, found
        kernels.gcnii_layer_gradients(*about, gated, more, places, at_initial, back)
        self._products.append((own.target, kept.read, gated))
        self._at_initial = at_initial
        return self._before_norm(layer, torch.from_numpy(back), kept.norm)

    def back_to_features(self, gradient: Tensor | None) -> None:
        assert gradient is not None
        assert self._at_initial is not None
        (kept, taken), own = self.descent, self.hand.encoder
        found, places = gradient.numpy(), self.inputs.initial_rows[0]
        if isinstance(self._read, Tensor):
            found[places] += self._at_initial
            gated = np.where(self._initial > 0, found, found.dtype.type(0))
            self._products.append((own.target, self._read.contiguous().numpy(), gated))
            np.sum(gated, 0, out=own.at_bias)
        else:
            about = self._read.parts, self._initial, self._at_initial, places, found
            numbers = found.dtype.type(kept), found.dtype.type(taken)
            kernels.rectified_gradients(*about, *numbers, own.target, own.at_bias)
        for target, read, gated in self._products:
            kernels.dense_product(read, True, gated, False, kept, taken, target)

    def _drops(self, layer: int, read: Array) -> Drops:
        """Return by what the input of a layer is multiplied; its bytes are not drawn yet."""
        mask, kind = self.dropout.mask(layer), read.dtype.type
        if mask is None:
            return *NO_KEY, np.uint8(0), kind(1), NO_DRAWS
        return mask.low, mask.high, mask.threshold, kind(mask.scale), np.empty(read.shape, np.uint8)

    def _normalized(self, layer: int, hidden: Tensor) -> tuple[Array, Norm | None]:
        """Return what `ClientModel.layer_input` reads before its dropout, and what undoes the normalisation."""
        if layer == 0 or not self.hand.norms:
            return hidden.contiguous().numpy(), None
        norm = self.hand.norms[layer - 1]
        about = norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps
        made, mean, deviation = torch.native_layer_norm(hidden, *about)
        return made.numpy(), (hidden, mean, deviation)

    def _before_norm(self, layer: int, gradient: Tensor, kept: Norm | None) -> Tensor:
        """Return the gradient at what `_normalized` was given."""
        if kept is None:
            return gradient
        norm = self.hand.norms[layer - 1]
        about = norm.normalized_shape, *kept[1:], norm.weight.detach(), norm.bias.detach(), [True, True, True]
        back, *found = torch.ops.aten.native_layer_norm_backward(gradient, kept[0], *about)
        for weight, part in zip((norm.weight, norm.bias), found, strict=True):
            assert weight.grad is not None
            weight.grad.copy_(part)
        return back  # type: ignore[no-any-return]
