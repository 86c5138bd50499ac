"""The methods that GLASU encompasses, compared with independent implementations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv

from glasu.data.graph import Graph
from glasu.data.methods import find_method
from glasu.data.sources.catalog import load_parties
from glasu.runtime.simulation import make_clients, simulate
from support.monolith import (
    ALL_LAYERS,
    Monolith,
    assert_same,
    dense_adjacency,
    gradients,
    identical,
    run,
    settings,
    tiny_parties,
)

RATE, ROUNDS = 0.1, 4


def initial_weights(parties, config):
    """Return the weights with which the clients of a run begin."""
    return [client.learner.weights() for client in make_clients(config, parties)]


def pool_by_hand(parties):
    """Bring the parties' data together by hand: all columns, and an edge wherever one of them has it."""
    A = np.max([dense_edges(one.graph) for one in parties], axis=0)
    target, source = np.nonzero(A)
    features = np.concatenate([one.features for one in parties], axis=1)
    graph = Graph.from_edges(source, target, len(A), A[target, source])
    return replace(parties[0], name="all", features=features, graph=graph)


def dense_edges(graph):
    A = np.zeros((graph.num_nodes, graph.num_nodes))
    source, target = graph.edge_index()
    A[target, source] = 1 if graph.weights is None else graph.weights
    return A


def descend(whole, rounds=ROUNDS, rate=RATE):
    """Train the one model by gradient descent on the sum of its losses."""
    for _ in range(rounds):
        whole.descend(whole.gradients(sum(whole.losses().values())), rate)
    return whole


# --- centralized -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", ["gcn", "gcnii", "sage", "gat"])
def test_centralized_is_one_model_on_all_features_and_the_union_of_the_edges(backbone):
    asked = settings(method="centralized", backbone=backbone, num_rounds=ROUNDS, num_local_steps=4)
    parties = tiny_parties()
    done = simulate(parties, asked)
    alone = settings(backbone=backbone, aggregation_layers=())
    everything = [pool_by_hand(parties)]
    whole = descend(Monolith(alone, everything, initial_weights(everything, alone)))
    assert_same([client.learner.weights() for client in done.clients], whole.weights)
    assert [party["name"] for party in done.report.parties] == ["all"]
    assert done.report.traffic["messages"] == 0


@pytest.mark.parametrize("backward", ["local", "joint"])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_one_client_with_a_server_learns_what_centralized_learns(aggregation, backward):
    parties = tiny_parties(1)
    keys = {"num_rounds": ROUNDS, "backbone": "gcnii", "aggregation": aggregation}
    with_server = run(settings(aggregation_layers=ALL_LAYERS, backward=backward, **keys), parties)
    without = simulate(parties, settings(method="centralized", **keys))
    assert_same(with_server.final, [client.learner.weights() for client in without.clients])


# --- standalone --------------------------------------------------------------------------------------------------


def test_standalone_clients_learn_alone_and_send_nothing():
    parties = tiny_parties()
    config = settings(method="standalone", backbone="sage", num_rounds=ROUNDS)
    done = simulate(parties, config)
    for key in ("bytes_to_server", "bytes_to_clients", "messages", "exchanges"):
        assert done.report.traffic[key] == 0
    assert not done.report.traffic["by_kind"]
    assert all(not client.release.ledger.totals for client in done.clients)
    silent = settings(backbone="sage", aggregation_layers=())
    initial = initial_weights(parties, silent)
    for m, party in enumerate(parties):
        whole = descend(Monolith(silent, [party], [initial[m]]))
        assert_same([done.clients[m].learner.weights()], whole.weights)


