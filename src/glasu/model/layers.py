"""GCN, GCNII, GAT and SAGE sub-layers, and any PyG convolution, acting on one block.

Each layer has two parts: `prepare` works on single rows of H[l], `propagate` mixes rows along the edges of the block.
Training calls both for each block. Exact evaluation prepares all rows once and propagates chunk by chunk.
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
from glasu.model.blocks import Block, is_everything
from glasu.model.sparse import SparseRows

Hidden: TypeAlias = Tensor | SparseRows  # sparse only for the raw features
Drop: TypeAlias = Callable[[Tensor], Tensor]  # drops some values and scales up the others
DENSE_SPEED = 7  # measured ratio of multiplications per second: dense product to sparse product


class _SparseProduct(torch.autograd.Function):
    """share * plus + matrix @ dense for a constant sparse matrix, on one thread, in a fixed order of additions."""

    @staticmethod
    def forward(ctx: Any, matrix: SparseRows, dense: Tensor, plus: Tensor | None, share: float) -> Tensor:
        ctx.matrix, ctx.share = matrix, share
        total = dense.new_zeros(matrix.shape[0], dense.shape[1]) if plus is None else plus * share
        kernels.add_product(matrix.indptr, matrix.indices, matrix.data, _to_array(dense), total.numpy())
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        matrix, back = ctx.matrix, None
        if ctx.needs_input_grad[1]:
            back = gradient.new_zeros(matrix.width, gradient.shape[1])
            kernels.add_transposed(matrix.indptr, matrix.indices, matrix.data, _to_array(gradient), back.numpy())
        return None, back, gradient * ctx.share if ctx.needs_input_grad[2] else None, None


def _to_array(dense: Tensor) -> np.ndarray:
    return dense.detach().contiguous().numpy()


def multiply_sparse(matrix: SparseRows, dense: Tensor, plus: Tensor | None = None, share: float = 1.0) -> Tensor:
    """Return matrix @ dense (+ share * plus), differentiable in `dense` and `plus`."""
    result: Tensor = _SparseProduct.apply(matrix, dense, plus, share)  # type: ignore[no-untyped-call]
    return result


def mix_rows(block: Block, hidden: Tensor, plus: Tensor | None = None, share: float = 1.0) -> Tensor:
    """Return the rows S[l+1] of A H (+ share * plus), differentiable in H and `plus`."""
    if block.dense is None:
        return multiply_sparse(block.matrix, hidden, plus, share)
    dense = torch.from_numpy(block.dense)
    return dense @ hidden if plus is None else torch.addmm(plus, dense, hidden, beta=share)


def take_rows(hidden: Hidden, positions: np.ndarray) -> Hidden:
    """Return the rows at `positions`. If these are all rows in order, return `hidden` itself."""
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
            product = multiply_sparse(hidden, self.weight)
            return product if self.bias is None else product + self.bias
        return hidden @ self.weight if self.bias is None else torch.addmm(self.bias, hidden, self.weight)


class Layer(nn.Module, ABC):
    """One sub-layer of a client. A subclass defines how rows are mixed."""

    reads_input = False  # whether `propagate` reads H[l] besides the output of `prepare`

    def prepare(self, hidden: Hidden) -> Hidden:
        """Compute the part that works on single rows of H[l]."""
        return hidden

    @abstractmethod
    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        """Compute the rows S[l+1] of H_m^+[l] before the activation.

        Args:
            prepared: the output of `prepare`; rows S[l].
            hidden: H[l] itself, rows S[l]; may be None if `prepare` changed it and `reads_input` is False.
            initial: H_m^0 at the rows S[l+1]; None without an encoder.
            block: A restricted to S[l+1] x S[l].
        """

    def forward(self, hidden: Hidden, initial: Tensor | None, block: Block, drop: Drop | None = None) -> Tensor:
        """Compute both parts. In training, `drop` drops attention weights."""
        return self.propagate(self.prepare(hidden), hidden, initial, block)


class GCNLayer(Layer):
    """A H W + b (Kipf and Welling 2017), computed as (A H) W or as A (H W), see `_mixes_first`."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = Projection(width_in, width_out, bias=False)
        self.bias = nn.Parameter(torch.zeros(width_out))
        self.narrows = width_in > width_out

    def prepare(self, hidden: Hidden) -> Hidden:
        return self.linear(hidden) if self.narrows or not isinstance(hidden, Tensor) else hidden

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        assert isinstance(prepared, Tensor)
        product = mix_rows(block, prepared)
        return self._transform(product) if prepared is hidden else product + self.bias

    def _transform(self, product: Tensor) -> Tensor:
        return torch.addmm(self.bias, product, self.linear.weight)

    def forward(self, hidden: Hidden, initial: Tensor | None, block: Block, drop: Drop | None = None) -> Tensor:
        if isinstance(hidden, Tensor) and self._mixes_first(block):
            return self._transform(mix_rows(block, hidden))
        return super().forward(hidden, initial, block, drop)

    def _mixes_first(self, block: Block) -> bool:
        """Return whether (A H) W costs less than A (H W).

        This is so if W widens the rows, or if the block has far fewer rows than columns.
        """
        (rows, columns), (width_in, width_out) = block.matrix.shape, self.linear.weight.shape
        more = DENSE_SPEED * block.matrix.nnz * (width_in - width_out)
        return more < (columns - rows) * width_in * width_out


