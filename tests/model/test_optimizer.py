"""The learning rate is a function of the round, and follows torch's own schedulers."""

from __future__ import annotations

import copy

import pytest
import torch

from glasu.config import RunConfig, TrainConfig
from glasu.model.optimizer import find_schedule_factor, make_optimizer

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
        assert 0.3 * find_schedule_factor(config, round_index) == pytest.approx(
            optimizer.param_groups[0]["lr"], abs=1e-12
        )
        optimizer.step()
        follower.step()


@pytest.mark.parametrize(
    ("settings", "kind", "keys"),
    [
        ({"optimizer": "adam", "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        ({"optimizer": "adam", "weight_decay": 0.0}, torch.optim.Adam, {}),
        ({"optimizer": "sgd", "weight_decay": 0.0}, torch.optim.SGD, {}),
        ({"optimizer": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.001}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torch(settings, kind, keys, dtype):
    torch.manual_seed(0)
    config = RunConfig(train=TrainConfig(learning_rate=0.01, **settings))
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)).to(dtype)
    twin = copy.deepcopy(model)
    own, other = make_optimizer(config, model), kind(twin.parameters(), lr=0.01, **keys)
    inputs = torch.randn(10, 7, 3, dtype=dtype)
    for index, rows in enumerate(inputs):
        own.learning_rate = other.param_groups[0]["lr"] = 0.01 / (1 + index)
        for network, optimizer in ((model, own), (twin, other)):
            network.zero_grad(set_to_none=False)
            network(rows).square().sum().backward()
            optimizer.step()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"optimizer": "sgd", "momentum": 0.9}])
def test_an_optimizer_continues_from_its_state(settings):
    config, layer = RunConfig(train=TrainConfig(**settings)), torch.nn.Linear(3, 2)
    optimizer = make_optimizer(config, layer)

    def steps(optimizer, layer, count):
        for _ in range(count):
            layer.zero_grad(set_to_none=False)
            layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()

    steps(optimizer, layer, 3)
    again = copy.deepcopy(layer)
    resumed = make_optimizer(config, again)
    resumed.restore(optimizer.state())
    for each, weights in ((optimizer, layer), (resumed, again)):
        steps(each, weights, 3)
    assert torch.equal(layer.weight, again.weight)
    assert torch.equal(layer.bias, again.bias)


def test_weights_that_are_not_to_learn_stay_out_of_the_vector():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    model[0].requires_grad_(requires_grad=False)
    before = model[0].weight.clone()
    optimizer = make_optimizer(RunConfig(train=TrainConfig(optimizer="sgd")), model)
    assert len(optimizer.weights) == 12
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
