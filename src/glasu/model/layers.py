"""GCN, GCNII, GAT and SAGE sub-layers, and any PyG convolution, acting on one block.

Each layer works in two halves: `prepare` looks at single rows of H[l] only, `propagate` mixes rows along the block's
edges. Training calls one after the other; exact evaluation prepares all rows once and propagates chunk by chunk.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from glasu.errors import ConfigError
from glasu.model import kernels
from glasu.model.blocks import Block, Normalization, is_everything
from glasu.model.sparse import SparseRows

Hidden: TypeAlias = Tensor | SparseRows  # sparse only below the first layer: the raw features
Convolution: TypeAlias = Callable[[int, int], nn.Module]  # (input width, output width) -> a PyG convolution
Drop: TypeAlias = Callable[[Tensor], Tensor]  # drops some of the values and scales up the rest
DENSE_SPEED = 7  # so many times as many multiplications per second as a sparse product does a dense one


class _SparseProduct(torch.autograd.Function):
    """share * plus + matrix @ dense for a constant sparse matrix, on one thread, in a fixed order of additions."""

    @staticmethod
    def forward(ctx: Any, matrix: SparseRows, dense: Tensor, plus: Tensor | None, share: float) -> Tensor:
        ctx.matrix, ctx.share = matrix, share
        total = dense.new_zeros(matrix.shape[0], dense.shape[1]) if plus is None else plus * share
        kernels.add_product(matrix.indptr, matrix.indices, matrix.data, _array(dense), total.numpy())
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        matrix, back = ctx.matrix, None
        if ctx.needs_input_grad[1]:
            back = gradient.new_zeros(matrix.width, gradient.shape[1])
            kernels.add_transposed(matrix.indptr, matrix.indices, matrix.data, _array(gradient), back.numpy())
        return None, back, gradient * ctx.share if ctx.needs_input_grad[2] else None, None


def _array(dense: Tensor) -> np.ndarray:
    return dense.detach().contiguous().numpy()


def sparse_product(matrix: SparseRows, dense: Tensor, plus: Tensor | None = None, share: float = 1.0) -> Tensor:
    """Return matrix @ dense (+ share * plus), differentiable in `dense` and `plus`."""
    result: Tensor = _SparseProduct.apply(matrix, dense, plus, share)  # type: ignore[no-untyped-call]
    return result


def mixed(block: Block, hidden: Tensor, plus: Tensor | None = None, share: float = 1.0) -> Tensor:
    """Return A H (+ share * plus), the rows S[l+1] of it, differentiable in H and `plus`."""
    if block.dense is None:
        return sparse_product(block.matrix, hidden, plus, share)
    dense = torch.from_numpy(block.dense)
    return dense @ hidden if plus is None else torch.addmm(plus, dense, hidden, beta=share)


def rows_of(hidden: Hidden, positions: np.ndarray) -> Hidden:
    """Return the rows at `positions`; nothing is copied where these are all rows, in their order."""
    if is_everything(positions, hidden.shape[0]):
        return hidden
    return hidden.index_select(0, torch.from_numpy(positions)) if isinstance(hidden, Tensor) else hidden.rows(positions)


class Projection(nn.Module):
    """H W (+ b), for dense rows or for the sparse features of the first layer."""

    def __init__(self, width_in: int, width_out: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_in, width_out))
        self.bias = nn.Parameter(torch.zeros(width_out)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(self, hidden: Hidden) -> Tensor:
        if not isinstance(hidden, Tensor):
            product = sparse_product(hidden, self.weight)
            return product if self.bias is None else product + self.bias
        return hidden @ self.weight if self.bias is None else torch.addmm(self.bias, hidden, self.weight)


class Layer(nn.Module, ABC):
    """One sub-layer of a client; subclasses say how its graph is normalised and how rows are mixed."""

    normalization: Normalization = "symmetric"
    reads_input = False  # whether `propagate` looks at H[l] beside what `prepare` made of it

    def prepare(self, hidden: Hidden) -> Hidden:
        """Compute what concerns single rows of H[l]."""
        return hidden

    @abstractmethod
    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        """Compute the rows S[l+1] of H_m^+[l] before the activation.

        Args:
            prepared: what `prepare` made of H[l]; rows S[l].
            hidden: H[l] itself, rows S[l]; may be None where it is another object than `prepared` and is not read.
            initial: H_m^0 at the rows S[l+1]; gcnii only.
            block: A restricted to S[l+1] x S[l].
        """

    def forward(self, hidden: Hidden, initial: Tensor | None, block: Block, drop: Drop | None = None) -> Tensor:
        """Compute both halves; in training, `drop` is for what the layer itself drops: attention."""
        return self.propagate(self.prepare(hidden), hidden, initial, block)


class GCNLayer(Layer):
    """A H W + b (Kipf and Welling); whichever order of the products costs less."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = Projection(width_in, width_out, bias=False)
        self.bias = nn.Parameter(torch.zeros(width_out))
        self.narrows = width_in > width_out

    def prepare(self, hidden: Hidden) -> Hidden:
        return self.linear(hidden) if self.narrows or not isinstance(hidden, Tensor) else hidden

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        assert isinstance(prepared, Tensor)
        product = mixed(block, prepared)
        return self._transformed(product) if prepared is hidden else product + self.bias

    def _transformed(self, product: Tensor) -> Tensor:
        return torch.addmm(self.bias, product, self.linear.weight)

    def forward(self, hidden: Hidden, initial: Tensor | None, block: Block, drop: Drop | None = None) -> Tensor:
        if isinstance(hidden, Tensor) and self._mixes_first(block):
            return self._transformed(mixed(block, hidden))
        return super().forward(hidden, initial, block, drop)

    def _mixes_first(self, block: Block) -> bool:
        """Tell whether (A H) W costs less than A (H W): where the block has far fewer rows than columns."""
        (rows, columns), (width_in, width_out) = block.matrix.shape, self.linear.weight.shape
        more = DENSE_SPEED * block.matrix.nnz * (width_in - width_out)
        return more < (columns - rows) * width_in * width_out


