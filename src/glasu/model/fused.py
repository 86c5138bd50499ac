"""The encoder and the layers of gcnii, each as one step of the tape with its gradient written out.

They compute what the plain layers compute, with the same operations in the same order, so that the results are equal
bit for bit, and the gradients to rounding. What they save are passes over memory and entries of the tape:
dropout, products and the initial residual go row by row, and of a mask a byte per value is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from glasu.model import kernels
from glasu.model.sparse import SparseRows


class Mask(NamedTuple):
    """A dropout mask before it is drawn: 0 for each value whose byte of the key's words is below the threshold."""

    low: np.uint64
    high: np.uint64
    threshold: int

    @property
    def scale(self) -> float:
        """What the values that are kept are multiplied by."""
        return 2**8 / (2**8 - self.threshold)

    def factors(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return one factor per value: 0, or what makes up for those."""
        mask = np.empty(count, dtype)
        kernels.fill_mask(self.low, self.high, self.threshold, dtype.type(self.scale), mask)
        return mask

    def draws(self, shape: tuple[int, int]) -> NDArray[np.uint8]:
        """Return the byte of each value: what `factors` decides by, a quarter of its size."""
        draws: NDArray[np.uint8] = kernels.draw_bytes(self.low, self.high, shape[0] * shape[1])
        return draws.reshape(shape)


KEEP_ALL = Mask(np.uint64(0), np.uint64(0), 0)
NO_DRAWS = np.empty((0, 0), np.uint8)


class _Encoder(torch.autograd.Function):
    """H0 = ReLU(Z W + b) for sparse Z = X * mask.

    With G = dL/dH0 where H0 > 0, else 0:  dL/dW = Z^T G  and  dL/db = 1^T G.
    """

    @staticmethod
    def forward(ctx: Any, features: SparseRows, weight: Tensor, bias: Tensor) -> Tensor:
        result = weight.new_empty(features.shape[0], weight.shape[1])
        parts = features.indptr, features.indices, features.data
        kernels.rectified(*parts, _array(weight), _array(bias), result.numpy())
        ctx.parts, ctx.width = parts, len(weight)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        (result,) = ctx.saved_tensors
        weight, bias = gradient.new_zeros(ctx.width, gradient.shape[1]), gradient.new_zeros(gradient.shape[1])
        indptr, indices, data = ctx.parts
        arrays = _array(result), _array(gradient)
        kernels.rectified_gradients(indptr, indices, data, *arrays, weight.numpy(), bias.numpy())
        return None, weight, bias


class _GCNII(torch.autograd.Function):
    """H' = ReLU(P V) for P = A (H * mask) + s H0 and V = D + c W, with a constant diagonal D.

    With G = dL/dH' where H' > 0, else 0, and R = dL/dP = G V^T:

        dL/dW = c P^T G        dL/dH0 = s R        dL/dH = (A^T R) * mask
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        initial: Tensor,
        weight: Tensor,
        matrix: SparseRows,
        mask: Mask | None,
        share: float,
        diagonal: Tensor,
        factor: float,
    ) -> Tensor:
        read, support = _array(hidden), torch.empty_like(initial)
        kind, parts = read.dtype.type, (matrix.indptr, matrix.indices, matrix.data)
        threshold, scale = (mask or KEEP_ALL).threshold, kind((mask or KEEP_ALL).scale)
        draws = NO_DRAWS if mask is None else mask.draws(read.shape)
        kernels.mix_dropped(*parts, read, draws, threshold, scale, _array(initial), kind(share), support.numpy())
        folded = torch.add(diagonal, weight, alpha=factor)
        result = torch.mm(support, folded).relu_()
        ctx.matrix, ctx.drops, ctx.share, ctx.factor = matrix, (draws, threshold, scale), share, factor
        ctx.save_for_backward(support, folded, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        support, folded, result = ctx.saved_tensors
        matrix, (to_hidden, to_initial, to_weight, *_) = ctx.matrix, ctx.needs_input_grad
        gradient = torch.ops.aten.threshold_backward(gradient, result, 0)
        weight = torch.mm(support.t(), gradient).mul_(ctx.factor) if to_weight else None
        at_support = torch.mm(gradient, folded.t())
        hidden = None
        if to_hidden:
            hidden = gradient.new_zeros(matrix.width, gradient.shape[1])
            parts, values = (matrix.indptr, matrix.indices, matrix.data), hidden.numpy()
            kernels.add_transposed(*parts, at_support.numpy(), values)
            draws, threshold, scale = ctx.drops
            if len(draws):
                kernels.drop(draws, threshold, scale, values)
        initial = at_support.mul_(ctx.share) if to_initial else None
        return hidden, initial, weight, None, None, None, None, None


def _array(dense: Tensor) -> np.ndarray:
    return dense.detach().contiguous().numpy()


def encode(features: SparseRows, weight: Tensor, bias: Tensor, mask: Mask | None) -> Tensor:
    """Return ReLU((X * mask) W + b), differentiable in the weights.

    Args:
        features: X, shape (n, d); of a mask, one value for each that is stored.
        weight: W, shape (d, hidden).
        bias: b, shape (hidden,).
        mask: which values of X to drop; None: none.
    """
    if mask is not None:
        features = features.with_data(features.data * mask.factors(features.nnz, features.dtype))
    result: Tensor = _Encoder.apply(features, weight, bias)  # type: ignore[no-untyped-call]
    return result


def gcnii(
    hidden: Tensor,
    initial: Tensor,
    weight: Tensor,
    matrix: SparseRows,
    mask: Mask | None,
    *,
    share: float,
    diagonal: Tensor,
    factor: float,
) -> Tensor:
    """Return ReLU((A (H * mask) + share H0) (diagonal + factor W)), differentiable in H, H0 and W.

    Args:
        hidden: H[l], shape (|S[l]|, hidden).
        initial: H0 at the rows S[l+1].
        weight: W, shape (hidden, hidden).
        matrix: A restricted to S[l+1] x S[l].
        mask: which values of H[l] to drop; None: none.
        share: how much of H0 is added.
        diagonal: what is added to the scaled weight.
        factor: what the weight is scaled by.
    """
    result: Tensor = _GCNII.apply(hidden, initial, weight, matrix, mask, share, diagonal, factor)  # type: ignore[no-untyped-call]
    return result
