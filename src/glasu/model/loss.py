"""Old entry point of `task`, until the last caller uses a `Task`."""

from __future__ import annotations

from torch import Tensor

from glasu import registry


def loss_and_gradient(task: str, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    result: tuple[float, Tensor] = registry.load("task", task)().loss_and_gradient(logits, labels)
    return result
