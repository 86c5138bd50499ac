"""The learning rate is a function of the round, and follows torch's own schedulers."""

from __future__ import annotations

import pytest
import torch

from glasu.config import RunConfig, TrainConfig
from glasu.model.optimizer import make_optimizer, schedule_factor

ROUNDS = 40


@pytest.mark.parametrize(
    ("schedule", "scheduler"),
    [
        ("constant", lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        ("step", lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [20, 30], gamma=0.1)),
        ("cosine", lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS)),
    ],
)
def test_a_schedule_is_that_of_torch(schedule, scheduler):
    config = RunConfig(train=TrainConfig(schedule=schedule, num_rounds=ROUNDS, learning_rate=0.3))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    follower = scheduler(optimizer)
    for round_index in range(ROUNDS):
        assert 0.3 * schedule_factor(config, round_index) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        follower.step()


@pytest.mark.parametrize(
    ("settings", "kind", "expected"),
    [
        ({"optimizer": "adam", "weight_decay": 0.1}, torch.optim.Adam, {"lr": 0.3, "weight_decay": 0.1}),
        ({"optimizer": "sgd", "momentum": 0.9}, torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.001}),
    ],
)
def test_an_optimizer_has_the_settings_of_the_config(settings, kind, expected):
    config = RunConfig(train=TrainConfig(learning_rate=0.3, **settings))
    optimizer = make_optimizer(config, torch.nn.Linear(2, 2))
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected
