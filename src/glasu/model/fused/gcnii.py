"""A training step through gcnii's layers with hand-written gradients: `FusedStep`.

It computes what `AutogradStep` computes, up to rounding, in fewer passes over memory and without a tape. It is several
times as fast where blocks are small. Weights change only at the end of a step, after all gradients are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from glasu.model import kernels
from glasu.model.dropout import ENCODER, Dropout
from glasu.model.layers import GCNIILayer, Hidden
from glasu.model.optimizer import ALL, Optimizer
from glasu.model.split import ClientModel
from glasu.model.step import Inputs, Step, StepMaker

Drops = tuple[np.uint64, np.uint64, np.uint8, Any, NDArray[np.uint8]]  # see `kernels.gcnii_support`
Norm = tuple[Tensor, Tensor, Tensor]  # input of a layer norm, means, reciprocal deviations
NO_DRAWS = np.empty((0, 0), np.uint8)


class _Saved(NamedTuple):
    """The values of the forward pass of one layer that its backward pass needs."""

    read: Tensor  # what the dense product read
    made: Tensor  # the output
    drops: Any  # the dropout mask of the input
    norm: Norm | None


class FusedStep(Step):
    """gcnii on sparse blocks. With P = A (H * mask) + s H0, a layer computes H+ = ReLU(k P + t P W).

    Its gradients, with G = dL/dH+ where H+ > 0, else 0:

        R = dL/dP = k G + t G W^T      dL/dW = t P^T G      dL/dH0 = s R      dL/dH = (A^T R) * mask
    """

    def __init__(
        self,
        model: ClientModel,
        inputs: Inputs,
        dropout: Dropout,
        descent: tuple[float, float] | None = None,
        pending: Sequence[slice] = ALL,
    ) -> None:
        """Start a step.

        Args:
            model: the network. An optimizer must have laid out its weights (`lay_out_weights`).
            inputs: what the layers read.
            dropout: the masks of this step.
            descent: (a, b): the weights of encoder and layers become a * weight + b * gradient; None: the gradients
                are written, and no weight changes.
            pending: the parts of the weight vector that this step does not change.
        """
        super().__init__(inputs, dropout)
        self.model, self.descent, self.pending = model, descent, pending
        self._saved: dict[int, _Saved] = {}
        self._products: list[tuple[Tensor, Tensor, Tensor]] = []  # (W, P, G) of dL/dW = P^T G
        self._read: Hidden = inputs.features  # X * mask
        self._initial = torch.empty(0)  # H0
        self._at_initial: Tensor | None = None  # gradient at H0 of the layers so far, at the rows of the last one

    @torch.no_grad()
    def encode(self) -> Hidden:
        assert self.model.encoder is not None
        self._read = self.dropout(self.inputs.features, ENCODER)
        self._initial = self.model.encoder(self._read).relu_()
        return self._initial

    def layer(self, layer: int, hidden: Hidden) -> Tensor:
        assert isinstance(hidden, Tensor)
        module, rows = self._layer(layer), self.inputs.initial_rows[layer]
        read, norm = self._normalize(layer, hidden)
        share, kept, turned = _constants(module, read)
        drops, support = self._drops(layer, read), read.new_empty(len(rows), read.shape[1])
        matrix = self.inputs.blocks[layer].matrix.parts
        kernels.gcnii_support(matrix, read.numpy(), drops, self._initial.numpy(), rows, share, support.numpy())
        made = support @ module.linear.weight.detach()
        kernels.gcnii_result(support.numpy(), kept, turned, made.numpy())
        self._saved[layer] = _Saved(support, made, drops, norm)
        self.partials[layer] = made
        return made

    @torch.no_grad()
    def logits(self, joint: Tensor) -> Tensor:
        own, last = self.model.classifier, len(self.model.layers)
        assert own is not None
        read, norm = self._normalize(last, joint)
        mask = self.dropout.mask(last)
        drops = None if mask is None else mask.factors_like(read)
        read = read if drops is None else read * drops
        made: Tensor = own(read)
        self._saved[last] = _Saved(read, made, drops, norm)
        return made

    def begin_backward(self) -> None:
        """Do nothing: the backward pass overwrites every gradient."""

    def backward_classifier(self, gradient: Tensor) -> Tensor:
        own, last = self.model.classifier, len(self.model.layers)
        assert own is not None
        saved, found = self._saved.pop(last), gradient.contiguous()
        torch.mm(saved.read.t(), found, out=_gradient(own.weight))
        _write_column_sums(found, own.bias)
        back = found @ own.weight.detach().t()
        if saved.drops is not None:
            back *= saved.drops
        return self._before_norm(last, back, saved.norm)

    def backward_layer(self, layer: int, gradient: Tensor) -> Tensor | None:
        module, matrix = self._layer(layer), self.inputs.blocks[layer].matrix
        weight = module.linear.weight
        saved, found = self._saved.pop(layer), gradient.contiguous()
        share, kept, turned = _constants(module, found)
        gated, at_initial = torch.empty_like(found), torch.empty_like(found)
        kernels.relu_gradient(found.numpy(), saved.made.numpy(), turned, gated.numpy())
        at_support, back = gated @ weight.detach().t(), found.new_empty(matrix.width, found.shape[1])
        values = (tensor.numpy() for tensor in (saved.made, found, at_support, at_initial, back))
        kernels.gcnii_gradients(matrix.parts, saved.drops, share, kept, *values)
        if self._at_initial is not None:
            at_initial.numpy()[self.inputs.blocks[layer + 1].positions] += self._at_initial.numpy()
        # dL/dW waits until the end of the step: in place, it would change W before lower layers have used it.
        self._products.append((weight, saved.read, gated))
        self._at_initial = at_initial
        return self._before_norm(layer, back, saved.norm)

    def backward_encoder(self, gradient: Tensor | None) -> None:
        assert gradient is not None
        assert self._at_initial is not None
        assert self.model.encoder is not None
        (kept, taken), own = self.descent or (0.0, 1.0), self.model.encoder
        gradient.numpy()[self.inputs.initial_rows[0]] += self._at_initial.numpy()
        gated = gradient.where(self._initial > 0, 0)
        _write_column_sums(gated, own.bias)
        if isinstance(self._read, Tensor):
            self._products.append((own.weight, self._read, gated))
        else:
            target, matrix = self._target(own.weight), self._read
            target.mul_(kept) if kept else target.zero_()  # not 0 * target, which would keep a NaN
            values = matrix.data * matrix.dtype.type(taken)
            kernels.add_transposed(matrix.indptr, matrix.indices, values, gated.numpy(), target.numpy())
        for weight, read, gated in self._products:
            target = self._target(weight)
            torch.addmm(target, read.t(), gated, beta=kept, alpha=taken, out=target)

    def _layer(self, layer: int) -> GCNIILayer:
        module = self.model.layers[layer]
        assert isinstance(module, GCNIILayer)
        return module

    def _target(self, weight: Tensor) -> Tensor:
        """Return the tensor that receives dL/dW: the gradient, or the weight itself."""
        return _gradient(weight) if self.descent is None else weight.detach()

    def _drops(self, layer: int, read: Tensor) -> Drops:
        """Return the dropout mask of a layer's input; the forward kernel draws its bytes, the backward reuses them."""
        mask, kind = self.dropout.mask(layer), read.numpy().dtype.type
        if mask is None:
            return np.uint64(0), np.uint64(0), np.uint8(0), kind(1), NO_DRAWS
        return mask.low, mask.high, mask.threshold, kind(mask.scale), np.empty(read.shape, np.uint8)

    def _normalize(self, layer: int, hidden: Tensor) -> tuple[Tensor, Norm | None]:
        """Apply the layer norm of `ClientModel.layer_input`; return the result and what its gradient needs."""
        if layer == 0 or self.model.norms is None:
            return hidden.contiguous(), None
        norm = self._norm(layer)
        about = norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps
        made, mean, deviation = torch.native_layer_norm(hidden, *about)
        return made, (hidden, mean, deviation)

    def _before_norm(self, layer: int, gradient: Tensor, saved: Norm | None) -> Tensor:
        """Return the gradient at the input of `_normalize`."""
        if saved is None:
            return gradient
        norm = self._norm(layer)
        about = norm.normalized_shape, *saved[1:], norm.weight.detach(), norm.bias.detach(), [True, True, True]
        back, *found = torch.ops.aten.native_layer_norm_backward(gradient, saved[0], *about)
        for weight, part in zip((norm.weight, norm.bias), found, strict=True):
            _gradient(weight).copy_(part)
        return back  # type: ignore[no-any-return]

    def _norm(self, layer: int) -> nn.LayerNorm:
        assert self.model.norms is not None
        norm = self.model.norms[layer - 1]
        assert isinstance(norm, nn.LayerNorm)
        return norm


