"""How accurate are a GCN and a GCNII that see all data and are written with PyG only?

These models are the baseline for `centralized`. They use the same splits, all features and all edges. Every step uses
the whole graph, and the epoch is selected on validation nodes. If the relations of a data set are parties, the script
also measures each party alone and a linear probe. The probe is a logistic regression on A_hat^2 X, once for each party
and once for the concatenated columns of all parties. The relations of DBLP have millions of edges among 4,057 nodes.
For these relations A_hat is a dense matrix, which computes the same function as PyG's layers but is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch_geometric.data import Data
from torch_geometric.nn import GCN2Conv, GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import to_dense_adj

from glasu.config import DataConfig, RunConfig, TrainConfig
from glasu.data.party import PartyData, Splits
from glasu.data.sources.catalog import load_parties
from tables import markdown, place, show

RELATIONS = {"dblp_authors": ("APA", "APCPA", "APTPA"), "imdb_movies": ("MAM", "MDM", "MYM")}
DATASETS = ("cora", "citeseer", "pubmed", *RELATIONS)
HIDDEN, EPOCHS, DROPOUT, RATE, DECAY = 64, 200, 0.5, 0.01, 5e-4
LAYERS, ALPHA, THETA, LAYER_DECAY = 4, 0.1, 0.5, 0.01  # settings of GCNII; PyG's example has the same weight decay
DENSE_FROM = 100  # with this many edges per node, a product with the dense adjacency is faster
STRENGTHS = (1e-3, 1e-2, 0.1, 1.0, 10.0)  # values of the linear probe's C; validation nodes select one


class Dense(nn.Module):
    """Propagate with A_hat as a dense matrix. Computes the same as GCNConv, or GCN2Conv with shared weights."""

    def __init__(self, layer: nn.Module, A_hat: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.A_hat = A_hat

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        layer: Any = self.layer
        out: Tensor
        if isinstance(layer, GCNConv):
            out = self.A_hat @ layer.lin(x) + layer.bias
        else:
            support = (1 - layer.alpha) * (self.A_hat @ x) + layer.alpha * rest[0]  # rest[0] is H^0
            out = (1 - layer.beta) * support + layer.beta * support @ layer.weight1
        return out


class GCN(nn.Module):
    """Two layers, as in Kipf and Welling."""

    def __init__(self, data: Data, num_classes: int) -> None:
        super().__init__()
        widths = pairwise((data.num_features, HIDDEN, num_classes))
        self.layers = nn.ModuleList(_replace_if_dense(GCNConv(*pair, cached=True), data) for pair in widths)

    def forward(self, data: Data) -> Tensor:
        first, second = self.layers
        hidden: Tensor = first(_input(data, self.training), data.edge_index).relu()
        out: Tensor = second(dropout(hidden, DROPOUT, self.training), data.edge_index)
        return out

    def parts(self) -> list[tuple[nn.Module, float]]:
        """Return modules and their weight decay."""
        return [(self.layers, DECAY)]


class GCNII(nn.Module):
    """Four GCNII layers between two linear layers, as in Chen et al."""

    def __init__(self, data: Data, num_classes: int) -> None:
        super().__init__()
        self.encoder, self.classifier = nn.Linear(data.num_features, HIDDEN), nn.Linear(HIDDEN, num_classes)
        self.layers = nn.ModuleList(
            _replace_if_dense(GCN2Conv(HIDDEN, ALPHA, THETA, layer=layer + 1, cached=True), data)
            for layer in range(LAYERS)
        )

    def forward(self, data: Data) -> Tensor:
        initial = hidden = self.encoder(_input(data, self.training)).relu()
        for layer in self.layers:
            hidden = layer(dropout(hidden, DROPOUT, self.training), initial, data.edge_index).relu()
        out: Tensor = self.classifier(dropout(hidden, DROPOUT, self.training))
        return out

    def parts(self) -> list[tuple[nn.Module, float]]:
        """Return modules and their weight decay."""
        return [(self.encoder, DECAY), (self.layers, LAYER_DECAY), (self.classifier, DECAY)]


def _input(data: Data, training: bool) -> Tensor:
    """Return X, with dropout in training. Only nonzero values are dropped out, which is much faster."""
    features: Tensor = data.x
    if training:
        features = torch.zeros_like(data.x)
        features.view(-1)[data.places] = dropout(data.x.view(-1)[data.places], DROPOUT)
    return features


def _replace_if_dense(layer: nn.Module, data: Data) -> nn.Module:
    """Return PyG's layer, or, if the graph is dense, the same function with a dense matrix."""
    return layer if "A_hat" not in data else Dense(layer, data.A_hat)


MODELS: dict[str, type[GCN] | type[GCNII]] = {"GCN": GCN, "GCNII": GCNII}


class Accuracy(NamedTuple):
    """Accuracies of the selected model, in per cent."""

    validation: float
    test: float


def as_pyg(party: PartyData) -> Data:
    """Return the data as PyG users have it: row-normalised features, both directions of each edge."""
    features: Any = party.features
    data = Data(
        x=torch.as_tensor(features.toarray() if sp.issparse(features) else features, dtype=torch.float32),
        edge_index=torch.from_numpy(party.graph.edge_index()),
        y=torch.from_numpy(party.labels),
    )
    data = NormalizeFeatures()(data)
    data.places = data.x.view(-1).nonzero().view(-1)  # positions of the nonzero values
    if party.graph.num_edges > DENSE_FROM * party.num_nodes:
        edges, weights = gcn_norm(data.edge_index, num_nodes=party.num_nodes)
        data.A_hat = to_dense_adj(edges, edge_attr=weights, max_num_nodes=party.num_nodes)[0]
    return data


