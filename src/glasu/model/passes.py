"""The passes of one step through a client's layers, forward and back; what happens between layers is the protocol's.

`Taped` has torch derive every layer's gradient. `ByHand` has gcnii's written out: it computes the same with fewer
passes over memory and without a tape, and is several times as fast where blocks are small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from glasu.model import kernels
from glasu.model.blocks import Block
from glasu.model.dropout import ENCODER, Dropout
from glasu.model.layers import GCNIILayer, Hidden, rows_of
from glasu.model.split import ClientModel

Array = NDArray[Any]
Drops = tuple[Array, int, Any]  # a mask: a byte per value, the threshold, the scale
Norm = tuple[Tensor, Tensor, Tensor]  # what was normalised, means, reciprocal deviations
NO_DRAWS = np.empty((0, 0), np.uint8)
NOTHING = np.empty((0, 0))


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the layers of one client read in one round."""

    features: Hidden  # X_m[S_m[0]], scaled
    blocks: tuple[Block, ...]
    initial_rows: tuple[NDArray[np.int64], ...]  # per layer: where S_m[l+1] stands in S_m[0]


class Passes(ABC):
    """Forward: `encode`, `layer` 0..L-1, `logits`. Back: `back_from_logits`, `back` L-1..0, `back_to_features`.

    Going back leaves the gradients of the weights; `begin_back` first.
    """

    def __init__(self, inputs: Inputs, dropout: Dropout) -> None:
        self.inputs, self.dropout = inputs, dropout
        self.partials: dict[int, Tensor] = {}  # H_m^+[l] as `layer` returned it; not to be changed

    @abstractmethod
    def encode(self) -> Hidden:
        """Return H_m[0]: the features, or what gcnii's encoder makes of them."""

    @abstractmethod
    def layer(self, layer: int, hidden: Hidden) -> Tensor:
        """Return H_m^+[l], given H_m[l]."""

    @abstractmethod
    def logits(self, joint: Tensor) -> Tensor:
        """Return what the classifier makes of H_m[L]."""

    @abstractmethod
    def begin_back(self) -> None:
        """Forget the gradients of the step before."""

    @abstractmethod
    def back_from_logits(self, gradient: Tensor) -> Tensor:
        """Return the gradient at H_m[L], given that at the logits."""

    @abstractmethod
    def back(self, layer: int, gradient: Tensor) -> Tensor | None:
        """Return the gradient at H_m[l], given that at H_m^+[l]; None where H_m[0] is the features."""

    @abstractmethod
    def back_to_features(self, gradient: Tensor | None) -> None:
        """Go back through the encoder, given the gradient at H_m[0]."""


class Taped(Passes):
    """Any backbone: each layer is a tape of its own, so that `back` can stop between any two."""

    def __init__(self, model: ClientModel, inputs: Inputs, dropout: Dropout, *, recording: bool = True) -> None:
        super().__init__(inputs, dropout)
        self.model, self.recording = model, recording
        self._tapes: dict[int, tuple[Tensor | None, Tensor | None, Tensor]] = {}  # what layer l read and made
        self._encoded: Tensor | None = None
        self._initial = self._initial_gradient = torch.empty(0)

    def encode(self) -> Hidden:
        with torch.set_grad_enabled(self.recording):
            hidden, self._encoded = self.model.encode(self.inputs.features, self.dropout)
        if self._encoded is None:
            return hidden
        self._initial = self._encoded.detach()
        if self.recording:
            self._initial_gradient = torch.zeros_like(self._initial)
        return self._initial

    def layer(self, layer: int, hidden: Hidden) -> Tensor:
        leaf, initial = None, None
        if isinstance(hidden, Tensor) and (layer > 0 or self._encoded is not None):
            leaf = hidden = self._leaf(hidden)
        if self._encoded is not None:
            rows = rows_of(self._initial, self.inputs.initial_rows[layer])
            assert isinstance(rows, Tensor)
            initial = self._leaf(rows)
        with torch.set_grad_enabled(self.recording):
            made = self.model.sublayer(layer, hidden, initial, self.inputs.blocks[layer], self.dropout)
        return self._kept(layer, leaf, initial, made)

    def logits(self, joint: Tensor) -> Tensor:
        leaf = self._leaf(joint)
        with torch.set_grad_enabled(self.recording):
            made = self.model.classify(leaf, self.dropout)
        return self._kept(len(self.model.layers), leaf, None, made)

    def begin_back(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def back_from_logits(self, gradient: Tensor) -> Tensor:
        found = self.back(len(self.model.layers), gradient)
        assert found is not None
        return found

    def back(self, layer: int, gradient: Tensor) -> Tensor | None:
        leaf, initial, made = self._tapes.pop(layer)
        made.backward(gradient)  # type: ignore[no-untyped-call]
        if initial is not None and initial.grad is not None:
            rows = torch.from_numpy(self.inputs.initial_rows[layer])
            self._initial_gradient.index_add_(0, rows, initial.grad)
        return None if leaf is None else leaf.grad

    def back_to_features(self, gradient: Tensor | None) -> None:
        if self._encoded is not None:
            assert gradient is not None
            self._encoded.backward(self._initial_gradient.add_(gradient))  # type: ignore[no-untyped-call]

    def _leaf(self, hidden: Tensor) -> Tensor:
        return hidden.detach().requires_grad_(self.recording)

    def _kept(self, layer: int, leaf: Tensor | None, initial: Tensor | None, made: Tensor) -> Tensor:
        if self.recording:
            self._tapes[layer] = leaf, initial, made
        self.partials[layer] = made.detach()
        return self.partials[layer]


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


class ByHand(Passes):
    """gcnii on sparse blocks: with P = A (H * mask) + s H0, a layer makes H+ = ReLU(k P + t P W) of H.

    Its gradients, with G = dL/dH+ where H+ > 0, else 0:

        R = dL/dP = k G + t G W^T      dL/dW = t P^T G      dL/dH0 = s R      dL/dH = (A^T R) * mask
    """

    def __init__(self, hand: Hand, inputs: Inputs, dropout: Dropout) -> None:
        super().__init__(inputs, dropout)
        self.hand = hand
        self._kept: dict[int, _Kept] = {}
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
        drops = self._drops(layer, read)
        support, made = np.empty((2, len(rows), read.shape[1]), read.dtype)
        about = matrix.indptr, matrix.indices, matrix.data, read, *drops, self._initial, rows
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
        self._kept[last] = _Kept(read, made, (factors, 0, None), norm)
        return torch.from_numpy(made)

    def begin_back(self) -> None:
        """Do nothing: every gradient is written anew."""

    def back_from_logits(self, gradient: Tensor) -> Tensor:
        own, last, found = self.hand.classifier, len(self.hand.layers), gradient.numpy()
        assert own is not None
        kept = self._kept.pop(last)
        np.matmul(kept.read.T, found, out=own.at_weight)
        np.add.reduce(found, axis=0, out=own.at_bias)
        back = found @ own.weight.T
        back = back * kept.drops[0] if len(kept.drops[0]) else back
        return self._before_norm(last, torch.from_numpy(back), kept.norm)

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

    def _drops(self, layer: int, read: Array) -> Drops:
        """Return the bytes of a mask, its threshold and its scale."""
        mask, kind = self.dropout.mask(layer), read.dtype.type
        if mask is None:
            return NO_DRAWS, 0, kind(1)
        return mask.draws(read.shape), mask.threshold, kind(mask.scale)

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