def test_standalone_accuracy_is_the_mean_of_the_clients_own():
    parties = tiny_parties(num_nodes=40)
    config = settings(method="standalone", num_rounds=12, evaluate_every=2, optimizer="adam", learning_rate=0.05)
    done = simulate(parties, config)
    test, labels, nodes = done.report.test, parties[0].labels, parties[0].splits.test
    own = []
    for client, party in zip(done.clients, parties, strict=True):
        whole = Monolith(settings(aggregation_layers=()), [party], [client.progress.best_weights])
        own.append((whole.probabilities().argmax(dim=1).numpy() == labels)[nodes].mean())
    assert test.per_client == pytest.approx(tuple(own))
    assert test.accuracy == pytest.approx(np.mean(own))
    assert len(set(own)) > 1  # otherwise the mean would prove nothing


def test_standalone_and_no_aggregation_layers_are_the_same_run():
    keys = {"num_rounds": ROUNDS, "num_local_steps": 2}
    named = simulate(tiny_parties(), settings(method="standalone", **keys)).report
    spelt = simulate(tiny_parties(), settings(aggregation_layers=(), **keys)).report
    assert named.weights_sha256 == spelt.weights_sha256
    assert named.test == spelt.test


# --- Zhou et al.: K = 1 ------------------------------------------------------------------------------------------


class OneFusion(nn.Module):
    """Each party embeds with its own graph; one server combines the embeddings once and classifies (PyG layers)."""

    def __init__(self, weights, owner, aggregation, layers=4):
        super().__init__()
        self.stacks = nn.ModuleList()
        for own in weights:
            stack = nn.ModuleList()
            for layer in range(layers):
                matrix = own[f"layers.{layer}.linear.weight"]
                convolution = GCNConv(*matrix.shape).double()
                convolution.lin.weight.data = matrix.T.clone()
                convolution.bias.data = own[f"layers.{layer}.bias"].clone()
                stack.append(convolution)
            self.stacks.append(stack)
        self.head = nn.Linear(*weights[owner]["classifier.weight"].shape).double()
        self.head.weight.data = weights[owner]["classifier.weight"].T.clone()
        self.head.bias.data = weights[owner]["classifier.bias"].clone()
        self.aggregation = aggregation

    def forward(self, parties):
        embedded = []
        for stack, party in zip(self.stacks, parties, strict=True):
            H, edges = torch.from_numpy(party.features).double(), torch.from_numpy(party.graph.edge_index())
            weights = None if party.graph.weights is None else torch.from_numpy(party.graph.weights).double()
            for convolution in stack:
                H = convolution(H, edges, weights).relu()
            embedded.append(H)
        return self.head(torch.stack(embedded).mean(0) if self.aggregation == "mean" else torch.cat(embedded, dim=1))


