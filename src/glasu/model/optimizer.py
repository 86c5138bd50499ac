"""The optimiser of one client, and its learning rate as a function of the round."""

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

Array = NDArray[Any]
NOTHING: Array = np.empty(0)
ALL = (slice(None),)  # the parts of a vector, where it is one
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam, as its authors and torch have them


def schedule_factor(config: RunConfig, round_index: int) -> float:
    """Return the factor on the learning rate: step divides by ten after half and three quarters of the rounds."""
    progress = round_index / config.train.num_rounds
    if config.train.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if config.train.schedule == "step":
        return 0.1 ** ((progress >= 0.5) + (progress >= 0.75))
    return 1.0


class Optimizer:
    """SGD or Adam, as torch has them, over all weights at once: they lie end to end in one vector.

    So do their gradients, and the model keeps views of both: a step is one loop, whatever the number of layers. A
    weight that no loss reads has a gradient of zero, and decays if asked to.

    SGD without momentum needs nothing but the gradient. Where that is a product, the step can be part of computing it
    (`descent`), which spares writing the gradient and reading it again; `step` is left what has not been changed so.
    """

    def __init__(self, config: RunConfig, model: nn.Module) -> None:
        self.train = config.train
        self.learning_rate = config.train.learning_rate
        self.weights, self.gradients = laid_out(model)
        self.moments: dict[str, Array] = {}  # what a checkpoint needs; none before the first step
        self.steps = 0

    @property
    def is_plain(self) -> bool:
        """Tell whether a step needs nothing but the gradient."""
        return self.train.optimizer == "sgd" and not self.train.momentum

    @property
    def descent(self) -> tuple[float, float]:
        """Return a and b: a step of plain SGD makes a * weight + b * gradient of a weight."""
        return 1 - self.learning_rate * self.train.weight_decay, -self.learning_rate

    def step(self, parts: Sequence[slice] = ALL) -> None:
        """Change the weights by their gradients; of a plain step, those parts that have not been changed yet."""
        self.steps += 1
        kind, train = self.weights.dtype.type, self.train
        if train.optimizer == "adam":
            (first, second), lengths = BETAS, [1 - beta**self.steps for beta in BETAS]
            rate, length = kind(self.learning_rate / lengths[0]), kind(math.sqrt(lengths[1]))
            settings = rate, length, kind(first), kind(second), kind(EPSILON), kind(train.weight_decay)
            moments = self._moment("mean"), self._moment("square")
            kernels.descend_adaptively(self.weights, self.gradients, *moments, *settings)
        else:
            velocity = self._moment("velocity") if train.momentum else NOTHING
            factors = kind(self.learning_rate), kind(train.momentum), kind(train.weight_decay)
            for part in parts:
                kernels.descend(self.weights[part], self.gradients[part], velocity, *factors)

    def _moment(self, name: str) -> Array:
        if name not in self.moments:
            self.moments[name] = np.zeros_like(self.weights)
        return self.moments[name]

    def state(self) -> dict[str, Tensor]:
        """Return a copy of what the next step needs to know of those before it."""
        moments = {name: torch.from_numpy(values.copy()) for name, values in self.moments.items()}
        return {**moments, "steps": torch.tensor(self.steps)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned; an empty one is that of the beginning."""
        moments = {name: values.numpy().copy() for name, values in state.items() if name != "steps"}
        self.moments, self.steps = moments, int(state["steps"]) if state else 0


def laid_out(model: nn.Module) -> tuple[Array, Array]:
    """Lay all weights end to end in one vector and their gradients in another, and give the model views of both."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    values = torch.cat([weight.detach().ravel() for weight in weights])
    gradients, start = torch.zeros_like(values), 0
    for weight in weights:
        own = slice(start, start := start + weight.numel())
        weight.data, weight.grad = values[own].view(weight.shape), gradients[own].view(weight.shape)
    return values.numpy(), gradients.numpy()