class GCNIILayer(Layer):
    """((1 - alpha) A H + alpha H^0) ((1 - beta) I + beta W), beta = log(theta / (l + 1) + 1) (Chen et al. 2020).

    After `concat` the layer reads M times the width and starts with a projection back to the hidden width.
    """

    def __init__(self, width_in: int, width_out: int, *, layer: int, alpha: float, theta: float) -> None:
        super().__init__()
        self.reduce = Projection(width_in, width_out) if width_in != width_out else None
        self.linear = Projection(width_out, width_out, bias=False)
        self.alpha, self.beta = alpha, math.log(theta / (layer + 1) + 1)
        self.larger = max(alpha, 1 - alpha)  # goes to factors of the products, for that costs no pass over all rows
        self.kept, self.turned = self.larger * (1 - self.beta), self.larger * self.beta

    def prepare(self, hidden: Hidden) -> Hidden:
        return hidden if self.reduce is None else self.reduce(hidden)

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        assert isinstance(prepared, Tensor)
        assert initial is not None
        support = self._support(prepared, initial, block)
        return torch.addmm(support, support, self.linear.weight, beta=self.kept, alpha=self.turned)

    def _support(self, prepared: Tensor, initial: Tensor, block: Block) -> Tensor:
        """Return (1 - alpha) A H + alpha H^0, divided by the larger share: one sum over all rows, either way."""
        if self.alpha < 1 - self.alpha:
            return mixed(block, prepared, initial, self.alpha / self.larger)
        return torch.add(initial, mixed(block, prepared), alpha=(1 - self.alpha) / self.larger)


class SAGELayer(Layer):
    """mean of the neighbours W_1 + own row W_2 + b (Hamilton et al. 2017)."""

    normalization: Normalization = "mean"
    reads_input = True

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.neighbors = Projection(width_in, width_out)
        self.root = Projection(width_in, width_out, bias=False)

    def prepare(self, hidden: Hidden) -> Hidden:
        return hidden if isinstance(hidden, Tensor) else sparse_product(hidden, self.neighbors.weight)

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        assert isinstance(prepared, Tensor)
        assert hidden is not None
        mean = mixed(block, prepared)
        own: Tensor = self.root(rows_of(hidden, block.positions))
        if isinstance(hidden, Tensor):
            mean = mean @ self.neighbors.weight
        assert self.neighbors.bias is not None
        return own + mean + self.neighbors.bias


