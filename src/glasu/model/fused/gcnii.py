"""`FusedStep`: a training step of a gcnii network with hand-written gradients.

Its results equal those of `AutogradStep` up to rounding. It needs fewer passes over memory and no autograd tape, so it
is several times as fast for small blocks. Weights change only at the end of a step, after all gradients are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from glasu.model import kernels
from glasu.model.dropout import ENCODER, Dropout
from glasu.model.layers import GCNIILayer, Hidden
from glasu.model.optimizer import ALL, Optimizer
from glasu.model.split import ClientModel
from glasu.model.step import Inputs, Step, StepMaker
from glasu.wire.encoding import Array

Constants = tuple[Any, Any, Any]  # s, k and t of `FusedStep`
Norm = tuple[Tensor, Tensor, Tensor]  # input of a layer norm, means, reciprocal deviations
NO_KEY = np.uint64(0), np.uint64(0)  # the halves of a key if there is no dropout
NO_DRAWS = np.empty((0, 0), np.uint8)
NOTHING = np.empty((0, 0))
NOWHERE = np.empty(0, np.int64)
WRITE_GRADIENT = (0.0, 1.0)  # target <- 0 * target + 1 * gradient


@dataclass(frozen=True, eq=False)
class _Linear:
    """Weight and bias of a linear layer, and the tensors that receive their gradients. All are views of the model."""

    weight: Tensor
    transposed: Tensor  # W^T
    bias: Tensor
    target: Tensor  # the tensor that the backward pass changes: the gradient, or the weight itself (see `FusedWeights`)
    at_bias: Array  # the gradient at the bias

    @classmethod
    def of(cls, module: Any, *, in_place: bool = False) -> _Linear:
        weight, bias = module.weight.detach(), module.bias.detach()
        return cls(weight, weight.t(), bias, weight if in_place else module.weight.grad, module.bias.grad.numpy())


@dataclass(frozen=True, eq=False)
class _GCNII:
    """The weight of a gcnii layer, the tensor that receives its gradient, and the constants of the layer."""

    weight: Tensor
    transposed: Tensor  # W^T
    target: Tensor
    constants: Constants

    @classmethod
    def of(cls, layer: GCNIILayer, *, in_place: bool) -> _GCNII:
        weight, gradient = layer.linear.weight.detach(), layer.linear.weight.grad
        assert gradient is not None
        kind = weight.numpy().dtype.type
        constants = kind(layer.alpha / layer.larger), kind(layer.kept), kind(layer.turned)
        return cls(weight, weight.t(), weight if in_place else gradient, constants)


@dataclass(frozen=True, eq=False)
class FusedWeights:
    """The weights of a gcnii network. The optimizer must have laid them out (`lay_out_weights`).

    The weights are read from the modules once, because an attribute lookup in `nn.Module` takes microseconds, and a
    short round needs hundreds of lookups.
    """

    encoder: _Linear
    layers: tuple[_GCNII, ...]
    classifier: _Linear | None
    norms: tuple[nn.LayerNorm, ...]
    pending: Sequence[slice]  # parts of the weight vector that the backward pass does not change

    @classmethod
    def of(cls, model: ClientModel, *, in_place: bool = False) -> FusedWeights | None:
        """Return the weights, or None if a layer is not a plain gcnii layer or the head has dense layers.

        Args:
            model: the network.
            in_place: whether the backward pass changes encoder and layer weights directly (plain SGD), instead of
                writing their gradients.
        """
        layers = [layer for layer in model.layers if isinstance(layer, GCNIILayer)]
        # With alpha >= 1/2, or with a projection before the layer, `GCNIILayer` uses another order of additions.
        if len(layers) < len(model.layers) or any(layer.reduce or layer.alpha >= 1 - layer.alpha for layer in layers):
            return None
        if len(model.head):  # its gradients come from autograd
            return None
        assert model.encoder is not None
        changed = [model.encoder.weight, *(layer.linear.weight for layer in layers)]
        return cls(
            encoder=_Linear.of(model.encoder, in_place=in_place),
            layers=tuple(_GCNII.of(layer, in_place=in_place) for layer in layers),
            classifier=None if model.classifier is None else _Linear.of(model.classifier),
            norms=tuple(model.norms or ()),  # type: ignore[arg-type]
            pending=_list_other_parts(changed) if in_place else ALL,
        )


def _list_other_parts(weights: Sequence[Tensor]) -> list[slice]:
    """Return the parts of the weight vector outside the given weights."""
    parts, end = [], 0
    for weight in sorted(weights, key=Tensor.storage_offset):
        start = int(weight.storage_offset())
        if end < start:
            parts.append(slice(end, start))
        end = start + weight.numel()
    return [*parts, slice(end, None)]


class _Saved(NamedTuple):
    """The values that one layer's backward pass needs from its forward pass."""

    read: Tensor  # the input of the dense product
    made: Array  # the output
    drops: kernels.Drops  # the dropout mask of the input
    norm: Norm | None


