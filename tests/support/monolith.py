"""The whole network as ONE dense model in plain torch, to hold the split network to; and tiny runs to compare with.

Nothing in `Monolith` comes from glasu.model: adjacencies are dense matrices, layers are formulas, and autograd sees
all clients at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glasu.config import RunConfig
from glasu.data.party import Graph, PartyData
from glasu.model.sampler import Sample
from glasu.protocol.client import Client
from glasu.protocol.messages import Message
from glasu.protocol.requests import Evaluating, Event, RoundDone, Save, Script
from glasu.protocol.server import Server
from glasu.protocol.training import client_script, server_script
from glasu.runtime.inprocess import ScriptRun, open_client_map, run_together
from glasu.runtime.simulation import make_clients, make_server
from glasu.runtime.telemetry import TrafficCounter
from glasu.timing import Stopwatch
from support.deliveries import apply_to_messages
from support.tiny import NUM_CLASSES, settings, tiny_parties

__all__ = ["NUM_CLASSES", "settings", "tiny_parties"]  # re-exported for the tests that compare with the monolith

torch.set_num_threads(1)  # the matrices here are tiny, and threads would only wait for each other
Weights = dict[str, Tensor]
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
        y = labelled.labels[labelled.splits.train]
        unknown = np.isnan(y) if config.train.task == "regression" else y < 0
        self.train_nodes = torch.from_numpy(labelled.splits.train[~unknown.reshape(len(y), -1).any(axis=1)])

    def start(self, m: int) -> tuple[Tensor, Tensor | None]:
        """Return H_m[0] and, for gcnii, H_m^0."""
        if self.model.backbone != "gcnii":
            return self.X[m], None
        initial = torch.relu(self.X[m] @ self.weights[m]["encoder.weight"] + self.weights[m]["encoder.bias"])
        return initial, initial

    def _normalize(self, m: int, layer: int, H: Tensor) -> Tensor:
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
        A, H = self.A[m], self._normalize(m, layer, H)
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
        H = self._normalize(m, self.model.num_layers, H)
        for layer in range(self.model.owner_layers):
            H = torch.relu(H @ self.weights[m][f"head.{layer}.weight"] + self.weights[m][f"head.{layer}.bias"])
        return H @ self.weights[m]["classifier.weight"] + self.weights[m]["classifier.bias"]

    def loss(self, m: int, H: Tensor) -> Tensor:
        """Return L_m of the training nodes, given H_m[L] at them."""
        logits, y = self.logits(m, H), self.y[self.train_nodes]
        if self.config.train.task == "multilabel":
            p = logits.sigmoid()
            return -torch.where(y == 1, p, 1 - p).log().mean()
        if self.config.train.task == "regression":
            return ((logits[:, 0] - (y - y.mean()) / y.std(correction=0)) ** 2).mean()
        if self.config.train.task == "binary":
            positive = y.double().mean()
            balanced = torch.where(y == 1, 0.5 / positive, 0.5 / (1 - positive))
            weights = balanced if self.config.train.class_weights == "balanced" else torch.ones_like(balanced)
            return -(weights * torch.nn.functional.logsigmoid(torch.where(y == 1, 1, -1) * logits[:, 0])).mean()
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


@dataclass(frozen=True)
class Run:
    """A finished run: its roles, its cost and the server's events."""

    clients: list[Client]
    server: Server
    meter: TrafficCounter
    events: list[Event]  # the server's, and the progress of evaluations at clients
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
    arrange: Callable[[list[Client]], None] | None = None,
    carry: Callable[[Message], Message] | None = None,
) -> Run:
    """Run all roles to the end in this process.

    Args:
        config: the settings, resolved.
        parties: the parties' data.
        scatter: a seed; all initial weights, biases and norms become random.
        arrange: may change the clients before the first round.
        carry: replaces every message, in both directions.
    """
    clients = make_clients(config, parties, lambda: 0.0)
    if scatter is not None:
        scatter_weights(clients, scatter)
    if arrange is not None:
        arrange(clients)
    server, events = make_server(config, clients), []
    initial = [client.learner.weights() for client in clients]
    after_round: list[list[Weights]] = [[] for _ in clients]

    def see(client: Client, action: Save | Event) -> None:
        if isinstance(action, RoundDone):
            after_round[client.identity.index].append(client.learner.weights())
        elif isinstance(action, Evaluating):
            events.append(action)

    meter = TrafficCounter()
    with open_client_map():
        run_roles(clients, server, see, events.append, meter=meter, carry=carry)
    return Run(clients, server, meter, [event for event in events if not isinstance(event, Save)], initial, after_round)


def run_roles(
    clients: Sequence[Client],
    server: Server,
    see: Callable[[Client, Save | Event], None] = lambda client, action: None,
    see_server: Callable[[Save | Event], None] | None = None,
    *,
    meter: TrafficCounter | None = None,
    watch: Stopwatch | None = None,
    carry: Callable[[Message], Message] | None = None,
) -> None:
    """Run the training scripts of existing roles; `see` and `see_server` get their saves and events."""
    running = [ScriptRun(client.name, client_script(client), client.watch, partial(see, client)) for client in clients]
    serving = ScriptRun("server", server_script(server), watch or Stopwatch(lambda: 0.0), see_server, "communication")
    run_together(serving, running, meter or TrafficCounter(), delivery=apply_to_messages(carry))


def run_scripts(
    server: Script[Any],
    clients: Sequence[Script[Any]],
    *,
    meter: TrafficCounter | None = None,
    carry: Callable[[Message], Message] | None = None,
) -> list[Any]:
    """Run scripts against each other without saves and events; return the clients' results."""
    watch = Stopwatch(lambda: 0.0)
    running = [ScriptRun(chr(ord("a") + index), script, watch) for index, script in enumerate(clients)]
    run_together(
        ScriptRun("server", server, watch), running, meter or TrafficCounter(), delivery=apply_to_messages(carry)
    )
    return [client.result for client in running]


def keep_samples(samples: Sequence[list[Sample]]) -> Callable[[list[Client]], None]:
    """Return an `arrange` for `run` that adds every sample of client m to samples[m], in the order of the rounds."""

    def arrange(clients: list[Client]) -> None:
        for client, kept in zip(clients, samples, strict=True):
            client.learner.gather = partial(_keep_sample, client.learner.gather, kept)

    return arrange


def _keep_sample(gather: Callable[..., Any], kept: list[Sample], sample: Sample, **keys: Any) -> Any:
    if not any(sample is other for other in kept):  # a sample may be gathered early, and then again
        kept.append(sample)
    return gather(sample, **keys)


def scatter_weights(clients: Sequence[Client], seed: int) -> None:
    """Give every parameter random values, so that no classifier equals another and no bias is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for client in clients:
            for parameter in client.learner.model.parameters():
                parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def gradients(clients: Sequence[Client]) -> list[dict[str, Tensor]]:
    """Return the gradients of the clients' last step; zero for a parameter that took no part."""
    return [
        {key: torch.zeros_like(value) if value.grad is None else value.grad for key, value in own}
        for own in (client.learner.model.named_parameters() for client in clients)
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
    """Return whether two lists of named tensors agree bit for bit."""
    return all(
        list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)
        for mine, theirs in zip(got, expected, strict=True)
    )
