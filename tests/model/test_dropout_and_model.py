from __future__ import annotations

import hashlib
from functools import partial

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.stats import binomtest
from torch_geometric.nn import GATv2Conv

from glasu.config import ModelConfig, RunConfig, TrainConfig
from glasu.data.party import Graph, PartyData, Splits
from glasu.data.preprocessing import measure_mean_length
from glasu.model.blocks import Adjacency, Block, draw_all
from glasu.model.dropout import Dropout, make_no_dropout
from glasu.model.layers import Projection
from glasu.model.sparse import SparseRows
from glasu.model.split import ClientModel, digest_weights, find_input_scale
from glasu.protocol.client import Client
from glasu.randomness import Stream
from glasu.timing import Stopwatch
from glasu.wire.encoding import SINGLE
from support.convolutions import register_convolution

NODES = 8


def dropout(rate: float = 0.5, *, round_index: int = 0, step: int = 0, client: int = 0) -> Dropout:
    return Dropout(rate, lambda layer: Stream(0, "dropout", round_index, step, layer, client))


def model_of(config: ModelConfig, num_clients: int = 3, **changes: object) -> ClientModel:
    fields = {
        "num_features": 5,
        "num_outputs": 4,
        "stream": lambda purpose, layer: Stream(0, purpose, layer=layer),
        **changes,
    }
    return ClientModel(config, num_clients=num_clients, **fields)


def ring_block(normalization: str = "none") -> Block:
    nodes = np.arange(NODES)
    graph = Graph.from_edges(nodes, (nodes + 1) % NODES, NODES)
    return Adjacency(graph, normalization, SINGLE).block(nodes, nodes, draw_all(graph, nodes))


def client_of(index: int, **model: object) -> Client:
    nodes = np.arange(NODES)
    party = PartyData(
        name="abc"[index],
        ids=nodes,
        features=np.random.default_rng(0).normal(size=(NODES, 5)),
        graph=Graph.from_edges(nodes, (nodes + 1) % NODES, NODES),
        labels=nodes % 3,
        classes=("x", "y", "z"),
        splits=Splits(nodes[:4], nodes[4:6], nodes[6:]),
    )
    settings = {"num_layers": 2, "aggregation_layers": (1,), "hidden": 6, **model}
    config = RunConfig(model=ModelConfig(**settings), train=TrainConfig(sampler="full", batch_size=0))
    return Client(config, party, index=index, names="abc", watch=Stopwatch(lambda: 0.0))


# Dropout


def test_the_same_step_and_layer_drop_the_same_values_again():
    hidden = torch.randn(20, 6)
    torch.testing.assert_close(dropout()(hidden, 1), dropout()(hidden, 1), rtol=0, atol=0)


@pytest.mark.parametrize("change", [{"round_index": 1}, {"step": 1}, {"client": 1}])
def test_another_round_step_or_client_drops_others(change):
    hidden = torch.ones(20, 6)
    assert not torch.equal(dropout()(hidden, 1), dropout(**change)(hidden, 1))


def test_another_layer_drops_others():
    assert not torch.equal(dropout()(torch.ones(20, 6), 1), dropout()(torch.ones(20, 6), 2))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_share_of_the_values_is_dropped_and_the_rest_scaled_up(rate):
    kept, near = dropout(rate)(torch.ones(200, 100), 0).numpy(), round(256 * rate) / 256
    assert binomtest(int((kept == 0).sum()), kept.size, near).pvalue > 1e-3
    np.testing.assert_allclose(kept[kept > 0], 1 / (1 - near), rtol=1e-6)  # the expected value stays the same


def test_dropped_values_of_a_row_or_column_have_nothing_to_do_with_each_other():
    dropped = (dropout()(torch.ones(400, 400), 0) == 0).numpy()
    for axis in (0, 1):
        assert 0.3 < dropped.mean(axis=axis).min() < dropped.mean(axis=axis).max() < 0.7
    correlation = np.corrcoef(dropped[:-1].ravel(), dropped[1:].ravel())[0, 1]
    assert abs(correlation) < 0.02


def test_of_sparse_features_only_stored_values_are_dropped():
    matrix = sp.random_array((300, 50), density=0.1, rng=np.random.default_rng(0), format="csr", dtype=np.float32)
    features = SparseRows.of(matrix)
    dropped = dropout()(features, 0)
    assert dropped.dtype == np.float32
    assert (dropped.toarray()[features.toarray() == 0] == 0).all()
    assert binomtest(int((dropped.data == 0).sum()), features.nnz, 0.5).pvalue > 1e-3
    np.testing.assert_allclose(dropped.data[dropped.data != 0], 2 * features.data[dropped.data != 0])