class FusedStep(Step):
    """A step of gcnii on sparse blocks. With P = A (H * mask) + s H0, a layer computes H+ = ReLU(k P + t P W).

    Let G be dL/dH+ where H+ > 0, and 0 elsewhere. The gradients of the layer are:

        R = dL/dP = k G + t G W^T      dL/dW = t P^T G      dL/dH0 = s R      dL/dH = (A^T R) * mask
    """

    def __init__(
        self,
        weights: FusedWeights,
        inputs: Inputs,
        dropout: Dropout,
        descent: tuple[float, float] = WRITE_GRADIENT,
    ) -> None:
        """Start a step.

        Args:
            weights: the weights.
            inputs: the inputs of the layers.
            dropout: the masks of this step.
            descent: (a, b): a weight that is changed in place becomes a * weight + b * gradient.
        """
        super().__init__(inputs, dropout)
        self.weights, self.pending, self.descent = weights, weights.pending, descent
        self._saved: dict[int, _Saved] = {}
        # (target, P, G): at the end of the backward pass, dL/dW = P^T G is written to the target. If the target is the
        # weight itself, the weight is updated instead (see `descent`).
        self._products: list[tuple[Tensor, Tensor, Tensor]] = []
        self._read = inputs.features  # X * mask
        self._initial = NOTHING  # H0
        # The gradient at H0 is a sum over layers. This is the sum so far. Its rows are the output rows of the layer
        # that the backward pass processed last.
        self._at_initial: Array | None = None

    def encode(self) -> Hidden:
        own = self.weights.encoder
        self._read = self.dropout(self.inputs.features, ENCODER)
        if isinstance(self._read, Tensor):
            self._initial = torch.addmm(own.bias, self._read, own.weight).relu_().numpy()
        else:
            weight, bias = own.weight.numpy(), own.bias.numpy()
            self._initial = np.empty((self._read.shape[0], len(bias)), bias.dtype)
            kernels.relu_linear(self._read.parts, weight, bias, self._initial)
        return torch.from_numpy(self._initial)

    def layer(self, layer: int, hidden: Hidden) -> Tensor:
        assert isinstance(hidden, Tensor)
        own, rows = self.weights.layers[layer], self.inputs.initial_rows[layer]
        share, kept, turned = own.constants
        read, norm = self._normalize(layer, hidden)
        drops, support = self._drops(layer, read), np.empty((len(rows), read.shape[1]), read.dtype)
        matrix = self.inputs.blocks[layer].matrix.parts
        kernels.gcnii_support(matrix, read, drops, self._initial, rows, share, support)
        factor = torch.from_numpy(support)
        partial = torch.mm(factor, own.weight)
        made = partial.numpy()
        kernels.gcnii_result(support, kept, turned, made)
        self._saved[layer] = _Saved(factor, made, drops, norm)
        self.partials[layer] = partial
        return partial

    def logits(self, joint: Tensor) -> Tensor:
        own, last = self.weights.classifier, len(self.weights.layers)
        assert own is not None
        hidden, norm = self._normalize(last, joint)
        drops, read = self._drops(last, hidden), np.empty_like(hidden)
        kernels.apply_mask(hidden, drops, read)
        factor = torch.from_numpy(read)
        made = torch.addmm(own.bias, factor, own.weight)
        self._saved[last] = _Saved(factor, made.numpy(), drops, norm)
        return made

    def begin_backward(self) -> None:
        """Do nothing: the backward pass overwrites every gradient."""

    def backward_classifier(self, gradient: Tensor) -> Tensor:
        own, last = self.weights.classifier, len(self.weights.layers)
        assert own is not None
        saved, found = self._saved.pop(last), gradient.contiguous()
        torch.mm(saved.read.t(), found, out=own.target)
        back = torch.mm(found, own.transposed)
        kernels.finish_classifier_gradients(found.numpy(), saved.drops, own.at_bias, back.numpy())
        return self._before_norm(last, back, saved.norm)

    def backward_layer(self, layer: int, gradient: Tensor) -> Tensor | None:
        own, matrix = self.weights.layers[layer], self.inputs.blocks[layer].matrix
        share, kept, turned = own.constants
        saved, found = self._saved.pop(layer), gradient.contiguous().numpy()
        gated, at_initial = np.empty(found.shape, found.dtype), np.empty(found.shape, found.dtype)
        back = np.empty((matrix.width, found.shape[1]), found.dtype)
        more, places = found[:0], NOWHERE
        if self._at_initial is not None:
            more, places = self._at_initial, self.inputs.blocks[layer + 1].positions
        kernels.relu_gradient(found, saved.made, turned, gated)
        factor = torch.from_numpy(gated)
        at_support = torch.mm(factor, own.transposed).numpy()
        about = share, kept, saved.made, found, at_support, more, places
        kernels.gcnii_gradients(matrix.parts, saved.drops, *about, at_initial, back)
        # dL/dW is computed at the end of the step. If its target is W itself, this changes W, and no weight may change
        # earlier.
        self._products.append((own.target, saved.read, factor))
        self._at_initial = at_initial
        return self._before_norm(layer, torch.from_numpy(back), saved.norm)

    def backward_encoder(self, gradient: Tensor | None) -> None:
        assert gradient is not None
        assert self._at_initial is not None
        (kept, taken), own = self.descent, self.weights.encoder
        found, places = gradient.numpy(), self.inputs.initial_rows[0]
        if isinstance(self._read, Tensor):
            found[places] += self._at_initial
            gated = np.where(self._initial > 0, found, found.dtype.type(0))
            self._products.append((own.target, self._read, torch.from_numpy(gated)))
            np.sum(gated, 0, out=own.at_bias)
        else:
            about = self._read.parts, self._initial, self._at_initial, places, found
            numbers = found.dtype.type(kept), found.dtype.type(taken)
            kernels.relu_linear_gradients(*about, *numbers, own.target.numpy(), own.at_bias)
        for target, read, factor in self._products:
            torch.addmm(target, read.t(), factor, beta=kept, alpha=taken, out=target)

    def _drops(self, layer: int, read: Array) -> kernels.Drops:
        """Return the dropout mask of a layer's input. Its random bytes are drawn once, in the forward pass."""
        mask, kind = self.dropout.mask(layer), read.dtype.type
        if mask is None:
            return *NO_KEY, np.uint8(0), kind(1), NO_DRAWS
        return mask.low, mask.high, mask.threshold, kind(mask.scale), np.empty(read.shape, np.uint8)

    def _normalize(self, layer: int, hidden: Tensor) -> tuple[Array, Norm | None]:
        """Apply the layer norm of `ClientModel.layer_input`; return the result and the values for its backward pass."""
        if layer == 0 or not self.weights.norms:
            return hidden.contiguous().numpy(), None
        norm = self.weights.norms[layer - 1]
        about = norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps
        made, mean, deviation = torch.native_layer_norm(hidden, *about)
        return made.numpy(), (hidden, mean, deviation)

    def _before_norm(self, layer: int, gradient: Tensor, saved: Norm | None) -> Tensor:
        """Return the gradient at the input of `_normalize`."""
        if saved is None:
            return gradient
        norm = self.weights.norms[layer - 1]
        about = norm.normalized_shape, *saved[1:], norm.weight.detach(), norm.bias.detach(), [True, True, True]
        back, *found = torch.ops.aten.native_layer_norm_backward(gradient, saved[0], *about)
        for weight, part in zip((norm.weight, norm.bias), found, strict=True):
            assert weight.grad is not None
            weight.grad.copy_(part)
        return back  # type: ignore[no-any-return]


def make_fused_steps(model: ClientModel, optimizer: Optimizer) -> StepMaker | None:
    """Return a function that makes fused steps of a model, or None if its layers are not plain gcnii layers."""
    in_place = optimizer.is_plain
    weights = FusedWeights.of(model, in_place=in_place)
    if weights is None:
        return None

    def make(inputs: Inputs, dropout: Dropout) -> Step:
        descent = optimizer.descent if in_place else WRITE_GRADIENT  # the learning rate changes between rounds
        return FusedStep(weights, inputs, dropout, descent)

    return make
