"""The fused encoder and gcnii layer are the plain ones, in one step of the tape."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import nn

from glasu.config import ModelConfig
from glasu.data.party import Graph
from glasu.model.blocks import Adjacency, Block, draw_all
from glasu.model.layers import GCNIILayer
from glasu.model.sparse import SparseRows
from glasu.model.split import ENCODER, ClientModel, Dropout, no_dropout
from glasu.randomness import Stream

NODES, WIDTH, FEATURES = 40, 6, 9
pytestmark = pytest.mark.usefixtures("kernel_path")
dropouts = pytest.mark.parametrize("rate", [0.0, 0.3])


def model_of(dtype: torch.dtype = torch.float64, **keys: object) -> ClientModel:
    config = ModelConfig(backbone="gcnii", num_layers=2, hidden=WIDTH, aggregation_layers=(1,), **keys)  # type: ignore[arg-type]
    return ClientModel(
        config,
        num_clients=3,
        num_features=FEATURES,
        num_outputs=3,
        stream=lambda purpose, layer: Stream(0, purpose, layer=layer),
    ).to(dtype)


def dropout_of(rate: float) -> Dropout:
    return Dropout(rate, lambda layer: Stream(1, "dropout", layer=layer)) if rate else no_dropout()


def block_of(dtype: torch.dtype = torch.float64, rows: int = 12) -> Block:
    rng = np.random.default_rng(0)
    graph = Graph.from_edges(rng.integers(0, NODES, 160), rng.integers(0, NODES, 160), NODES)
    adjacency = Adjacency(graph, "symmetric", double=dtype == torch.float64)
    return adjacency.block(np.arange(rows), np.arange(NODES), draw_all(graph, np.arange(rows)))


def features_of(dtype: type[np.floating] = np.float64) -> SparseRows:
    values = sp.random_array((NODES, FEATURES), density=0.3, rng=np.random.default_rng(1), dtype=dtype)
    return SparseRows.of(sp.csr_array(values))


@dropouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_layer_gives_the_bits_of_the_plain_one(rate, dtype):
    torch.manual_seed(0)
    model, block, dropout = model_of(dtype), block_of(dtype), dropout_of(rate)
    hidden, initial = torch.randn(NODES, WIDTH, dtype=dtype), torch.rand(12, WIDTH, dtype=dtype)
    layer = model.layers[0]
    assert isinstance(layer, GCNIILayer)
    assert layer.fuses(block)
    plain = nn.functional.relu(layer(dropout(hidden, 0), initial, block))
    assert torch.equal(model.sublayer(0, hidden, initial, block, dropout), plain)
    assert plain.count_nonzero() > 0


@dropouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fused_encoder_gives_the_bits_of_the_plain_one(rate, dtype):
    model, dropout = model_of(dtype), dropout_of(rate)
    features = features_of(np.float32 if dtype == torch.float32 else np.float64)
    assert model.encoder is not None
    assert model.encoder.bias is not None
    nn.init.normal_(model.encoder.bias)
    hidden, initial = model.encode(features, dropout)
    assert hidden is initial
    assert torch.equal(initial, nn.functional.relu(model.encoder(dropout(features, ENCODER))))


@dropouts
@pytest.mark.parametrize("normalization", ["none", "layer"])
def test_the_gradients_of_a_fused_network_are_those_of_the_plain_one(rate, normalization):
    torch.manual_seed(0)
    model, block, dropout = model_of(normalization=normalization), block_of(rows=NODES), dropout_of(rate)
    features = features_of()

    def plain() -> torch.Tensor:
        assert model.encoder is not None
        initial = hidden = nn.functional.relu(model.encoder(dropout(features, ENCODER)))
        for index, layer in enumerate(model.layers):
            hidden = nn.functional.relu(layer(model.layer_input(index, hidden, dropout), initial, block))
        return model.classify(hidden, dropout)

    def fused() -> torch.Tensor:
        hidden, initial = model.encode(features, dropout)
        for index in range(len(model.layers)):
            hidden = model.sublayer(index, hidden, initial, block, dropout)
        assert isinstance(hidden, torch.Tensor)
        return model.classify(hidden, dropout)

    found = []
    for network in (plain, fused):
        model.zero_grad()
        network().square().sum().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert gradient.count_nonzero() > 0, name
        torch.testing.assert_close(found[1][name], gradient)


@dropouts
def test_the_gradients_of_a_fused_layer_are_those_that_finite_differences_find(rate):
    torch.manual_seed(0)
    model, block, dropout = model_of(), block_of(), dropout_of(rate)
    hidden = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=True)
    initial = torch.rand(12, WIDTH, dtype=torch.float64, requires_grad=True)
    layer = model.layers[0]
    assert isinstance(layer, GCNIILayer)

    def values(hidden: torch.Tensor, initial: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return model.sublayer(0, hidden, initial, block, dropout)  # the weight is changed in place

    assert torch.autograd.gradcheck(values, (hidden, initial, layer.linear.weight))


@dropouts
def test_the_gradients_of_the_fused_encoder_are_those_that_finite_differences_find(rate):
    model, features = model_of(), features_of()
    assert model.encoder is not None
    assert model.encoder.bias is not None
    nn.init.uniform_(model.encoder.bias, 0.1, 0.2)  # rows without features would stand on ReLU's corner
    inputs = (model.encoder.weight, model.encoder.bias)
    assert torch.autograd.gradcheck(lambda *_: model.encode(features, dropout_of(rate))[0], inputs)


def test_what_is_not_a_number_stays_so():
    model, features = model_of(), features_of()
    assert model.encoder is not None
    assert model.encoder.bias is not None
    nn.init.constant_(model.encoder.bias, torch.nan)
    hidden, _ = model.encode(features, no_dropout())
    assert isinstance(hidden, torch.Tensor)
    assert hidden.isnan().all()


@pytest.mark.parametrize("keys", [{"alpha": 0.6}, {"aggregation": "concat", "aggregation_layers": (0, 1)}])
def test_layers_with_another_order_of_sums_or_another_weight_are_not_fused(keys):
    config = ModelConfig(**{"backbone": "gcnii", "num_layers": 2, "hidden": WIDTH, "aggregation_layers": (1,), **keys})
    model = ClientModel(
        config, num_clients=3, num_features=FEATURES, num_outputs=3, stream=lambda purpose, layer: Stream(0, purpose)
    )
    layer = model.layers[1]
    assert isinstance(layer, GCNIILayer)
    assert not layer.fuses(block_of())