class GCNIILayer(Layer):
    """((1 - alpha) A H + alpha H^0) ((1 - beta) I + beta W), beta = log(theta / (l + 1) + 1) (Chen et al. 2020).

    After a layer that aggregates by `concat`, rows are M times as wide. This layer first projects them back to the
    hidden width.
    """

    def __init__(self, width_in: int, width_out: int, *, layer: int, alpha: float, theta: float) -> None:
        super().__init__()
        self.reduce = Projection(width_in, width_out) if width_in != width_out else None
        self.linear = Projection(width_out, width_out, bias=False)
        self.alpha, self.beta = alpha, math.log(theta / (layer + 1) + 1)
        self.larger = max(alpha, 1 - alpha)  # applied as a factor of a later product, to save a pass over all rows
        self.kept, self.turned = self.larger * (1 - self.beta), self.larger * self.beta

    def prepare(self, hidden: Hidden) -> Hidden:
        return hidden if self.reduce is None else self.reduce(hidden)

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        assert isinstance(prepared, Tensor)
        assert initial is not None
        support = self._support(prepared, initial, block)
        return torch.addmm(support, support, self.linear.weight, beta=self.kept, alpha=self.turned)

    def _support(self, prepared: Tensor, initial: Tensor, block: Block) -> Tensor:
        """Return (1 - alpha) A H + alpha H^0, divided by max(alpha, 1 - alpha), in one pass over the rows."""
        if self.alpha < 1 - self.alpha:
            return mix_rows(block, prepared, initial, self.alpha / self.larger)
        return torch.add(initial, mix_rows(block, prepared), alpha=(1 - self.alpha) / self.larger)


class SAGELayer(Layer):
    """(mean of the neighbours' rows) W_1 + (own row) W_2 + b (Hamilton et al. 2017)."""

    reads_input = True

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.neighbors = Projection(width_in, width_out)
        self.root = Projection(width_in, width_out, bias=False)

    def prepare(self, hidden: Hidden) -> Hidden:
        return hidden if isinstance(hidden, Tensor) else multiply_sparse(hidden, self.neighbors.weight)

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        assert isinstance(prepared, Tensor)
        assert hidden is not None
        mean = mix_rows(block, prepared)
        own: Tensor = self.root(take_rows(hidden, block.positions))
        if isinstance(hidden, Tensor):
            mean = mean @ self.neighbors.weight
        assert self.neighbors.bias is not None
        return own + mean + self.neighbors.bias


class GATLayer(Layer):
    """Attention over the block's edges and self loops, with concatenated heads (Velickovic et al. 2018).

    Edge weights are ignored, because attention replaces them (`Backbone.uses_edge_weights`). In training, dropout
    applies to attention weights and to the layer's input, as in the GAT paper; otherwise the layer overfits.
    """

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
        score = score - _find_largest(score.detach(), target, rows)[target]  # same softmax, without overflow of exp
        weight = score.exp()
        share = weight / weight.new_zeros(rows, self.heads).index_add(0, target, weight)[target]
        share = share if drop is None else drop(share)
        total = values.new_zeros(rows, *values.shape[1:]).index_add(0, target, values[source] * share.unsqueeze(-1))
        return total.reshape(rows, width) + self.bias


def _find_largest(score: Tensor, target: Tensor, rows: int) -> Tensor:
    index = target.unsqueeze(-1).expand_as(score)
    return score.new_full((rows, score.shape[1]), -math.inf).scatter_reduce(0, index, score, "amax")


class ResidualLayer(Layer):
    """Any layer with a skip connection. The connection adds H[l] W at the rows S[l+1] to the layer's output."""

    reads_input = True

    def __init__(self, layer: Layer, width_in: int, width_out: int) -> None:
        super().__init__()
        self.layer, self.skip = layer, Projection(width_in, width_out, bias=False)

    def prepare(self, hidden: Hidden) -> Hidden:
        return self.layer.prepare(hidden)

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        assert hidden is not None
        return self.layer.propagate(prepared, hidden, initial, block) + self._own(hidden, block)

    def forward(self, hidden: Hidden, initial: Tensor | None, block: Block, drop: Drop | None = None) -> Tensor:
        result: Tensor = self.layer(hidden, initial, block, drop)
        return result + self._own(hidden, block)

    def _own(self, hidden: Hidden, block: Block) -> Tensor:
        own: Tensor = self.skip(take_rows(hidden, block.positions))
        return own


class ConvolutionLayer(Layer):
    """A PyG convolution on the pair (x_source, x_target). The edges of a block include the self loops."""

    reads_input = True

    def __init__(self, convolution: nn.Module, width_out: int) -> None:
        super().__init__()
        # With `add_self_loops`, PyG adds the loops i -> i. In a block, source i and target i are different nodes, so
        # the loops would connect the wrong nodes.
        if any(getattr(module, "add_self_loops", False) for module in convolution.modules()):
            raise ConfigError(
                f"{type(convolution).__name__} has add_self_loops=True, which connects the wrong nodes in a block "
                "whose source and target nodes differ. Pass add_self_loops=False: GLASU's blocks contain self loops."
            )
        self.convolution, self.width_out = convolution, width_out

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        assert hidden is not None
        dense = hidden if isinstance(hidden, Tensor) else torch.from_numpy(hidden.toarray())
        target = dense[torch.from_numpy(block.positions)]
        result: Tensor = self.convolution((dense, target), torch.from_numpy(block.edge_index()))
        if result.shape != (len(target), self.width_out):
            raise ConfigError(
                f"the convolution returned shape {tuple(result.shape)} for {len(target)} nodes; "
                f"it must return one row of width {self.width_out} (model.hidden) per node."
            )
        return result
