"""The whole network as ONE dense model in plain torch, to hold the split network to; and tiny runs to compare with.

Nothing in `Monolith` comes from glasu.model: adjacencies are dense matrices, layers are formulas, and autograd sees
all clients at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glasu.config import ModelConfig, RunConfig, TrainConfig, WireConfig, resolve
from glasu.data.methods import override_settings
from glasu.data.party import Graph, PartyData, Splits
from glasu.protocol.client import Client
from glasu.protocol.messages import Message
from glasu.protocol.requests import Evaluated, RoundDone
from glasu.protocol.rounds import client_script
from glasu.protocol.server import Server, server_script
from glasu.runtime.inprocess import one_thread_each, run_in_process
from glasu.runtime.meter import Meter
from glasu.runtime.simulation import make_clients, make_server
from glasu.timing import Stopwatch

torch.set_num_threads(1)  # the matrices here are tiny, and threads would only wait for each other
Weights = dict[str, Tensor]
NUM_CLASSES = 3
ALL_LAYERS = (0, 1, 2, 3)
SOME_LAYERS = [(3,), (1, 3), ALL_LAYERS, (2, 3)]  # I, of a network with four layers


# --- the reference -----------------------------------------------------------------------------------------------


def dense_adjacency(graph: Graph, backbone: str) -> Tensor:
    """Return A[target, source] of all nodes, normalised as the backbone wants it, entry by entry."""
    nodes = graph.num_nodes
    A = np.zeros((nodes, nodes))
    weights = np.ones(graph.num_edges) if graph.weights is None else graph.weights.astype(np.float64)
    for source, target, weight in zip(*graph.edge_index(), weights, strict=True):
        A[target, source] = weight
    if backbone == "sage":
        rows = A.sum(axis=1, keepdims=True)
        A = np.divide(A, rows, out=np.zeros_like(A), where=rows > 0)
    elif backbone == "gat":
        A = ((A != 0) | np.eye(nodes, dtype=bool)).astype(float)
    else:
        degree = A.sum(axis=1) + 1
        A = (A + np.eye(nodes)) / np.sqrt(np.outer(degree, degree))
    return torch.from_numpy(A)


class Monolith:
    """All clients' layers and classifiers in one model; `weights` are leaves that autograd can differentiate by."""

    def __init__(
        self, config: RunConfig, parties: Sequence[PartyData], weights: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self.config, self.model, self.num_clients = config, config.model, len(parties)
        self.weights = [{key: value.detach().clone().requires_grad_() for key, value in own.items()} for own in weights]
        self.A = [dense_adjacency(party.graph, config.model.backbone) for party in parties]
        self.X = [_dense(party.features) * config.model.input_scale for party in parties]
        labelled = next(party for party in parties if party.labels is not None)
        self.y = torch.from_numpy(labelled.labels)
        self.train_nodes = torch.from_numpy(labelled.splits.train)

    def start(self, m: int) -> tuple[Tensor, Tensor | None]:
        """Return H_m[0] and, for gcnii, H_m^0."""
        if self.model.backbone != "gcnii":
            return self.X[m], None
        initial = torch.relu(self.X[m] @ self.weights[m]["encoder.weight"] + self.weights[m]["encoder.bias"])
        return initial, initial

    def _normalised(self, m: int, layer: int, H: Tensor) -> Tensor:
        if self.model.normalization == "none" or layer == 0:
            return H
        centred = H - H.mean(dim=1, keepdim=True)
        spread = (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
        return (
            centred / spread * self.weights[m][f"norms.{layer - 1}.weight"] + self.weights[m][f"norms.{layer - 1}.bias"]
        )

    def partial(self, m: int, layer: int, H: Tensor, initial: Tensor | None) -> Tensor:
        """Return H_m^+[l] at all nodes, from H_m[l] at all nodes."""
        W = {
            key.split(".", 2)[2]: value for key, value in self.weights[m].items() if key.startswith(f"layers.{layer}.")
        }
        A, H = self.A[m], self._normalised(m, layer, H)
        if self.model.backbone == "gcn":
            return torch.relu(A @ H @ W["linear.weight"] + W["bias"])
        if self.model.backbone == "sage":
            return torch.relu(A @ H @ W["neighbors.weight"] + W["neighbors.bias"] + H @ W["root.weight"])
        if self.model.backbone == "gcnii":
            if "reduce.weight" in W:
                H = H @ W["reduce.weight"] + W["reduce.bias"]
            beta = math.log(self.model.theta / (layer + 1) + 1)
            mixed = (1 - self.model.alpha) * (A @ H) + self.model.alpha * initial
            return torch.relu((1 - beta) * mixed + beta * (mixed @ W["linear.weight"]))
        heads = []
        for head, values in enumerate((H @ W["linear.weight"]).chunk(self.model.heads, dim=1)):
            to, own = values @ W["attention_source"][0, head], values @ W["attention_target"][0, head]
            score = torch.nn.functional.leaky_relu(own[:, None] + to[None, :], 0.2)
            heads.append(torch.where(A > 0, score, -math.inf).softmax(dim=1) @ values)
        return torch.nn.functional.elu(torch.cat(heads, dim=1) + W["bias"])

    def aggregate(self, partials: Sequence[Tensor]) -> Tensor:
        """Return H[l+1]."""
        if self.model.aggregation == "concat":
            return torch.cat(list(partials), dim=1)
        return sum(partials[1:], start=partials[0]) / self.num_clients

    def forward(self) -> list[Tensor]:
        """Return H_m[L] of every client, at all nodes."""
        clients = range(self.num_clients)
        hidden, initial = (list(values) for values in zip(*(self.start(m) for m in clients), strict=True))
        for layer in range(self.model.num_layers):
            hidden = [self.partial(m, layer, hidden[m], initial[m]) for m in clients]
            if layer in self.model.aggregation_layers:
                hidden = [self.aggregate(hidden)] * self.num_clients
        return hidden

    def logits(self, m: int, H: Tensor) -> Tensor:
        """Return f_m(H[L], W_m[L])."""
        H = self._normalised(m, self.model.num_layers, H)
        return H @ self.weights[m]["classifier.weight"] + self.weights[m]["classifier.bias"]

    def loss(self, m: int, H: Tensor) -> Tensor:
        """Return L_m of the training nodes, given H_m[L] at them."""
        logits, y = self.logits(m, H), self.y[self.train_nodes]
        if self.config.train.task == "multilabel":
            p = logits.sigmoid()
            return -torch.where(y == 1, p, 1 - p).log().mean()
        return -logits.log_softmax(dim=1)[torch.arange(len(y)), y].mean()

    def losses(self) -> dict[int, Tensor]:
        """Return L_m for every client with a classifier."""
        hidden = self.forward()
        labelled = [m for m in range(self.num_clients) if "classifier.weight" in self.weights[m]]
        return {m: self.loss(m, hidden[m][self.train_nodes]) for m in labelled}

    def probabilities(self) -> Tensor:
        """Return the mean of the classifiers' class probabilities, at all nodes."""
        hidden = self.forward()
        logits = [self.logits(m, hidden[m]) for m, own in enumerate(self.weights) if "classifier.weight" in own]
        multilabel = self.config.train.task == "multilabel"
        return torch.stack([one.sigmoid() if multilabel else one.softmax(dim=1) for one in logits]).mean(dim=0).detach()

    def gradients(self, loss: Tensor) -> list[dict[str, Tensor]]:
        """Return dloss/dW for every parameter of every client; zero where it does not depend on one."""
        leaves = [(m, key) for m, own in enumerate(self.weights) for key in own]
        found = torch.autograd.grad(
            loss, [self.weights[m][key] for m, key in leaves], retain_graph=True, materialize_grads=True
        )
        result: list[dict[str, Tensor]] = [{} for _ in self.weights]
        for (m, key), gradient in zip(leaves, found, strict=True):
            result[m][key] = gradient
        return result

    def descend(self, gradients: Sequence[Mapping[str, Tensor]], rate: float) -> None:
        """Take one step of plain gradient descent."""
        with torch.no_grad():
            for own, gradient in zip(self.weights, gradients, strict=True):
                for key in own:
                    own[key] -= rate * gradient[key]


def _dense(features: Any) -> Tensor:
    return torch.from_numpy(np.asarray(features.todense() if hasattr(features, "todense") else features, np.float64))


# --- tiny runs ---------------------------------------------------------------------------------------------------


def tiny_parties(
    num_clients: int = 3, num_nodes: int = 24, *, seed: int = 0, owner: str | None = None, degree: float = 2.5
) -> list[PartyData]:
    """Return parties a, b, c, ... with their own widths and their own directed edges; the second one's are weighted.

    The last three nodes have no edge anywhere. With `owner`, only that party has labels and splits.
    """
    rng = np.random.default_rng(seed)
    columns = [rng.standard_normal((num_nodes, 4 + m % 3)) for m in range(num_clients)]
    pattern = sum(block @ rng.standard_normal((block.shape[1], NUM_CLASSES)) for block in columns)
    labels = pattern.argmax(axis=1)
    train, validation, test = np.split(rng.permutation(num_nodes), [num_nodes // 2, 3 * num_nodes // 4])
    splits = Splits(np.sort(train), np.sort(validation), np.sort(test))
    classes = tuple(f"class {index}" for index in range(NUM_CLASSES))
    parties = []
    for m, block in enumerate(columns):
        source, target = rng.integers(0, num_nodes - 3, (2, round(num_nodes * degree)))
        weights = rng.uniform(0.5, 2.0, len(source)) if m == 1 else None
        graph, name = Graph.from_edges(source, target, num_nodes, weights), chr(ord("a") + m)
        told = (labels, classes, splits) if owner in (None, name) else (None, (), None)
        parties.append(PartyData(name, np.arange(num_nodes), block, graph, *told))
    return parties


def settings(**keys: Any) -> RunConfig:
    """Return a resolved config in double precision without sampling and dropout; keys of any section are changed."""
    keys = {
        "backbone": "gcn",
        "num_layers": 4,
        "aggregation_layers": (1, 3),
        "aggregation": "mean",
        "normalization": "none",
        "hidden": 6,
        "heads": 2,
        "dropout": 0.0,
        "input_scale": 1.0,
        "num_rounds": 1,
        "num_local_steps": 1,
        "batch_size": 0,
        "sampler": "full",
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "weight_decay": 0.0,
        "schedule": "constant",
        "evaluate_every": 1000,
        "precision": "fp64",
        **keys,
    }
    parts = {"model": ModelConfig, "train": TrainConfig, "wire": WireConfig}
    known = {name: {item.name for item in fields(kind)} for name, kind in parts.items()}
    assert set(keys) <= set.union(*known.values()), keys
    sections = {name: {key: keys[key] for key in keys if key in known[name]} for name in parts}
    config = RunConfig(**{name: kind(**sections[name]) for name, kind in parts.items()})
    return override_settings(resolve(config, num_nodes=100)[0])[0]


@dataclass(frozen=True)
class Run:
    """A run that is over: who took part, what it cost, and every event and message."""

    clients: list[Client]
    server: Server
    meter: Meter
    events: list[Evaluated | RoundDone]  # the server's
    initial: list[Weights]
    after_round: list[list[Weights]]  # per client, after each round

    @property
    def final(self) -> list[Weights]:
        """Return the weights after the last round, whichever were selected."""
        return [weights[-1] for weights in self.after_round]


def run(
    config: RunConfig,
    parties: Sequence[PartyData],
    *,
    scatter: int | None = None,
    arrange: Callable[[list[Client]], None] = lambda clients: None,
    carry: Callable[[Message], Message] = lambda message: message,
) -> Run:
    """Drive all roles to the end in this process.

    Args:
        config: the settings, resolved.
        parties: who takes part.
        scatter: a seed that replaces all initial weights, biases and norms too, by random ones.
        arrange: may change the clients before the first round.
        carry: sees every message, in both directions.
    """
    with one_thread_each():
        watch, meter = Stopwatch(lambda: 0.0), Meter()
        clients = make_clients(config, parties)
        if scatter is not None:
            scatter_weights(clients, scatter)
        arrange(clients)
        server, events = make_server(config, clients), []
        after_round: list[list[Weights]] = [[] for _ in clients]
        initial = [client.weights() for client in clients]
        scripts = [
            watched(client_script(client), lambda event, client=client, kept=kept: kept.append(client.weights()))
            for client, kept in zip(clients, after_round, strict=True)
        ]
        run_in_process(server_script(server), scripts, meter, watch, events.append, carry)
    return Run(clients, server, meter, events, initial, after_round)


def watched(script: Generator, see: Callable[[RoundDone], None]) -> Generator:
    """Pass a client's script through, and tell `see` of every finished round, when the weights are those after it."""
    answers = None
    while True:
        try:
            item = next(script) if answers is None else script.send(answers)
        except StopIteration:
            return
        if isinstance(item, RoundDone):
            see(item)
            answers = None
        else:
            answers = yield item


def scatter_weights(clients: Sequence[Client], seed: int) -> None:
    """Give every parameter random values, so that no classifier equals another and no bias is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for client in clients:
            for parameter in client.model.parameters():
                parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def gradients(clients: Sequence[Client]) -> list[dict[str, Tensor]]:
    """Return the gradients of the clients' last step; zero for a parameter that took no part."""
    return [
        {key: torch.zeros_like(value) if value.grad is None else value.grad for key, value in own}
        for own in (client.model.named_parameters() for client in clients)
    ]


def assert_same(
    got: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]], scale: float = 1
) -> None:
    """Assert that two lists of named tensors agree to 1e-9 of their largest value, per tensor."""
    assert len(got) == len(expected)
    for m, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert list(mine) == list(theirs)
        for key in mine:
            error = (mine[key] - scale * theirs[key]).abs().max().item()
            assert error <= 1e-9 * max(1e-4, theirs[key].abs().max().item()), f"client {m}, {key}: off by {error}"


def identical(got: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]]) -> bool:
    """Tell whether two lists of named tensors agree bit for bit."""
    return all(
        list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)
        for mine, theirs in zip(got, expected, strict=True)
    )