@pytest.mark.parametrize("backward", ["local", "joint"])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_with_one_aggregation_glasu_is_the_one_fusion_model_of_zhou_et_al(aggregation, backward):
    config = settings(
        aggregation=aggregation, aggregation_layers=(3,), labels="b", backward=backward, num_rounds=ROUNDS
    )
    parties = tiny_parties(owner="b")
    done = run(config, parties)
    model = OneFusion(done.initial, 1, aggregation)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    train, y = torch.from_numpy(parties[1].splits.train), torch.from_numpy(parties[1].labels)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(parties)[train], y[train]).backward()
        optimizer.step()
    for m, stack in enumerate(model.stacks):
        for layer, convolution in enumerate(stack):
            got = done.final[m][f"layers.{layer}.linear.weight"]
            torch.testing.assert_close(got, convolution.lin.weight.T, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(done.final[1]["classifier.weight"], model.head.weight.T, rtol=1e-8, atol=1e-10)


# --- simulated (Ni et al.): K = L, Q = 1, joint, all edges everywhere ---------------------------------------------


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_simulated_is_one_model_that_aggregates_everywhere_with_all_edges_at_every_client(aggregation):
    parties = tiny_parties()
    keys = {"backbone": "gcnii", "aggregation": aggregation}
    done = simulate(parties, settings(method="simulated", num_rounds=ROUNDS, num_local_steps=4, **keys))
    union = pool_by_hand(parties).graph
    sharing = [replace(one, graph=union) for one in parties]
    config = settings(aggregation_layers=ALL_LAYERS, **keys)
    whole = descend(Monolith(config, sharing, initial_weights(sharing, config)))
    assert_same([client.learner.weights() for client in done.clients], whole.weights)
    for client in done.clients:
        torch.testing.assert_close(
            dense_adjacency(client.party.graph, "gcn"), dense_adjacency(union, "gcn"), rtol=0, atol=0
        )


# --- FedBCD: no edges --------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One party's block of a plain vertical model: a perceptron with two layers."""

    def __init__(self, own):
        super().__init__()
        self.W = nn.ParameterList([own[f"layers.{layer}.linear.weight"].clone() for layer in range(2)])
        self.b = nn.ParameterList([own[f"layers.{layer}.bias"].clone() for layer in range(2)])
        self.head = nn.ParameterList(
            [own[key].clone() for key in ("classifier.weight", "classifier.bias") if key in own]
        )

    def forward(self, X):
        for W, b in zip(self.W, self.b, strict=True):
            X = (X @ W + b).relu()
        return X

    def loss(self, H, y):
        return nn.functional.cross_entropy(H @ self.head[0] + self.head[1], y)


def fedbcd(blocks, X, y, rounds, steps, owner):
    """Liu et al.: exchange the blocks' outputs; then every party takes Q steps with the others' outputs fixed."""
    for _ in range(rounds):
        with torch.no_grad():
            outputs = [block(x) for block, x in zip(blocks, X, strict=True)]
        mean = sum(outputs) / len(blocks)
        if owner is not None:
            top = mean.clone().requires_grad_()
            (G,) = torch.autograd.grad(blocks[owner].loss(top, y), top)
        for m, (block, x) in enumerate(zip(blocks, X, strict=True)):
            optimizer = torch.optim.SGD(block.parameters(), RATE)
            for _ in range(steps):
                H = mean + (block(x) - outputs[m]) / len(blocks)
                optimizer.zero_grad()
                (block.loss(H, y) if owner in (None, m) else (G * H).sum()).backward()
                optimizer.step()


@pytest.mark.parametrize("owner", [None, "b"])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_without_edges_glasu_is_fedbcd(steps, owner):
    none = Graph.from_edges(np.empty(0, int), np.empty(0, int), 24)
    parties = [replace(one, graph=none) for one in tiny_parties(owner=owner)]
    keys = {"num_layers": 2, "aggregation_layers": (1,), "num_local_steps": steps, "labels": owner or "all"}
    done = run(settings(num_rounds=ROUNDS, **keys), parties)
    labelled = parties[1]
    train = labelled.splits.train
    blocks = [Block(own) for own in done.initial]
    X = [torch.from_numpy(one.features[train]).double() for one in parties]
    fedbcd(blocks, X, torch.from_numpy(labelled.labels[train]), ROUNDS, steps, None if owner is None else 1)
    for own, block in zip(done.final, blocks, strict=True):
        for layer in range(2):
            torch.testing.assert_close(own[f"layers.{layer}.linear.weight"], block.W[layer].data, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(own[f"layers.{layer}.bias"], block.b[layer].data, rtol=1e-9, atol=1e-11)
        if len(block.head):
            torch.testing.assert_close(own["classifier.weight"], block.head[0].data, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("owner", [None, "b"])
def test_fedbcd_is_a_setting_an_edge_fraction_of_zero(owner):
    steps, keys = 3, {"num_layers": 2, "aggregation_layers": (1,), "labels": owner or "all"}
    sizes = {"num_nodes": 60, "num_features": 9, "num_classes": 3, "average_degree": 6.0}
    config = settings(num_rounds=ROUNDS, num_local_steps=steps, **keys).replace(
        data={"name": "synthetic", "edge_fraction": 0.0, **sizes}
    )
    parties = load_parties(config)
    assert [party.graph.num_edges for party in parties] == [0, 0, 0]
    done = run(config, parties)
    train, y = parties[1].splits.train, parties[1].labels
    blocks = [Block(own) for own in done.initial]
    X = [torch.from_numpy(one.features[train]).double() for one in parties]
    fedbcd(blocks, X, torch.from_numpy(y[train]), ROUNDS, steps, None if owner is None else 1)
    for own, block in zip(done.final, blocks, strict=True):
        for layer in range(2):
            torch.testing.assert_close(own[f"layers.{layer}.linear.weight"], block.W[layer].data, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("sampler", ["full", "neighbor"])
def test_without_edges_no_sampled_neighbourhood_grows(sampler):
    none = Graph.from_edges(np.empty(0, int), np.empty(0, int), 24)
    parties = [replace(one, graph=none) for one in tiny_parties()]
    done = run(settings(aggregation_layers=(1, 3), sampler=sampler, num_rounds=3), parties)
    other = run(settings(aggregation_layers=(1, 3), sampler="full", num_rounds=3), parties)
    assert_same(done.final, other.final)  # A = I: only the rows of the batch matter


# --- overridden settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "overridden"),
    [
        ("glasu", {}),
        (
            "centralized",
            {
                "data.num_clients": (3, 1),
                "model.aggregation_layers": ((1, 3), ()),
                "train.num_local_steps": (4, 1),
            },
        ),
        ("standalone", {"model.aggregation_layers": ((1, 3), ())}),
        (
            "simulated",
            {
                "data.edge_fraction": (0.8, 1.0),
                "model.aggregation_layers": ((1, 3), ALL_LAYERS),
                "train.num_local_steps": (4, 1),
                "train.backward": ("local", "joint"),
            },
        ),
    ],
)
def test_the_report_says_what_the_method_overrode_and_what_ran(method, overridden):
    asked = settings().replace(train={"method": method, "num_local_steps": 4}, model={"aggregation_layers": (1, 3)})
    report = simulate(tiny_parties(), asked).report
    assert report.overridden == {key: {"requested": old, "used": new} for key, (old, new) in overridden.items()}
    for key, (_, used) in overridden.items():
        section, name = key.split(".")
        assert getattr(getattr(report.config, section), name) == used


@pytest.mark.parametrize(("method", "used"), [("glasu", 2), ("standalone", 2), ("centralized", 1)])
def test_the_report_says_how_many_parties_the_data_brought(method, used):
    report = simulate(tiny_parties(2), settings(method=method)).report
    asked = 1 if method == "centralized" else 3  # `settings` resolves, and centralized means one
    expected = {} if asked == used else {"data.num_clients": {"requested": asked, "used": used}}
    assert {key: value for key, value in report.overridden.items() if key == "data.num_clients"} == expected
    assert report.config.data.num_clients == used


def test_centralized_says_how_many_clients_were_asked_for():
    asked = settings().replace(train={"method": "centralized"})
    assert simulate(tiny_parties(2), asked).report.overridden["data.num_clients"] == {"requested": 3, "used": 1}


def test_centralized_ignores_who_has_the_labels():
    everywhere = simulate(tiny_parties(), settings(method="centralized", num_rounds=2)).report
    at_one = simulate(
        tiny_parties(owner="c"), settings(num_rounds=2).replace(train={"method": "centralized", "labels": "c"})
    )
    assert everywhere.weights_sha256 == at_one.report.weights_sha256
    assert at_one.report.overridden["train.labels"] == {"requested": "c", "used": "all"}


def test_glasu_1_with_joint_gradients_and_every_layer_is_simulated_where_all_have_all_edges():
    parties = find_method(settings(method="simulated")).prepare(tiny_parties())
    simulated = simulate(parties, settings(method="simulated", num_rounds=3))
    glasu = run(settings(aggregation_layers=ALL_LAYERS, backward="joint", num_rounds=3), parties)
    assert identical([client.learner.weights() for client in simulated.clients], glasu.final)
    assert any(gradient.abs().max() > 0 for own in gradients(glasu.clients) for gradient in own.values())
