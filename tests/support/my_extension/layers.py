"""The part of the extension that needs torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from glasu.model.blocks import Block
from glasu.model.layers import Hidden, Layer, Projection, mix_rows, take_rows


class TwoMatricesLayer(Layer):
    """(mean of the neighbours + own row W_2) after H W_1."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.neighbors, self.own = Projection(width_in, width_out), Projection(width_out, width_out, bias=False)

    def prepare(self, hidden: Hidden) -> Tensor:
        return self.neighbors(hidden)

    def propagate(self, prepared: Hidden, hidden: Hidden | None, initial: Tensor | None, block: Block) -> Tensor:
        return mix_rows(block, prepared) + self.own(take_rows(prepared, block.positions))


def smoothed_loss(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[float, Tensor]:
    """Return the loss and its gradient at the logits."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        loss = cross_entropy(logits, labels, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.item(), gradient
