"""The optimizer of one client, and its learning rate as a function of the round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from glasu.config import RunConfig
from glasu.model import kernels

NO_MOMENT: NDArray[Any] = np.empty(0)
ALL = (slice(None),)  # the whole vector, as one part
BETAS, EPSILON = (0.9, 0.999), 1e-8  # defaults of Adam


def find_schedule_factor(config: RunConfig, round_index: int) -> float:
    """Return the factor of the learning rate. "step" divides by ten after 1/2 and after 3/4 of the rounds."""
    progress = round_index / config.train.num_rounds
    if config.train.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if config.train.schedule == "step":
        return 0.1 ** ((progress >= 0.5) + (progress >= 0.75))
    return 1.0


class Optimizer:
    """SGD or Adam with the formulas of torch, in one loop over all weights.

    All weights are concatenated in one vector and their gradients in another; the model holds views of both. So a step
    is one loop for any number of layers. A weight that does not affect the loss has gradient zero; weight decay still
    applies.

    Plain SGD needs only the gradient. If the gradient is a matrix product, the product can be added to the weight
    directly (`descent`), which saves writing and reading the gradient. `step` then updates the other weights only.
    """

    def __init__(self, config: RunConfig, model: nn.Module) -> None:
        self.train = config.train
        self.learning_rate = config.train.learning_rate
        self.weights, self.gradients = lay_out_weights(model)
        self.moments: dict[str, NDArray[Any]] = {}  # part of a checkpoint; empty before the first step
        self.steps = 0

    @property
    def is_plain(self) -> bool:
        """Whether a step needs only the gradient: SGD without momentum."""
        return self.train.optimizer == "sgd" and not self.train.momentum

    @property
    def descent(self) -> tuple[float, float]:
        """The factors (a, b) of plain SGD: weight <- a * weight + b * gradient."""
        return 1 - self.learning_rate * self.train.weight_decay, -self.learning_rate

    def step(self, parts: Sequence[slice] = ALL) -> None:
        """Update the weights from their gradients. Plain SGD updates only `parts`, which were not updated before."""
        self.steps += 1
        kind, train = self.weights.dtype.type, self.train
        if train.optimizer == "adam":
            (first, second), lengths = BETAS, [1 - beta**self.steps for beta in BETAS]
            rate, length = kind(self.learning_rate / lengths[0]), kind(math.sqrt(lengths[1]))
            settings = rate, length, kind(first), kind(second), kind(EPSILON), kind(train.weight_decay)
            moments = self._moment("mean"), self._moment("square")
            kernels.adam_step(self.weights, self.gradients, *moments, *settings)
        else:
            velocity = self._moment("velocity") if train.momentum else NO_MOMENT
            factors = kind(self.learning_rate), kind(train.momentum), kind(train.weight_decay)
            for part in parts:
                kernels.sgd_step(self.weights[part], self.gradients[part], velocity, *factors)

    def _moment(self, name: str) -> NDArray[Any]:
        if name not in self.moments:
            self.moments[name] = np.zeros_like(self.weights)
        return self.moments[name]

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the state that the next step depends on."""
        moments = {name: torch.from_numpy(values.copy()) for name, values in self.moments.items()}
        return {**moments, "steps": torch.tensor(self.steps)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a result of `state`; an empty mapping restores the initial state."""
        moments = {name: values.numpy().copy() for name, values in state.items() if name != "steps"}
        self.moments, self.steps = moments, int(state["steps"]) if state else 0


def lay_out_weights(model: nn.Module) -> tuple[NDArray[Any], NDArray[Any]]:
    """Move all weights into one vector and their gradients into another; the model keeps views of both."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    values = torch.cat([weight.detach().ravel() for weight in weights])
    gradients, start = torch.zeros_like(values), 0
    for weight in weights:
        own = slice(start, start := start + weight.numel())
        weight.data, weight.grad = values[own].view(weight.shape), gradients[own].view(weight.shape)
    return values.numpy(), gradients.numpy()