def _constants(layer: GCNIILayer, like: Tensor) -> tuple[Any, Any, Any]:
    """Return s, k and t of `FusedStep`, in the precision of a tensor: a loop must not compute in another one."""
    kind = like.numpy().dtype.type
    return kind(layer.alpha / layer.larger), kind(layer.kept), kind(layer.turned)


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _write_column_sums(gradient: Tensor, bias: Tensor | None) -> None:
    """Write the gradient at a bias. numpy adds the rows in their order; torch would add them in another."""
    assert bias is not None
    np.sum(gradient.numpy(), 0, out=_gradient(bias).numpy())


def make_fused_steps(model: ClientModel, optimizer: Optimizer) -> StepMaker | None:
    """Return a function that makes fused steps of a model, or None if the model has another form of layers."""
    layers = [layer for layer in model.layers if isinstance(layer, GCNIILayer)]
    # With alpha >= 1/2, or a projection in front, `GCNIILayer` adds in another order.
    if len(layers) < len(model.layers) or any(layer.reduce or layer.alpha >= 1 - layer.alpha for layer in layers):
        return None
    if not optimizer.is_plain:
        return lambda inputs, dropout: FusedStep(model, inputs, dropout)
    assert model.encoder is not None
    pending = _list_other_parts([model.encoder.weight, *(layer.linear.weight for layer in layers)])
    return lambda inputs, dropout: FusedStep(model, inputs, dropout, optimizer.descent, pending)


def _list_other_parts(weights: Sequence[Tensor]) -> list[slice]:
    """Return the parts of the weight vector that hold none of these weights."""
    parts, end = [], 0
    for weight in sorted(weights, key=Tensor.storage_offset):
        start = int(weight.storage_offset())
        if end < start:
            parts.append(slice(end, start))
        end = start + weight.numel()
    return [*parts, slice(end, None)]
