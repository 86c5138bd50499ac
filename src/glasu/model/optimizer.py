"""The optimizer of one client, and its learning rate as a function of the round.

The config imports this module for its tables, also on a server without torch. So torch is not imported at the top.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from glasu import registry
from glasu.config import RunConfig
from glasu.model import kernels

if TYPE_CHECKING:
    from torch import Tensor, nn

NO_MOMENT: NDArray[Any] = np.empty(0)
ALL = (slice(None),)  # the whole weight vector, as one part
BETAS, EPSILON = (0.9, 0.999), 1e-8  # defaults of Adam


@dataclass(frozen=True)
class Schedule:
    """A choice of `train.schedule`."""

    factor: Callable[[float], float]  # the factor of the learning rate, given the share of completed rounds
    is_constant: bool = False


SCHEDULES: dict[str, Schedule] = {
    "constant": Schedule(lambda progress: 1.0, is_constant=True),
    "step": Schedule(lambda progress: 0.1 ** ((progress >= 0.5) + (progress >= 0.75))),
    "cosine": Schedule(lambda progress: 0.5 * (1 + math.cos(math.pi * progress))),
}


def find_schedule(config: RunConfig) -> Schedule:
    """Return the schedule that the config names."""
    found: Schedule = registry.load("schedule", config.train.schedule)
    return found


def find_schedule_factor(config: RunConfig, round_index: int) -> float:
    """Return the factor of the learning rate in a round."""
    return find_schedule(config).factor(round_index / config.train.num_rounds)


class Optimizer(ABC):
    """Updates the weights from their gradients. To add an optimizer, register a subclass.

    All weights are concatenated in one vector and their gradients in another; the model holds views of both. So a step
    is one loop for any number of layers. A weight that does not affect the loss has gradient zero; weight decay still
    applies.

    Plain SGD needs only the gradient. If the gradient of a weight is a matrix product, the backward pass can subtract a
    multiple of the product from the weight directly (`descent`), without storing the gradient. `step` then updates only
    the other weights.
    """

    # The number of weight-sized vectors that the optimizer always stores. With some settings it stores more.
    num_moments: ClassVar[int] = 0

    def __init__(self, config: RunConfig, model: nn.Module) -> None:
        self.train = config.train
        self.learning_rate = config.train.learning_rate
        self.weights, self.gradients = lay_out_weights(model)
        self.moments: dict[str, NDArray[Any]] = {}  # part of a checkpoint; empty before the first step
        self.steps = 0

    @property
    def is_plain(self) -> bool:
        """Whether `step` is plain SGD, with the factors `descent`."""
        return False

    @property
    def descent(self) -> tuple[float, float]:
        """The factors (a, b) of plain SGD: weight <- a * weight + b * gradient."""
        return 1 - self.learning_rate * self.train.weight_decay, -self.learning_rate

    def step(self, parts: Sequence[slice] = ALL) -> None:
        """Update the weights. Plain SGD updates only `parts`; the backward pass has already updated the other weights.

        An optimizer that is not plain SGD updates all weights.
        """
        self.steps += 1
        self._update(parts)

    @abstractmethod
    def _update(self, parts: Sequence[slice]) -> None:
        """Update the weights. `self.steps` is the number of this step; the first step has number 1."""

    def _moment(self, name: str) -> NDArray[Any]:
        if name not in self.moments:
            self.moments[name] = np.zeros_like(self.weights)
        return self.moments[name]

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the state that the next step depends on."""
        import torch

        moments = {name: torch.from_numpy(values.copy()) for name, values in self.moments.items()}
        return {**moments, "steps": torch.tensor(self.steps)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a result of `state`; an empty mapping restores the initial state."""
        moments = {name: values.numpy().copy() for name, values in state.items() if name != "steps"}
        self.moments, self.steps = moments, int(state["steps"]) if state else 0


class SGD(Optimizer):
    """The update rule of torch.optim.SGD, with or without momentum."""

    @property
    def is_plain(self) -> bool:
        return not self.train.momentum

    def _update(self, parts: Sequence[slice]) -> None:
        kind, train = self.weights.dtype.type, self.train
        velocity = self._moment("velocity") if train.momentum else NO_MOMENT
        factors = kind(self.learning_rate), kind(train.momentum), kind(train.weight_decay)
        for part in parts:
            kernels.sgd_step(self.weights[part], self.gradients[part], velocity, *factors)


class Adam(Optimizer):
    """The update rule of torch.optim.Adam."""

    num_moments = 2

    def _update(self, parts: Sequence[slice]) -> None:
        kind, train = self.weights.dtype.type, self.train
        (first, second), lengths = BETAS, [1 - beta**self.steps for beta in BETAS]
        rate, length = kind(self.learning_rate / lengths[0]), kind(math.sqrt(lengths[1]))
        settings = rate, length, kind(first), kind(second), kind(EPSILON), kind(train.weight_decay)
        moments = self._moment("mean"), self._moment("square")
        kernels.adam_step(self.weights, self.gradients, *moments, *settings)


OPTIMIZERS: dict[str, type[Optimizer]] = {"adam": Adam, "sgd": SGD}


def find_optimizer(config: RunConfig) -> type[Optimizer]:
    """Return the class of the optimizer that the config names."""
    found: type[Optimizer] = registry.load("optimizer", config.train.optimizer)
    return found


def make_optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    """Return a new optimizer for the weights of a model."""
    return find_optimizer(config)(config, model)


def lay_out_weights(model: nn.Module) -> tuple[NDArray[Any], NDArray[Any]]:
    """Move all weights into one vector and their gradients into another; the model keeps views of both."""
    import torch

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    values = torch.cat([weight.detach().ravel() for weight in weights])
    gradients, start = torch.zeros_like(values), 0
    for weight in weights:
        own = slice(start, start := start + weight.numel())
        weight.data, weight.grad = values[own].view(weight.shape), gradients[own].view(weight.shape)
    return values.numpy(), gradients.numpy()
