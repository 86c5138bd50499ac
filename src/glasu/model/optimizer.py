"""The optimiser of one client, and its learning rate as a function of the round."""

from __future__ import annotations

import math

import torch
from torch import nn

from glasu.config import RunConfig


def schedule_factor(config: RunConfig, round_index: int) -> float:
    """Return the factor on the learning rate: step divides by ten after half and three quarters of the rounds."""
    progress = round_index / config.train.num_rounds
    if config.train.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if config.train.schedule == "step":
        return 0.1 ** ((progress >= 0.5) + (progress >= 0.75))
    return 1.0


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD or Adam over the weights, as the config asks; fused, for it is several times faster."""
    train = config.train
    if train.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(),
            train.learning_rate,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            fused=True,
        )
    return torch.optim.Adam(model.parameters(), train.learning_rate, weight_decay=train.weight_decay, fused=True)
