"""Does the exact gradient vanish at the rate of the paper's Theorem 1 while training is sampled, local and stale?

Plotted: (1/TQ) sum over t and q of |grad L(W^{t,q}; D)|^2 against TQ, one run per point, with step c (TQ)^-1/2. L is the
sum of the clients' losses over all training nodes and every edge; its gradient is taken through all clients at once.
Beside it: bias and variance of the sampled gradient, and the angle between Algorithm 1's gradient and the exact one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from glasu.config import ModelConfig, RunConfig, TrainConfig
from glasu.data.demo import news_service
from glasu.data.partition import WholeGraph, partition, pool_parties
from glasu.data.party import PartyData
from glasu.model.split import no_dropout
from glasu.protocol.actor import Client
from glasu.protocol.client import client_script
from glasu.protocol.server import server_script
from glasu.runtime.meter import Meter
from glasu.runtime.simulation import make_clients, make_server, one_thread, run_in_process
from glasu.timing import Stopwatch

STEP = 8.0  # c: the step is c (TQ)^-1/2
FROZEN: dict[str, Any] = {"num_local_steps": 1, "learning_rate": 1.0}
EXACT: dict[str, Any] = {"sampler": "full", "batch_size": 0, "num_rounds": 1, **FROZEN}


def base_config() -> RunConfig:
    """Three layers, two of them aggregated, four stale steps on a mini-batch with sampled neighbours."""
    return RunConfig(
        model=ModelConfig(
            backbone="gcn",
            num_layers=3,
            hidden=16,
            aggregation_layers=(1, 2),
            dropout=0.0,
            normalization="layer",
        ),
        train=TrainConfig(
            num_local_steps=4,
            batch_size=16,
            sampler="neighbor",
            fanout=3,
            optimizer="sgd",
            evaluate_every=10**6,
        ),
    )


def build(config: RunConfig, parties: Sequence[PartyData]) -> list[Client]:
    """Make the clients, with a smooth activation: assumption A1 excludes ReLU."""
    clients = make_clients(config.replace(data={"num_clients": len(parties)}), parties, Stopwatch(time.perf_counter))
    for client in clients:
        client.model.activation = nn.functional.elu
    return clients


def run(clients: Sequence[Client]) -> None:
    """Train to the end."""
    server = make_server(clients[0].config, clients)
    scripts = [client_script(client) for client in clients]
    run_in_process(server_script(server), scripts, Meter(), Stopwatch(time.perf_counter))


class ExactGradient:
    """The gradient of the clients' summed loss, over all training nodes, every edge and all weights."""

    def __init__(self, config: RunConfig, parties: Sequence[PartyData]) -> None:
        self.clients = build(config, parties)
        nodes, train = np.arange(parties[0].num_nodes), self.clients[0].training_nodes
        targets = [nodes] * (config.model.num_layers - 1) + [train]
        self.blocks = [[client.sampler.exact_block(rows) for rows in targets] for client in self.clients]
        self.features = [client.features(nodes) for client in self.clients]
        self.labels = self.clients[0].labels(train)

    def at(self, weights: Sequence[Tensor]) -> tuple[float, Tensor]:
        """Return the loss and its gradient, flat, for one weight vector per client."""
        off, hidden = no_dropout(), list(self.features)
        models = [client.model for client in self.clients]
        for model, vector in zip(models, weights, strict=True):
            vector_to_parameters(vector, model.parameters())
        for layer, blocks in enumerate(zip(*self.blocks, strict=True)):
            partials = [
                model.sublayer(layer, value, None, block, off)
                for model, value, block in zip(models, hidden, blocks, strict=True)
            ]
            shared = layer in models[0].aggregation_layers
            hidden = [torch.stack(partials).mean(dim=0)] * len(partials) if shared else list(partials)
        loss = torch.zeros(())
        for client, joint in zip(self.clients, hidden, strict=True):
            assert isinstance(joint, Tensor)
            loss = loss + client.loss(client.model.classify(joint, off), self.labels)
        parameters = [parameter for model in models for parameter in model.parameters()]
        return loss.item(), torch.cat([part.ravel() for part in torch.autograd.grad(loss, parameters)])


def weights_of(clients: Sequence[Client]) -> list[Tensor]:
    """Return a copy of all weights, one vector per client."""
    return [parameters_to_vector(client.model.parameters()).detach().clone() for client in clients]


def protocol_gradients(config: RunConfig, parties: Sequence[PartyData], weights: Sequence[Tensor]) -> Tensor:
    """Return what the protocol computes in each round at fixed weights, one flat gradient per row."""
    clients, rows = build(config, parties), []
    for client, vector in zip(clients, weights, strict=True):
        vector_to_parameters(vector.clone(), client.model.parameters())
        found: list[Tensor] = []
        rows.append(found)

        def keep(client: Client = client, found: list[Tensor] = found) -> None:
            found.append(torch.cat([_gradient_of(parameter) for parameter in client.model.parameters()]))

        client.optimizer.step = keep  # type: ignore[method-assign,assignment]
    run(clients)
    return torch.cat([torch.stack(found) for found in rows], dim=1)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return gradient.detach().ravel().clone()


@dataclass(frozen=True)
class Point:
    """One run of TQ updates."""

    updates: int  # TQ
    average: float  # of the squared norm of the exact gradient
    last: float  # the squared norm, averaged over the last quarter of the updates
    loss: float  # of all clients together, at the end
    first: float  # the squared norm at W^{0,0}


def looks(updates: int, count: int) -> tuple[list[int], NDArray[np.float64]]:
    """Choose updates to look at: all of the first ones, then one in ever longer stretches, weighted by their length."""
    edges = np.unique(np.rint(np.geomspace(1, updates, count)).astype(int))
    starts, ends = np.concatenate([[0], edges[:-1]]), edges
    rng = np.random.default_rng(0)
    return rng.integers(starts, ends).tolist(), (ends - starts).astype(np.float64)


def descend(config: RunConfig, parties: Sequence[PartyData], updates: int, count: int) -> tuple[Point, list[Tensor]]:
    """Train with TQ updates and follow the exact gradient; also return the last weights seen."""
    rounds, step = updates // config.train.num_local_steps, STEP / math.sqrt(updates)
    config = config.replace(train={"num_rounds": rounds, "learning_rate": step})
    chosen, weight = looks(updates, count)
    clients, traces = build(config, parties), []
    for client in clients:
        trace: list[Tensor] = []
        traces.append(trace)
        _record(client, set(chosen), trace)
    run(clients)
    exact = ExactGradient(config, parties)
    seen = [exact.at(weights) for weights in zip(*traces, strict=True)]
    norms = np.array([float(gradient.square().sum()) for _, gradient in seen])
    late = np.asarray(chosen) >= 0.75 * updates
    average, last = (float(np.average(norms[part], weights=weight[part])) for part in (late | True, late))
    return Point(updates, average, last, seen[-1][0], float(norms[0])), [trace[-1] for trace in traces]


def _record(client: Client, chosen: set[int], trace: list[Tensor]) -> None:
    """Keep the weights before each chosen update."""
    take_step, done = client.optimizer.step, 0

    def step() -> None:
        nonlocal done
        if done in chosen:
            trace.append(parameters_to_vector(client.model.parameters()).detach().clone())
        done += 1
        take_step()

    client.optimizer.step = step  # type: ignore[method-assign,assignment]
