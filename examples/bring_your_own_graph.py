"""Divide a PyG graph among three parties, train with GLASU, and compare the result with each party trained alone."""

import torch
from torch_geometric.data import Data
from torch_geometric.transforms import RandomNodeSplit
from torch_geometric.utils import stochastic_blockmodel_graph

import glasu


def graph() -> Data:
    """Return a graph with three communities of 100 nodes each. To use your own graph, return its `Data` instead."""
    torch.manual_seed(0)
    labels = torch.arange(3).repeat_interleave(100)
    edges = stochastic_blockmodel_graph([100, 100, 100], torch.full((3, 3), 0.01) + 0.05 * torch.eye(3))
    features = torch.randn(300, 30) + 0.5 * torch.nn.functional.one_hot(labels, 3).repeat_interleave(10, dim=1)
    data: Data = RandomNodeSplit(num_val=0.3, num_test=0.4)(Data(x=features, edge_index=edges, y=labels))
    return data


def main() -> None:
    parties = glasu.split_vertically(graph(), num_clients=3, edge_fraction=0.8, seed=0)
    for method in ("glasu", "standalone"):
        config = glasu.RunConfig(
            model=glasu.ModelConfig(num_layers=2, aggregation_layers=(0, 1), hidden=16),
            train=glasu.TrainConfig(preset="none", method=method, num_rounds=30),
        )
        report = glasu.train(parties, config)
        print(report.summary())


if __name__ == "__main__":
    main()
