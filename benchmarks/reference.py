"""Two plain implementations of a round for comparison: one with dense matrices and Python lists, one with PyG layers.

The first implementation follows the authors' program. It draws neighbours with Python lists and sets, applies a mask
over all edges, and finds positions with `list.index` (in our variant, with a dict). Its adjacency A + 2I is dense,
induced on the sampled set and normalised within it. It uses dense features and SGD. The network is our gcnii, so it
computes the same products as our round. The second implementation runs PyG layers on our blocks.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCN2Conv

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.model.sparse import SparseRows
from glasu.protocol.learner import Batch

Nodes = list[int]
Places = Callable[[Nodes], Callable[[int], int]]  # nodes -> function that returns the position of a node


def by_list(nodes: Nodes) -> Callable[[int], int]:
    """Find positions by searching the list, as the authors do."""
    return nodes.index


def by_dict(nodes: Nodes) -> Callable[[int], int]:
    """Find positions with a dictionary."""
    return {node: place for place, node in enumerate(nodes)}.__getitem__


class PlainNetwork(nn.Module):
    """Compute a layer of gcnii from its equation: H <- ReLU(((1 - a) A H + a H0) ((1 - b) I + b W))."""

    def __init__(self, config: RunConfig, num_features: int, num_classes: int) -> None:
        super().__init__()
        model = config.model
        self.alpha, self.dropout = model.alpha, nn.Dropout(model.dropout)
        self.betas = [math.log(model.theta / (layer + 1) + 1) for layer in range(model.num_layers)]
        self.encoder = nn.Linear(num_features, model.hidden)
        self.layers = nn.ModuleList(nn.Linear(model.hidden, model.hidden, bias=False) for _ in self.betas)
        self.classifier = nn.Linear(model.hidden, num_classes)

    def encode(self, features: Tensor) -> Tensor:
        """Return H0."""
        return self.encoder(self.dropout(features)).relu()  # type: ignore[no-any-return]

    def layer(self, layer: int, hidden: Tensor, initial: Tensor, adjacency: Tensor) -> Tensor:
        """Return the output for the rows of the adjacency. `initial` contains the same rows."""
        beta = self.betas[layer]
        support = (1 - self.alpha) * (adjacency @ self.dropout(hidden)) + self.alpha * initial
        return ((1 - beta) * support + beta * self.layers[layer](support)).relu()  # type: ignore[no-any-return]


def induced_block(edges: np.ndarray, num_nodes: int, nodes: Nodes, targets: Nodes, places: Places = by_list) -> Tensor:
    """Return the rows of `targets` of D^-1/2 (A + 2I) D^-1/2, computed on the graph induced on `nodes`."""
    inside = np.zeros(num_nodes, bool)
    inside[nodes] = True
    kept = edges[:, inside[edges[0]] & inside[edges[1]]]
    dense, place = 2 * np.eye(len(nodes), dtype=np.float32), places(nodes)
    for source, target in kept.T.tolist():
        dense[place(target), place(source)] = 1
    root = dense.sum(axis=1) ** -0.5
    normalized = root[:, None] * dense * root[None, :]
    return torch.from_numpy(normalized[[place(node) for node in targets]])


@dataclass(eq=False)
class PlainClient:
    """One client, with its data as arrays and lists."""

    config: RunConfig
    party: PartyData
    generator: random.Random
    places: Places
    features: Tensor = field(init=False)
    edges: np.ndarray = field(init=False)  # two rows: source and target
    neighbors: list[Nodes] = field(init=False)
    network: PlainNetwork = field(init=False)

    def __post_init__(self) -> None:
        party = self.party
        dense = party.features if isinstance(party.features, np.ndarray) else party.features.toarray()
        self.features, self.edges = torch.from_numpy(dense), party.graph.edge_index()
        pairs = zip(party.graph.indptr[:-1], party.graph.indptr[1:], strict=True)
        self.neighbors = [party.graph.indices[start:stop].tolist() for start, stop in pairs]
        self.network = PlainNetwork(self.config, party.num_features, len(party.classes))
        self.optimizer = torch.optim.SGD(self.network.parameters(), self.config.train.learning_rate)

    def draw(self, targets: Nodes) -> Nodes:
        """Draw neighbours for one node after the other."""
        fanout, found = self.config.train.fanout, set(targets)
        for node in targets:
            around = self.neighbors[node]
            found.update(around if len(around) <= fanout else self.generator.sample(around, fanout))
        return sorted(found)

    def adjacency(self, nodes: Nodes, targets: Nodes) -> Tensor:
        """Return the dense block of one layer."""
        return induced_block(self.edges, len(self.neighbors), nodes, targets, self.places)


@dataclass(eq=False)
class PlainBatch:
    """The inputs of one client in a round."""

    features: Tensor
    adjacencies: list[Tensor]
    initial_rows: list[Tensor]


class PlainRounds:
    """Plain rounds of all clients in one process."""

    def __init__(self, config: RunConfig, parties: Sequence[PartyData], places: Places = by_list) -> None:
        self.config, self.generator, self.places = config, random.Random(0), places
        self.clients = [PlainClient(config, party, self.generator, places) for party in parties]
        self.aggregates = set(config.model.aggregation_layers)
        assert parties[0].splits is not None
        assert parties[0].labels is not None
        self.training, self.labels = parties[0].splits.train.tolist(), torch.from_numpy(parties[0].labels)

    def sample(self) -> list[list[Nodes]]:
        """Draw S_m[0..L] of each client. If layer l-1 aggregates, S[l] is the union over the clients."""
        batch = sorted(self.generator.sample(self.training, int(self.config.train.batch_size)))
        sets = [[batch] for _ in self.clients]
        for layer in reversed(range(self.config.model.num_layers)):
            drawn = [client.draw(own[0]) for client, own in zip(self.clients, sets, strict=True)]
            if layer - 1 in self.aggregates:
                drawn = [sorted(set().union(*drawn))] * len(drawn)
            for own, nodes in zip(sets, drawn, strict=True):
                own.insert(0, nodes)
        return sets

    def batches(self, sets: list[list[Nodes]]) -> list[PlainBatch]:
        """Build the dense blocks between the node sets."""
        found = []
        for client, own in zip(self.clients, sets, strict=True):
            place = self.places(own[0])
            rows = [torch.tensor([place(node) for node in nodes]) for nodes in own[1:]]
            adjacencies = [client.adjacency(nodes, targets) for nodes, targets in itertools.pairwise(own)]
            found.append(PlainBatch(client.features[own[0]], adjacencies, rows))
        return found

    def round(self) -> None:
        """Sample, infer jointly and update: one step with backward = "joint", otherwise Q local steps."""
        sets = self.sample()
        batches, labels = self.batches(sets), self.labels[sets[0][-1]]
        if self.config.train.backward == "joint":
            self._joint_step(batches, labels)
            return
        with torch.no_grad():
            others = self._others(batches)
        for _ in range(self.config.train.num_local_steps):
            for client, batch, fixed in zip(self.clients, batches, others, strict=True):
                self._local_step(client, batch, fixed, labels)

    def _layer(self, client: PlainClient, batch: PlainBatch, layer: int, hidden: Tensor, initial: Tensor) -> Tensor:
        return client.network.layer(layer, hidden, initial[batch.initial_rows[layer]], batch.adjacencies[layer])

    def _joint_step(self, batches: list[PlainBatch], labels: Tensor) -> None:
        initial = [each.network.encode(batch.features) for each, batch in zip(self.clients, batches, strict=True)]
        hidden = list(initial)
        for layer in range(self.config.model.num_layers):
            together = zip(self.clients, batches, hidden, initial, strict=True)
            hidden = [self._layer(client, batch, layer, own, first) for client, batch, own, first in together]
            if layer in self.aggregates:
                hidden = [torch.stack(hidden).mean(0)] * len(hidden)
        pairs = zip(self.clients, hidden, strict=True)
        losses = [nn.functional.cross_entropy(each.network.classifier(own), labels) for each, own in pairs]
        for client in self.clients:
            client.optimizer.zero_grad()
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        for client in self.clients:
            client.optimizer.step()

    def _others(self, batches: list[PlainBatch]) -> list[dict[int, Tensor]]:
        """Infer jointly; for each client and aggregation layer, return the contribution of the other clients."""
        initial = [each.network.encode(batch.features) for each, batch in zip(self.clients, batches, strict=True)]
        hidden, others = list(initial), [dict[int, Tensor]() for _ in self.clients]
        for layer in range(self.config.model.num_layers):
            together = zip(self.clients, batches, hidden, initial, strict=True)
            hidden = [self._layer(client, batch, layer, own, first) for client, batch, own, first in together]
            if layer in self.aggregates:
                joint = torch.stack(hidden).mean(0)
                for fixed, own in zip(others, hidden, strict=True):
                    fixed[layer] = joint - own / len(hidden)
                hidden = [joint] * len(hidden)
        return others

    def _local_step(self, client: PlainClient, batch: PlainBatch, others: dict[int, Tensor], labels: Tensor) -> None:
        hidden = initial = client.network.encode(batch.features)
        for layer in range(self.config.model.num_layers):
            hidden = self._layer(client, batch, layer, hidden, initial)
            if layer in others:
                hidden = others[layer] + hidden / len(self.clients)
        loss = nn.functional.cross_entropy(client.network.classifier(hidden), labels)
        client.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        client.optimizer.step()


class PyGPasses(nn.Module):
    """The forward and backward passes of one client's round, with PyG's own layers on our blocks.

    GCN2Conv receives the blocks as torch CSR matrices, which is faster than edge lists. Features are dense, as in
    `Data.x`. Sampling, messages and the optimiser are not included.
    """

    def __init__(self, config: RunConfig, num_features: int, num_classes: int) -> None:
        super().__init__()
        model, self.steps = config.model, config.train.num_local_steps
        self.dropout = nn.Dropout(model.dropout)
        self.encoder = nn.Linear(num_features, model.hidden)
        self.layers = nn.ModuleList(
            GCN2Conv(model.hidden, model.alpha, model.theta, layer + 1, normalize=False)
            for layer in range(model.num_layers)
        )
        self.classifier = nn.Linear(model.hidden, num_classes)

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
        """Return the inputs of `passes`: dense features, CSR blocks, rows of H0, labels."""
        dense = batch.features if isinstance(batch.features, Tensor) else torch.from_numpy(batch.features.toarray())
        rows = [torch.from_numpy(each) for each in batch.initial_rows]
        assert batch.labels is not None
        return dense, [csr(block.matrix) for block in batch.blocks], rows, batch.labels

    def passes(self, features: Tensor, blocks: list[Tensor], initial_rows: list[Tensor], labels: Tensor) -> None:
        """Compute one forward and backward pass per local step."""
        for _ in range(self.steps):
            hidden = initial = self.encoder(self.dropout(features)).relu()
            for layer, block, rows in zip(self.layers, blocks, initial_rows, strict=True):
                hidden = layer(self.dropout(hidden), initial[rows], block).relu()
            loss = nn.functional.cross_entropy(self.classifier(self.dropout(hidden)), labels)
            self.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]


def csr(matrix: SparseRows) -> Tensor:
    """Convert our sparse matrix to a torch CSR tensor."""
    indptr, indices, data = (
        torch.from_numpy(np.asarray(part)) for part in (matrix.indptr, matrix.indices, matrix.data)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")  # torch warns that its CSR support is in beta
        return torch.sparse_csr_tensor(indptr, indices, data, size=matrix.shape)