def test_dropout_leaves_its_input_as_it_was_and_passes_gradients_through_the_mask():
    hidden = torch.randn(20, 6, requires_grad=True)
    before = hidden.detach().clone()
    result = dropout()(hidden, 0)
    result.sum().backward()
    torch.testing.assert_close(hidden.detach(), before, rtol=0, atol=0)
    torch.testing.assert_close(hidden.grad, torch.where(result == 0, 0.0, 2.0))
    features = SparseRows.of(sp.csr_array(np.ones((4, 4), np.float32)))
    dropout()(features, 0)
    assert (features.data == 1).all()


def test_without_dropout_the_input_itself_is_returned():
    hidden = torch.randn(3, 2)
    assert make_no_dropout()(hidden, 0) is hidden


def test_every_rate_that_the_config_allows_keeps_finite_values():
    rate = ModelConfig(dropout=1 - 1e-9).dropout
    assert dropout(rate)(torch.ones(1000, 100), 0).isfinite().all()


# The model


def test_classifiers_start_equal_at_all_clients_while_layers_differ():
    first, second = (client_of(index).learner.model.state_dict() for index in (0, 1))
    assert set(first) == set(second)
    for name in first:
        equal = torch.equal(first[name], second[name])
        assert equal == (name.startswith("classifier") or name.endswith("bias")), name


@pytest.mark.parametrize("backbone", ["gcn", "gcnii", "sage", "gat"])
def test_a_model_is_a_function_of_its_seeds_and_leaves_torchs_generator_alone(backbone):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = client_of(0, backbone=backbone, heads=2).learner.model
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = client_of(0, backbone=backbone, heads=2).learner.model
    assert digest_weights(first.state_dict()) == digest_weights(second.state_dict())


def test_a_client_without_labels_has_no_classifier():
    assert model_of(ModelConfig(), num_outputs=None).classifier is None


@pytest.mark.parametrize("backbone", ["gcn", "sage", "gat"])
@pytest.mark.parametrize(("aggregation", "wide"), [("mean", 6), ("concat", 18)])
def test_after_concat_the_next_layer_and_the_classifier_read_m_times_the_width(backbone, aggregation, wide):
    config = ModelConfig(
        backbone=backbone, num_layers=3, aggregation_layers=(0, 2), hidden=6, aggregation=aggregation, heads=2
    )
    model = model_of(config)
    read = [next(part.weight for part in layer.modules() if isinstance(part, Projection)) for layer in model.layers]
    assert [len(weight) for weight in read] == [5, wide, 6]
    assert len(model.classifier.weight) == wide


def test_after_concat_gcnii_projects_back_to_the_hidden_width():
    config = ModelConfig(num_layers=3, aggregation_layers=(0, 2), hidden=6, aggregation="concat")
    model = model_of(config)
    assert [layer.reduce is not None for layer in model.layers] == [False, True, False]
    assert model.layers[1].reduce.weight.shape == (18, 6)
    assert model.encoder.weight.shape == (5, 6)


@pytest.mark.parametrize("backbone", ["gcn", "gcnii", "sage", "gat"])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
@pytest.mark.parametrize("normalization", ["none", "layer"])
def test_the_layers_of_a_model_fit_together(backbone, aggregation, normalization):
    config = ModelConfig(
        backbone=backbone,
        num_layers=3,
        aggregation_layers=(0, 2),
        hidden=6,
        aggregation=aggregation,
        heads=2,
        normalization=normalization,
    )
    model, block = model_of(config), ring_block("symmetric")
    hidden, initial = model.encode(torch.randn(NODES, 5), dropout())
    for layer in range(3):
        partial = model.sublayer(layer, hidden, initial, block, dropout())
        assert partial.shape == (NODES, 6)
        joined = [partial] * 3 if aggregation == "concat" else [partial]
        hidden = torch.cat(joined, dim=1) if layer in model.aggregation_layers else partial
    assert model.classify(hidden, dropout()).shape == (NODES, 4)


def test_layer_normalisation_is_applied_to_what_later_layers_and_the_classifier_read():
    model = model_of(ModelConfig(num_layers=2, aggregation_layers=(1,), hidden=6, normalization="layer"))
    hidden = 5 + 3 * torch.randn(NODES, 6)
    torch.testing.assert_close(model.layer_input(0, hidden, make_no_dropout()), hidden)
    for layer in (1, 2):
        read = model.layer_input(layer, hidden, make_no_dropout())
        torch.testing.assert_close(read, torch.nn.functional.layer_norm(hidden, (6,)))


