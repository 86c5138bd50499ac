"""How should averaged predictions be propagated: which normalisation, how many steps, with or without clamped labels?

The parties train alone with the settings of `standalone`. Then all variants propagate the same averaged class
probabilities with scipy. Each party that has edges chooses alpha on its validation nodes, as in
`glasu.protocol.combination`. The table shows validation accuracies, because they decided which variant GLASU uses. In
the partition `apart`, one party has all features and no edges, and another party has all edges and one constant
feature.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from glasu.config import RunConfig
from glasu.data.graph import Graph
from glasu.data.partition import pool_parties
from glasu.data.party import PartyData
from glasu.data.sources.catalog import load_parties
from glasu.experiments.plan import read_settings
from glasu.model.propagation import ALPHAS
from glasu.runtime.simulation import simulate
from glasu.runtime.trained_model import TrainedModel
from tables import markdown, place, positive, show

VARIANTS = {  # name -> normalisation, steps, whether training labels are clamped
    "random walk, 10 steps": ("walk", 10, False),
    "random walk, 20 steps": ("walk", 20, False),
    "symmetric, 10 steps": ("symmetric", 10, False),
    "random walk, 10 steps, clamped": ("walk", 10, True),
    "symmetric, 10 steps, clamped": ("symmetric", 10, True),
}
Scores = NDArray[Any]


def load_apart(config: RunConfig) -> list[PartyData]:
    """Return two parties: one has all features and no edges, the other has all edges and no features."""
    whole = pool_parties(load_parties(config))
    nowhere = np.empty(0, np.int64)
    empty, constant = Graph.from_edges(nowhere, nowhere, whole.num_nodes), np.ones((whole.num_nodes, 1), np.float32)
    edges = replace(whole, name="b", features=constant, feature_names=(), checked=None)
    return [replace(whole, name="a", graph=empty, checked=None), edges]


def make_operator(graph: Graph, normalization: str) -> Any:
    """Return the normalised adjacency with self loops."""
    weights = np.ones(graph.num_edges) if graph.weights is None else graph.weights
    adjacency = sp.csr_array((weights, graph.indices, graph.indptr), (graph.num_nodes,) * 2) + sp.eye_array(
        graph.num_nodes
    )
    degree = adjacency.sum(axis=1)
    if normalization == "walk":
        return sp.diags_array(1 / degree) @ adjacency
    return sp.diags_array(degree**-0.5) @ adjacency @ sp.diags_array(degree**-0.5)


def score_variant(parties: list[PartyData], mean: Scores, normalization: str, steps: int, *, clamped: bool) -> float:
    """Return the validation accuracy of the propagated probabilities, averaged over the parties that have edges."""
    labels, splits = parties[0].labels, parties[0].splits
    assert labels is not None
    assert splits is not None
    one_hot = np.eye(mean.shape[1])[labels[splits.train]]

    def accuracy(scores: Scores) -> float:
        return float((scores[splits.validation].argmax(axis=1) == labels[splits.validation]).mean())

    chosen = []
    for party in parties:
        if not party.graph.num_edges:
            continue
        operator, candidates = make_operator(party.graph, normalization), []
        for alpha in ALPHAS:
            spread = mean
            for _ in range(steps if alpha < 1 else 0):
                spread = alpha * mean + (1 - alpha) * (operator @ spread)
                if clamped:
                    spread[splits.train] = one_hot
            candidates.append(spread)
        chosen.append(max(candidates, key=accuracy))
    return accuracy(np.mean(chosen, axis=0))


def measure(dataset: str, seed: int, *, apart: bool) -> dict[str, float]:
    """Train the parties alone; return the validation accuracies of their average and of every variant, in per cent."""
    config = read_settings(dataset, "standalone").replace(train={"seed": seed})
    parties = load_apart(config) if apart else load_parties(config)
    model = TrainedModel.of(simulate(parties, config.replace(data={"num_clients": len(parties)})).clients)
    own = [model.predict_proba(parties, party=party.name).astype(np.float64) for party in parties]
    mean: Scores = np.stack(own).mean(axis=0)
    found = {"ensemble": score_variant(parties, mean, "walk", 0, clamped=False)}
    for name, (normalization, steps, clamped) in VARIANTS.items():
        found[name] = score_variant(parties, mean, normalization, steps, clamped=clamped)
    return {name: 100 * value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", default="cora,citeseer,pubmed")
    parser.add_argument("--seeds", type=positive, default=2, help="seeds 0..N-1")
    parser.add_argument("--out", type=place, help="also write the table to this file")
    args = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    for dataset in args.datasets.split(","):
        for apart in (False, True):
            name = f"{dataset}, {'apart' if apart else 'features'}"
            runs = [measure(dataset, seed, apart=apart) for seed in range(args.seeds)]
            columns[name] = {row: statistics.fmean(run[row] for run in runs) for row in runs[0]}
            print(f"{name}: {columns[name]}", file=sys.stderr, flush=True)
    rows = [[row, *(f"{column[row]:.1f}" for column in columns.values())] for row in next(iter(columns.values()))]
    show(markdown(["validation accuracy", *columns], rows), args.out)


if __name__ == "__main__":
    main()
