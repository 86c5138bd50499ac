"""Backbones: their declared properties, and refused settings."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv, GCNConv, SAGEConv, Sequential

from glasu.config import ModelConfig, RunConfig, TrainConfig
from glasu.data.party import Graph
from glasu.errors import ConfigError
from glasu.model.backbones import BACKBONES
from glasu.model.layers import ConvolutionLayer
from glasu.model.sampler import Sampler, find_sampler
from glasu.model.split import ClientModel
from glasu.randomness import Stream
from support.convolutions import register_convolution


def model_of(name: str) -> ClientModel:
    return ClientModel(
        ModelConfig(backbone=name, hidden=8, num_layers=2, aggregation_layers=(1,)),
        num_clients=2,
        num_features=5,
        num_outputs=3,
        stream=lambda purpose, layer: Stream(0, purpose, layer=layer),
    )


@pytest.mark.parametrize("name", BACKBONES)
def test_a_model_has_an_encoder_exactly_if_its_backbone_requires_one(name):
    model = model_of(name)
    assert type(model.backbone) is BACKBONES[name]
    assert (model.encoder is not None) == BACKBONES[name].has_encoder


@pytest.mark.parametrize("name", BACKBONES)
def test_a_layer_has_the_width_that_the_config_asks_for(name):
    config = ModelConfig(backbone=name, hidden=8)
    widths = {tuple(weight.shape) for weight in BACKBONES[name](config).build_layer(0, 8).parameters()}
    assert any(8 in shape for shape in widths)


def test_the_activation_is_a_property_of_the_backbone():
    values = torch.tensor([-1.0, 0.0, 2.0])
    torch.testing.assert_close(model_of("gcn").activation(values), values.relu())
    torch.testing.assert_close(model_of("gat").activation(values), nn.functional.elu(values))


def test_attention_heads_must_divide_the_width_for_gat_only():
    with pytest.raises(ConfigError, match=r"model.heads=3: must divide model.hidden=64"):
        ModelConfig(backbone="gat", heads=3)
    assert ModelConfig(backbone="gcn", heads=3).heads == 3


@pytest.mark.parametrize(
    "wrong",
    [
        GATv2Conv(5, 6),
        GCNConv(5, 6),
        nn.Sequential(nn.Linear(5, 5), GATv2Conv(5, 6)),
        Sequential("x, edges", [(GCNConv(5, 6), "x, edges -> x")]),
    ],
    ids=["GATv2Conv", "GCNConv", "inside a module", "inside PyG's Sequential"],
)
def test_a_convolution_that_adds_self_loops_is_refused_with_the_remedy(wrong):
    with pytest.raises(ConfigError, match=r"add_self_loops=True.* Pass add_self_loops=False"):
        ConvolutionLayer(wrong, 6)


def test_convolutions_without_self_loops_of_their_own_are_accepted():
    for good in (GATv2Conv(5, 6, add_self_loops=False), SAGEConv(5, 6), GCNConv(5, 6, normalize=False)):
        ConvolutionLayer(good, 6)


def sampler_with(weights: np.ndarray | None, backbone: str) -> Sampler:
    graph = Graph.from_edges(np.array([0, 1, 2]), np.array([1, 2, 0]), 3, weights)
    config = RunConfig(model=ModelConfig(backbone=backbone), train=TrainConfig(sampler="neighbor", batch_size=1))
    return find_sampler(config.train)(config, graph, 4, config.train.seed)


@pytest.mark.parametrize(
    ("weights", "backbone", "warned"),
    [
        (np.array([1.0, 2.0, 1.0]), "gat", True),
        (np.ones(3), "gat", False),
        (None, "gat", False),
        (np.array([1.0, 2.0, 1.0]), "gcn", False),
    ],
)
def test_a_backbone_that_ignores_edge_weights_warns_once_if_the_graph_has_some(weights, backbone, warned, caplog):
    with caplog.at_level(logging.WARNING, "glasu.model"):
        sampler_with(weights, backbone)
    expected = [f'client 4: model.backbone="{backbone}" ignores edge weights'] if warned else []
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == expected


def test_a_users_convolution_ignores_edge_weights_with_a_warning(caplog):
    name = register_convolution(SAGEConv)
    with caplog.at_level(logging.WARNING, "glasu.model"):
        sampler_with(np.array([1.0, 2.0, 1.0]), name)
    assert f'model.backbone="{name}" ignores edge weights' in caplog.text


def test_a_backbone_that_ignores_edge_weights_really_does():
    targets = np.arange(3)
    for backbone, same in (("gat", True), ("gcn", False)):
        samplers = [sampler_with(weights, backbone) for weights in (np.array([1.0, 5.0, 1.0]), None)]
        blocks: list[Tensor] = [torch.from_numpy(each.exact_block(targets).matrix.toarray()) for each in samplers]
        assert torch.equal(*blocks) == same