def train(kind: type[GCN] | type[GCNII], data: Data, splits: Splits, seed: int) -> Accuracy:
    """Train for all epochs and return the accuracy of the epoch that is best on validation; if tied, the first."""
    torch.manual_seed(seed)
    model = kind(data, int(data.y.max()) + 1)
    groups = [{"params": part.parameters(), "weight_decay": decay} for part, decay in model.parts()]
    optimizer = torch.optim.Adam(groups, lr=RATE)
    nodes = torch.from_numpy(splits.train)

    def epochs() -> Iterator[NDArray[np.int64]]:
        for _ in range(EPOCHS):
            model.train()
            optimizer.zero_grad()
            cross_entropy(model(data)[nodes], data.y[nodes]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            model.eval()
            with torch.no_grad():
                yield model(data).argmax(dim=1).numpy()

    return best_of(epochs(), data.y.numpy(), splits)


def probe(columns: NDArray[np.float32], labels: NDArray[np.int64], splits: Splits) -> Accuracy:
    """Fit logistic regressions of several strengths and return the accuracy of the one that is best on validation."""
    columns = StandardScaler().fit_transform(columns)
    fits = (LogisticRegression(C=strength, max_iter=2000) for strength in STRENGTHS)
    predictions = (fit.fit(columns[splits.train], labels[splits.train]).predict(columns) for fit in fits)
    return best_of(predictions, labels, splits)


def best_of(predictions: Iterator[NDArray[np.int64]], labels: NDArray[np.int64], splits: Splits) -> Accuracy:
    """Select the prediction that is best on validation (if tied, the first). Only then read the test labels."""

    def right(predicted: NDArray[np.int64], nodes: NDArray[np.int64]) -> float:
        return 100 * float((predicted[nodes] == labels[nodes]).mean())

    chosen = max(predictions, key=lambda predicted: right(predicted, splits.validation))
    return Accuracy(right(chosen, splits.validation), right(chosen, splits.test))


def smooth_features(data: Data) -> NDArray[np.float32]:
    """Return A_hat^2 X."""
    if "A_hat" in data:
        return np.asarray((data.A_hat @ (data.A_hat @ data.x)).numpy())
    (source, target), weights = gcn_norm(data.edge_index, num_nodes=data.num_nodes)
    A_hat = sp.csr_array((weights.numpy(), (target.numpy(), source.numpy())), shape=(data.num_nodes, data.num_nodes))
    return np.asarray(A_hat @ (A_hat @ data.x.numpy()))


def measure(name: str, seed: int, models: list[str]) -> Iterator[tuple[str, str, Accuracy]]:
    """Yield (view of the data, model, accuracy) for one split of a data set."""
    config = RunConfig(data=DataConfig(name=name), train=TrainConfig(seed=seed))
    (everything,) = load_parties(config.replace(train={"method": "centralized"}))
    splits = everything.splits
    assert splits is not None
    views = {"all": everything}
    if name in RELATIONS:
        views = {**dict(zip(RELATIONS[name], load_parties(config), strict=True)), **views}
    columns = []
    for view, party in views.items():
        data = as_pyg(party)
        for model in models:
            if model in MODELS:
                yield view, model, train(MODELS[model], data, splits, seed)
        if "probe" in models and name in RELATIONS:
            columns.append(smooth_features(data))
            yield view, "probe", probe(columns[-1], data.y.numpy(), splits)
    if columns:
        yield "each, joined", "probe", probe(np.hstack(columns[:-1]), data.y.numpy(), splits)


def main() -> None:
    """Print one row per data set, view and model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=DATASETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
    parser.add_argument("--models", nargs="+", choices=[*MODELS, "probe"], default=[*MODELS, "probe"])
    parser.add_argument("--out", type=place, help="also write the table to this Markdown file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in args.datasets:
        found: dict[tuple[str, str], list[Accuracy]] = {}
        for seed in args.seeds:
            for view, model, accuracy in measure(name, seed, args.models):
                found.setdefault((view, model), []).append(accuracy)
                print(f"{name} seed {seed} {view} {model}: {accuracy}", file=sys.stderr, flush=True)
        for (view, model), each in found.items():
            tests = [one.test for one in each]
            rows.append(
                [
                    name,
                    view,
                    model,
                    f"{statistics.mean(tests):.1f}",
                    f"{statistics.stdev(tests):.1f}" if len(tests) > 1 else "-",
                    " / ".join(f"{test:.1f}" for test in tests),
                    f"{statistics.mean(one.validation for one in each):.1f}",
                ]
            )
    header = ["data set", "seen", "model", "test %", "deviation", "each seed", "validation %"]
    text = f"seeds {', '.join(map(str, args.seeds))}; hidden {HIDDEN}, {EPOCHS} epochs, Adam {RATE}, decay {DECAY}\n"
    text += f"(layers of GCNII {LAYER_DECAY}), dropout {DROPOUT}, row-normalised features; "
    text += f"A_hat is a dense matrix above {DENSE_FROM} edges per node\n\n"
    text += markdown(header, rows)
    show(text, args.out)


if __name__ == "__main__":
    main()