@pytest.fixture
def attention_model() -> ClientModel:
    name = register_convolution(lambda a, b: GATv2Conv(a, b, dropout=0.5, add_self_loops=False))
    return model_of(ModelConfig(backbone=name, num_layers=1, aggregation_layers=(0,), hidden=6, dropout=0.0))


def test_a_users_convolution_with_dropout_of_its_own_drops_by_step_and_layer(attention_model):
    model, block, hidden = attention_model, ring_block(), torch.randn(NODES, 5)
    torch.manual_seed(1)
    first = model.sublayer(0, hidden, None, block, dropout(0.0))
    torch.manual_seed(2)
    again = model.sublayer(0, hidden, None, block, dropout(0.0))
    other = model.sublayer(0, hidden, None, block, dropout(0.0, step=1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_users_convolution_does_not_disturb_torchs_generator(attention_model):
    model, block = attention_model, ring_block()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    model.sublayer(0, torch.ones(NODES, 5), None, block, dropout(0.0))
    assert torch.equal(torch.get_rng_state(), state)


# Scales and digests


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_the_automatic_scale_brings_the_mean_length_of_a_filled_row_to_three(form):
    features = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    features[::5] = 0
    scale = find_input_scale(
        ModelConfig(), measure_mean_length(sp.csr_array(features) if form == "sparse" else features)
    )
    lengths = np.linalg.norm(features * scale, axis=1)
    assert lengths[lengths > 0].mean() == pytest.approx(3)


def test_features_that_are_all_zero_keep_their_scale():
    assert find_input_scale(ModelConfig(), measure_mean_length(np.zeros((3, 2), np.float32))) == 1.0


def test_a_scale_in_the_config_is_used_as_it_is():
    assert find_input_scale(ModelConfig(input_scale=0.25), 7.0) == 0.25
    assert client_of(0, input_scale=0.25).data.preparation.input_scale == 0.25


def test_the_digest_of_weights_is_the_sha256_of_their_bytes_in_the_order_of_names():
    b, a = torch.tensor([[1.0, 2.0]]), torch.tensor([3.0])
    expected = hashlib.sha256(np.array([3, 1, 2], "<f4").tobytes()).hexdigest()
    assert digest_weights({"b": b, "a": a}) == digest_weights({"a": a, "b": b}) == expected


def test_the_digest_reads_rows_however_they_lie_in_memory():
    weights = torch.randn(3, 4)
    assert digest_weights({"w": weights.T.contiguous().T}) == digest_weights({"w": weights})
    assert digest_weights({"w": weights}) != digest_weights({"w": weights + 1e-3})


def test_attention_is_dropped_by_draws_of_its_own_and_is_right_in_the_mean():
    model = model_of(ModelConfig(backbone="gat", num_layers=1, aggregation_layers=(0,), hidden=6, heads=2))
    layer, block = model.layers[0], ring_block()
    hidden = torch.from_numpy(np.random.default_rng(0).normal(size=(NODES, 5)).astype(np.float32))
    whole = layer(hidden, None, block)
    with torch.no_grad():
        dropped = [
            layer(hidden, None, block, partial(dropout(step=step).attention, layer=0)).numpy() for step in range(2000)
        ]
    error = np.std(dropped, axis=0) / len(dropped) ** 0.5
    assert (error > 0).all()
    assert (np.abs(np.mean(dropped, axis=0) - whole.detach().numpy()) <= 5 * error).all()
    shares = torch.ones(50, 5)
    assert not torch.equal(dropout().attention(shares, 0), dropout()(shares, 0))
    assert not torch.equal(dropout().attention(shares, 0), dropout().attention(shares, 1))


def test_in_training_all_shares_of_attention_pass_the_dropout_of_the_step_and_in_evaluation_none_does():
    model = model_of(ModelConfig(backbone="gat", num_layers=1, aggregation_layers=(0,), hidden=6, heads=2))
    block, seen = ring_block(), []
    drops = dropout(0.75)
    drops.attention = lambda shares, layer: seen.append((len(shares), layer)) or shares  # type: ignore[method-assign]
    hidden = torch.ones(NODES, 5)
    model.sublayer(0, hidden, None, block, drops)
    assert seen == [(2 * NODES, 0)]  # the ring's edges and the self loops, in one direction
    plain = model.sublayer(0, hidden, None, block, make_no_dropout())
    torch.testing.assert_close(plain, model.activation(model.layers[0](hidden, None, block)))
