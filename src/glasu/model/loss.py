"""The loss of a batch and its gradient at the logits, in closed form."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from glasu.model import kernels

Task = Literal["multiclass", "multilabel"]


def loss_and_gradient(task: Task, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Return the mean cross-entropy, of the nodes or of the nodes' single labels, and its gradient at the logits."""
    if task == "multilabel":
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return loss.item(), logits.sigmoid().sub_(labels).div_(logits.numel())
    gradient = torch.empty_like(logits)
    return float(kernels.cross_entropy(logits.numpy(), labels.numpy(), gradient.numpy())), gradient