class GATLayer(Layer):
    """Attention over the block's edges and self loops, the heads side by side (Velickovic et al. 2018).

    In training the shares of attention are dropped like the layer's input, as its authors do: it overfits otherwise.
    """

    normalization: Normalization = "none"
    negative_slope = 0.2

    def __init__(self, width_in: int, width_out: int, *, heads: int) -> None:
        super().__init__()
        self.linear = Projection(width_in, width_out, bias=False)
        self.attention_source = nn.Parameter(torch.empty(1, heads, width_out // heads))
        self.attention_target = nn.Parameter(torch.empty(1, heads, width_out // heads))
        self.bias = nn.Parameter(torch.zeros(width_out))
        nn.init.xavier_uniform_(self.attention_source)
        nn.init.xavier_uniform_(self.attention_target)
        self.heads = heads

    def prepare(self, hidden: Hidden) -> Hidden:
        rows: Tensor = self.linear(hidden)
        return rows

    def forward(self, hidden: Hidden, initial: Tensor | None, block: Block, drop: Drop | None = None) -> Tensor:
        return self.propagate(self.prepare(hidden), hidden, initial, block, drop)

    def propagate(
        self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block, drop: Drop | None = None
    ) -> Tensor:
        assert isinstance(prepared, Tensor)
        source, target = torch.from_numpy(block.edge_index())
        rows, width = len(block.positions), prepared.shape[1]
        values = prepared.view(len(prepared), self.heads, width // self.heads)
        toward = (values * self.attention_source).sum(-1)
        own = (values[torch.from_numpy(block.positions)] * self.attention_target).sum(-1)
        score = nn.functional.leaky_relu(toward[source] + own[target], self.negative_slope)
        score = score - _largest(score.detach(), target, rows)[target]  # softmax does not change, exp cannot overflow
        weight = score.exp()
        share = weight / weight.new_zeros(rows, self.heads).index_add(0, target, weight)[target]
        share = share if drop is None else drop(share)
        total = values.new_zeros(rows, *values.shape[1:]).index_add(0, target, values[source] * share.unsqueeze(-1))
        return total.reshape(rows, width) + self.bias


def _largest(score: Tensor, target: Tensor, rows: int) -> Tensor:
    index = target.unsqueeze(-1).expand_as(score)
    return score.new_full((rows, score.shape[1]), -math.inf).scatter_reduce(0, index, score, "amax")


class ResidualLayer(Layer):
    """Any layer, plus the rows' own input H[l] W: what a node knows of itself does not pass through its neighbours."""

    reads_input = True

    def __init__(self, layer: Layer, width_in: int, width_out: int) -> None:
        super().__init__()
        self.layer, self.skip = layer, Projection(width_in, width_out, bias=False)
        self.normalization = layer.normalization

    def prepare(self, hidden: Hidden) -> Hidden:
        return self.layer.prepare(hidden)

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        assert hidden is not None
        return self.layer.propagate(prepared, hidden, initial, block) + self._own(hidden, block)

    def forward(self, hidden: Hidden, initial: Tensor | None, block: Block, drop: Drop | None = None) -> Tensor:
        result: Tensor = self.layer(hidden, initial, block, drop)
        return result + self._own(hidden, block)

    def _own(self, hidden: Hidden, block: Block) -> Tensor:
        own: Tensor = self.skip(rows_of(hidden, block.positions))
        return own


class CustomLayer(Layer):
    """A user's PyG convolution on the pair (x_source, x_target); the block's edges include the self loops."""

    normalization: Normalization = "none"
    reads_input = True

    def __init__(self, convolution: nn.Module, width_out: int) -> None:
        super().__init__()
        self.convolution, self.width_out = convolution, width_out

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        assert hidden is not None
        dense = hidden if isinstance(hidden, Tensor) else torch.from_numpy(hidden.toarray())
        target = dense[torch.from_numpy(block.positions)]
        result: Tensor = self.convolution((dense, target), torch.from_numpy(block.edge_index()))
        if result.shape != (len(target), self.width_out):
            raise ConfigError(
                f"the convolution made {tuple(result.shape)} of {len(target)} rows; "
                f"it must give one row of width {self.width_out} (model.hidden) per node."
            )
        return result
