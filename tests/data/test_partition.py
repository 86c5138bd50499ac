from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from glasu.config import DataConfig, RunConfig, TrainConfig
from glasu.data.graph import Graph
from glasu.data.partition import (
    MAX_COMPARED,
    correlate_columns,
    draw_splits_by_fraction,
    draw_splits_per_class,
    name_client,
    pool_parties,
    share_edges,
)
from glasu.data.partition import partition as divide
from glasu.data.party import PartyData
from glasu.data.sources.catalog import load_parties
from glasu.data.sources.pyg import convert_graph, split_vertically
from glasu.errors import AlignmentError, ConfigError, DataError


def random_data(num_nodes=60, num_edges=400, num_features=10, *, directed=False, **more):
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
    x = torch.randn(num_nodes, num_features, generator=generator)
    return Data(
        x=x,
        edge_index=edges if directed else to_undirected(edges),
        y=torch.arange(num_nodes) % 3,
        train_mask=torch.arange(num_nodes) < 20,
        val_mask=(torch.arange(num_nodes) >= 20) & (torch.arange(num_nodes) < 30),
        test_mask=torch.arange(num_nodes) >= 30,
        **more,
    )


def pairs(graph):
    return set(zip(*graph.edge_index().tolist(), strict=True))


def dense(features):
    return features.toarray() if sp.issparse(features) else features


def test_the_clients_columns_side_by_side_are_all_columns():
    data = random_data(num_features=10)
    parties = split_vertically(data, num_clients=3)
    assert [party.num_features for party in parties] == [4, 4, 2]
    np.testing.assert_array_equal(np.hstack([party.features for party in parties]), data.x.numpy())


def test_every_client_has_the_ids_labels_and_splits():
    for party in split_vertically(random_data()):
        assert party.ids.tolist() == list(range(60))
        assert party.classes == ("0", "1", "2")
        assert party.labels.tolist() == [node % 3 for node in range(60)]
        assert [len(party.splits.train), len(party.splits.validation), len(party.splits.test)] == [20, 10, 30]


def test_an_undirected_edge_is_kept_or_dropped_in_both_directions():
    whole = convert_graph(random_data())
    for party in split_vertically(random_data(), edge_fraction=0.5):
        assert pairs(party.graph) < pairs(whole.graph)
        assert {(target, source) for source, target in pairs(party.graph)} == pairs(party.graph)


def test_directed_edges_are_kept_one_by_one_with_their_weights():
    data = random_data(directed=True, edge_weight=torch.arange(400.0))
    weight = dict(zip(pairs_in_order(whole := convert_graph(data)), whole.graph.weights, strict=True))
    (party,) = split_vertically(data, num_clients=1, edge_fraction=0.5)
    assert 0 < party.graph.num_edges < whole.graph.num_edges
    assert [weight[pair] for pair in pairs_in_order(party)] == party.graph.weights.tolist()


def pairs_in_order(owner):
    return list(zip(*owner.graph.edge_index().tolist(), strict=True))


def test_the_share_of_kept_edges_is_near_the_asked_one_and_independent_between_clients():
    data = random_data(num_nodes=2000, num_edges=20_000, num_features=2)
    everything = convert_graph(data).graph.num_edges
    first, second = split_vertically(data, num_clients=2, edge_fraction=0.8)
    for party in (first, second):
        assert abs(party.graph.num_edges / everything - 0.8) < 0.01
    assert abs(len(pairs(first.graph) & pairs(second.graph)) / everything - 0.64) < 0.015


def test_edges_depend_on_the_seed_and_on_nothing_else():
    once, again, other = (split_vertically(random_data(), seed=seed)[1].graph for seed in (1, 1, 2))
    assert pairs(once) == pairs(again) != pairs(other)


def test_a_client_keeps_its_edges_when_others_join():
    two, three = (split_vertically(random_data(), num_clients=count)[1].graph for count in (2, 3))
    assert pairs(two) == pairs(three)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_extreme_fractions_leave_nothing_or_everything(fraction):
    whole = convert_graph(random_data()).graph
    for party in split_vertically(random_data(), edge_fraction=fraction):
        assert pairs(party.graph) == (pairs(whole) if fraction else set())


@pytest.mark.parametrize("num_clients", range(1, 13))
@pytest.mark.parametrize("columns", range(1, 13))
def test_every_client_has_a_column_as_long_as_there_is_one_for_each(columns, num_clients):
    data = random_data(num_features=columns)
    if columns < num_clients:
        with pytest.raises(DataError, match=f"{columns} feature columns cannot be divided among {num_clients} clients"):
            split_vertically(data, num_clients=num_clients)
        return
    parties = split_vertically(data, num_clients=num_clients)
    widths = [party.num_features for party in parties]
    np.testing.assert_array_equal(np.hstack([dense(party.features) for party in parties]), data.x.numpy())
    width = math.ceil(columns / num_clients)
    paper = [min(width, max(0, columns - m * width)) for m in range(num_clients)]
    assert min(widths) >= 1
    assert widths == paper if min(paper) > 0 else max(widths) - min(widths) <= 1


@pytest.mark.parametrize("arguments", [{"num_clients": 0}, {"edge_fraction": 1.5}])
def test_impossible_divisions_are_refused(arguments):
    with pytest.raises(ConfigError):
        split_vertically(random_data(), **arguments)


def test_clients_are_named_like_the_columns_of_a_sheet():
    assert [name_client(client) for client in (0, 1, 25, 26, 27, 701, 702)] == ["a", "b", "z", "aa", "ab", "zz", "aaa"]


@pytest.mark.parametrize(
    "convert",
    [lambda x: x, lambda x: x.to_sparse(), lambda x: x.to_sparse_csr(), lambda x: sp.csr_matrix(x.numpy()), np.asarray],
    ids=["dense", "coo", "csr", "scipy", "numpy"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_features_may_be_dense_or_sparse_in_any_form(convert):
    data = random_data()
    data.x[data.x < 1.5] = 0
    expected = data.x.numpy().copy()
    data.x = convert(data.x)
    parties = split_vertically(data, num_clients=2)
    np.testing.assert_array_equal(np.hstack([dense(party.features) for party in parties]), expected)


def test_multilabel_targets_and_unknown_labels_are_understood():
    several = random_data()
    several.y = torch.eye(4)[torch.arange(60) % 4]
    unknown = random_data()
    unknown.y[5] = -1
    assert split_vertically(several)[0].labels.shape == (60, 4)
    assert split_vertically(unknown)[0].labels[5] == -1


def test_floats_that_are_not_class_numbers_are_numbers_to_predict():
    data = random_data()
    data.y = torch.linspace(-3, 4, 60, dtype=torch.float32)
    data.y[7] = float("nan")
    party = split_vertically(data)[0]
    assert (party.labels.dtype, party.classes) == (np.float64, ())
    np.testing.assert_array_equal(party.labels, data.y.double().numpy())
    data.y = torch.arange(60).float() % 3  # whole numbers are classes, as torch's losses for two classes want them
    assert split_vertically(data)[0].classes == ("0", "1", "2")


def test_a_column_of_edge_attributes_is_the_weight():
    data = random_data(directed=True)
    data.edge_attr = torch.full((400, 1), 2.0)
    assert split_vertically(data)[0].graph.weights.min() == 2.0


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("x", None, "no x"),
        ("x", torch.ones(60), "one row per node"),
        ("y", torch.full((60, 2), 0.5), "not class numbers"),
        ("y", torch.full((60,), float("inf")), "is infinite"),
        ("train_mask", torch.ones(60, 2, dtype=torch.bool), "several splits"),
        ("val_mask", torch.arange(60) < 5, "two splits"),
        ("train_mask", torch.arange(20), "True or False for each of 60 nodes"),
        ("train_mask", torch.arange(60), "use torch_geometric.utils.index_to_mask"),
        ("edge_weight", torch.ones(7), "7 values in edge_weight"),
        ("edge_index", torch.tensor([[0], [60]]), "its target is out of range"),
    ],
)
def test_a_pyg_graph_that_cannot_be_used_is_refused_with_a_reason(key, value, said):
    data = random_data()
    data[key] = value
    with pytest.raises(DataError, match=said):
        split_vertically(data)


def test_pooling_all_parties_gives_the_undivided_graph_back():
    data = random_data(directed=True, edge_weight=torch.rand(400))
    whole = convert_graph(data)
    parties = split_vertically(data, num_clients=5, edge_fraction=0.9)
    pooled = pool_parties(parties)
    assert pooled.name == "all"
    np.testing.assert_array_equal(pooled.features, whole.features)
    np.testing.assert_array_equal(pooled.graph.edge_index(), whole.graph.edge_index())
    np.testing.assert_array_equal(pooled.graph.weights, whole.graph.weights)
    assert pooled.splits.digest() == parties[0].splits.digest()


def test_pooling_uses_the_labels_of_any_party_and_gives_plain_edges_weight_one():
    plain = PartyData("a", np.arange(3), np.ones((3, 1)), Graph.from_edges(np.array([0, 1]), np.array([1, 2]), 3))
    weighted = PartyData(
        "b",
        np.arange(3),
        sp.csr_array(np.zeros((3, 7))),
        Graph.from_edges(np.array([0, 2]), np.array([1, 1]), 3, np.array([0.5, 3.0])),
        np.array([0, 1, 0]),
        ("x", "y"),
    )
    pooled = pool_parties([plain, weighted])
    assert pooled.labels.tolist() == [0, 1, 0]
    assert pooled.num_features == 8
    assert dict(zip(pairs_in_order(pooled), pooled.graph.weights.tolist(), strict=True)) == {
        (0, 1): 1.0,
        (2, 1): 3.0,
        (1, 2): 1.0,
    }


def test_pooled_columns_bear_the_names_of_their_parties_where_all_have_names():
    first, second = split_vertically(random_data(num_features=4), num_clients=2)
    named = [replace(first, feature_names=("x", "y")), replace(second, feature_names=("x", "z"))]
    assert pool_parties(named).feature_names == ("a.x", "a.y", "b.x", "b.z")
    assert pool_parties([named[0], second]).feature_names == ()
    assert [party.feature_names for party in share_edges(named)] == [("x", "y"), ("x", "z")]


@pytest.mark.parametrize("thing", ["x", None, [1, 2], np.ones((3, 3))], ids=["text", "none", "list", "array"])
def test_what_is_no_pyg_graph_is_refused(thing):
    with pytest.raises(DataError, match=r"is not a graph; pass a torch_geometric\.data\.Data"):
        split_vertically(thing)


def test_parties_in_different_orders_are_not_pooled():
    first, second = split_vertically(random_data(), num_clients=2)
    other = PartyData("b", second.ids[::-1].copy(), second.features, second.graph)
    with pytest.raises(AlignmentError):
        pool_parties([first, other])


def test_sharing_edges_leaves_features_alone():
    parties = split_vertically(random_data(), edge_fraction=0.5)
    union = set.union(*(pairs(party.graph) for party in parties))
    for before, after in zip(parties, share_edges(parties), strict=True):
        assert pairs(after.graph) == union
        assert after.features is before.features


def test_the_papers_split_draws_the_same_number_of_every_class_and_no_unlabelled_node():
    labels = np.arange(3000) % 4 - 1
    splits = draw_splits_per_class(labels, 60, 500, 1000, seed=0)
    assert np.bincount(labels[splits.train]).tolist() == [60, 60, 60]
    assert (len(splits.validation), len(splits.test)) == (500, 1000)
    chosen = np.concatenate([splits.train, splits.validation, splits.test])
    assert len(set(chosen)) == 1680
    assert labels[chosen].min() == 0
    assert splits.digest() == draw_splits_per_class(labels, 60, 500, 1000, seed=0).digest()
    assert splits.digest() != draw_splits_per_class(labels, 60, 500, 1000, seed=1).digest()


def test_fractions_hold_in_every_class():
    labels = np.repeat([-1, 0, 1, 2], [50, 100, 200, 10])
    splits = draw_splits_by_fraction(labels, (0.6, 0.2, 0.2), seed=0)
    for part, expected in ((splits.train, [60, 120, 6]), (splits.validation, [20, 40, 2]), (splits.test, [20, 40, 2])):
        assert np.bincount(labels[part]).tolist() == expected
        assert (np.diff(part) > 0).all()


def test_a_class_of_one_node_trains_with_it():
    splits = draw_splits_by_fraction(np.array([0] * 20 + [1]), (0.1, 0.2, 0.7), seed=0)
    assert 20 in splits.train


def test_fractions_that_leave_something_out_leave_it_unused():
    splits = draw_splits_by_fraction(np.zeros(100, int), (0.1, 0.2, 0.3), seed=0)
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [10, 20, 30]


def test_multilabel_nodes_are_split_together_and_only_where_all_labels_are_known():
    labels = np.zeros((100, 3), int)
    labels[:20, 1] = -1
    splits = draw_splits_by_fraction(labels, (0.5, 0.25, 0.25), seed=0)
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [40, 20, 20]
    assert np.concatenate([splits.train, splits.validation, splits.test]).min() >= 20


def test_nodes_with_a_number_are_split_as_one_group_and_only_where_it_is_known():
    labels = np.linspace(-1, 1, 100)
    labels[:20] = np.nan
    splits = draw_splits_by_fraction(labels, (0.5, 0.25, 0.25), seed=0)
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [40, 20, 20]
    assert np.concatenate([splits.train, splits.validation, splits.test]).min() >= 20


def test_nothing_labelled_means_nothing_to_split():
    splits = draw_splits_by_fraction(np.full(5, -1), (0.6, 0.2, 0.2), seed=0)
    assert len(splits.train) == len(splits.validation) == len(splits.test) == 0


# Partitions

DIVIDING = {
    "features": {},
    "apart": {},
    "importance": {"concentration": 0.3},
    "correlation": {"correlation": 0.6},
    "edges": {"concentration": 0.3},
}


def columns_of(party, data):
    """Return the columns of the graph that a party has; the columns of `random_data` are distinct."""
    whole = {column.tobytes(): number for number, column in enumerate(data.x.numpy().T)}
    return [whole.get(np.ascontiguousarray(column).tobytes()) for column in dense(party.features).T]


@pytest.mark.parametrize("num_clients", [2, 3, 7])
@pytest.mark.parametrize("partition", DIVIDING)
def test_every_column_is_at_one_client_and_every_client_has_one(partition, num_clients):
    data = random_data(num_features=23)
    parties = split_vertically(data, num_clients, partition=partition, **DIVIDING[partition])
    held = [columns_of(party, data) for party in parties]
    assert min(map(len, held)) >= 1
    assert [party.name for party in parties] == [name_client(client) for client in range(num_clients)]
    if partition == "apart":
        assert held.pop() == [None]  # the constant column
    assert sorted(chain.from_iterable(held)) == list(range(23))
    assert all(own == sorted(own) for own in held)


@pytest.mark.parametrize("partition", DIVIDING)
def test_a_partition_is_a_function_of_the_seed(partition):
    def draw(seed):
        parties = split_vertically(random_data(), seed=seed, partition=partition, **DIVIDING[partition])
        return [(pairs(party.graph), dense(party.features).tolist()) for party in parties]

    assert draw(3) == draw(3)
    assert (draw(3) == draw(4)) == (partition == "apart")  # which draws nothing


@pytest.mark.parametrize("partition", DIVIDING)
def test_the_names_of_columns_go_with_them(partition):
    data = random_data()
    whole = replace(convert_graph(data), feature_names=tuple(f"x{number}" for number in range(10)))
    for party in divide(whole, DataConfig(partition=partition, **DIVIDING[partition]), 0):
        expected = ["constant" if number is None else f"x{number}" for number in columns_of(party, data)]
        assert list(party.feature_names) == expected


def test_apart_puts_all_edges_at_the_last_client_and_features_at_the_others():
    data = random_data(directed=True, edge_weight=torch.rand(400))
    whole = convert_graph(data)
    *owners, last = split_vertically(data, num_clients=4, edge_fraction=0.3, partition="apart")
    assert [party.num_features for party in owners] == [4, 4, 2]
    assert [party.graph.num_edges for party in owners] == [0, 0, 0]
    assert last.graph is not None
    np.testing.assert_array_equal(last.graph.edge_index(), whole.graph.edge_index())
    np.testing.assert_array_equal(last.graph.weights, whole.graph.weights)
    assert last.features.tolist() == [[1.0]] * 60
    pooled = pool_parties([*owners, last])
    np.testing.assert_array_equal(pooled.graph.edge_index(), whole.graph.edge_index())
    np.testing.assert_array_equal(pooled.features[:, :-1], data.x.numpy())


@pytest.mark.parametrize("directed", [False, True])
def test_the_partition_edges_gives_every_edge_to_one_client_with_both_directions(directed):
    data = random_data(directed=directed)
    parties = split_vertically(data, num_clients=3, partition="edges", concentration=1.0)
    held = [pairs(party.graph) for party in parties]
    assert sum(map(len, held)) == len(set.union(*held))
    assert set.union(*held) == pairs(convert_graph(data).graph)
    if not directed:
        assert all({(target, source) for source, target in own} == own for own in held)


def shares_of_columns(concentration, seed):
    parties = split_vertically(
        random_data(num_nodes=4, num_edges=4, num_features=200),
        seed=seed,
        partition="importance",
        concentration=concentration,
    )
    return np.array([party.num_features for party in parties]) / 200


def shares_of_edges(concentration, seed):
    data = random_data(num_nodes=100, num_edges=300, num_features=3)
    graphs = [
        party.graph for party in split_vertically(data, seed=seed, partition="edges", concentration=concentration)
    ]
    return np.array([graph.num_edges for graph in graphs]) / sum(graph.num_edges for graph in graphs)


@pytest.mark.parametrize("shares_of", [shares_of_columns, shares_of_edges])
@pytest.mark.parametrize("concentration", [0.2, 1.0, 20.0])
def test_shares_have_the_mean_and_the_variance_of_the_dirichlet_distribution(shares_of, concentration):
    shares = np.array([shares_of(concentration, seed) for seed in range(150)])
    np.testing.assert_allclose(shares.mean(axis=0), 1 / 3, atol=0.1)
    expected = (1 / 3) * (2 / 3) / (3 * concentration + 1)  # of a share; the draws of columns or edges add little
    assert 0.75 < shares.var(axis=0).mean() / (expected + 2 / 9 / 200) < 1.25


def related_data(groups=6, width=5, num_nodes=400):
    """Return a graph whose columns come in groups of correlated ones, in a random order."""
    rng = np.random.default_rng(0)
    common = np.repeat(rng.standard_normal((num_nodes, groups)), width, axis=1) * rng.choice([-1, 1], groups * width)
    x = (common + 0.5 * rng.standard_normal(common.shape)).astype(np.float32)
    return Data(
        x=torch.from_numpy(x[:, rng.permutation(groups * width)]), edge_index=torch.empty(2, 0, dtype=torch.long)
    )


def correlation_between(parties):
    """Return the mean |correlation| of two columns at different parties."""
    owner = np.repeat(np.arange(len(parties)), [party.num_features for party in parties])
    found = np.abs(np.corrcoef(np.hstack([dense(party.features) for party in parties]).T))
    return found[owner[:, None] != owner].mean()


def test_the_correlation_between_clients_rises_with_the_setting():
    found = [
        np.mean(
            [
                correlation_between(
                    split_vertically(related_data(), seed=seed, partition="correlation", correlation=share)
                )
                for seed in range(5)
            ]
        )
        for share in (0.0, 0.3, 0.6, 1.0)
    ]
    assert found == sorted(found)
    assert found[0] < 0.06  # whole groups: only the sampling error of 400 nodes is left
    assert found[-1] > 0.15


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_clients_have_as_many_columns_as_the_paper_gives_them(share):
    parties = split_vertically(related_data(), num_clients=4, partition="correlation", correlation=share)
    assert [party.num_features for party in parties] == [8, 8, 8, 6]


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_the_correlation_of_columns_is_that_of_numpy(form):
    rng = np.random.default_rng(0)
    values = (rng.random((50, 6)) * (rng.random((50, 6)) < 0.5)).astype(np.float32)
    np.testing.assert_allclose(correlate_columns(form(values)), np.corrcoef(values.astype(float).T), atol=1e-5)
    values[:, 2] = 7.0
    found = correlate_columns(form(values))
    assert not found[2].any()
    assert not found[:, 2].any()


@pytest.mark.parametrize("partition", ["importance", "correlation", "edges"])
def test_too_few_columns_are_refused_by_every_partition(partition):
    with pytest.raises(DataError, match="2 feature columns cannot be divided among 3 clients; use fewer clients"):
        split_vertically(random_data(num_features=2), partition=partition)


def test_apart_needs_two_clients_and_a_column_for_each_but_the_last():
    assert len(split_vertically(random_data(num_features=1), num_clients=2, partition="apart")) == 2
    with pytest.raises(DataError, match="1 feature columns cannot be divided among 2 clients"):
        split_vertically(random_data(num_features=1), num_clients=3, partition="apart")
    with pytest.raises(ConfigError, match=r'data\.num_clients=1: data\.partition="apart" puts .* at least 2'):
        split_vertically(random_data(), num_clients=1, partition="apart")


def test_too_many_columns_to_compare_are_refused():
    wide = Data(x=sp.csr_array((3, MAX_COMPARED + 1)), edge_index=torch.empty(2, 0, dtype=torch.long))
    with pytest.raises(DataError, match=f"{MAX_COMPARED + 1} feature columns, but this partition compares all pairs"):
        split_vertically(wide, partition="correlation")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"partition": "apartt"}, r"data\.partition='apartt': .*apart"),
        ({"partition": "relations"}, r'data\.partition="relations": needs a data set of several relations'),
        ({"correlation": 0.2}, r"data\.correlation=0\.2: has no effect with data\.partition='features'"),
        ({"partition": "apart", "concentration": 2.0}, r"data\.concentration=2\.0: has no effect"),
        ({"partition": "importance", "concentration": 0.0}, r"data\.concentration=0\.0: must lie in"),
        ({"partition": "correlation", "correlation": 1.5}, r"data\.correlation=1\.5: must lie in \[0, 1\]"),
    ],
)
def test_settings_without_a_meaning_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        split_vertically(random_data(), **arguments)


SIZES = {"name": "synthetic", "num_nodes": 120, "average_degree": 6.0, "num_features": 8, "num_classes": 3}


@pytest.mark.parametrize("partition", DIVIDING)
def test_a_named_data_set_is_divided_as_in_python(partition):
    config = RunConfig(data=DataConfig(partition=partition, **DIVIDING[partition], **SIZES), train=TrainConfig(seed=5))
    (whole,) = load_parties(config.replace(train={"method": "centralized"}))
    for loaded, expected in zip(load_parties(config), divide(whole, config.data, 5), strict=True):
        np.testing.assert_array_equal(loaded.features, expected.features)
        assert pairs(loaded.graph) == pairs(expected.graph)


@pytest.mark.parametrize("partition", DIVIDING)
def test_under_simulated_every_client_has_all_edges(partition):
    config = RunConfig(data=DataConfig(partition=partition, **DIVIDING[partition], **SIZES))
    (whole,) = load_parties(config.replace(train={"method": "centralized"}))
    simulated = load_parties(config.replace(train={"method": "simulated", "num_local_steps": 1}))
    assert all(pairs(party.graph) == pairs(whole.graph) for party in simulated)


def test_parties_that_a_data_set_has_are_not_divided_again():
    demo = RunConfig(data=DataConfig(name="demo"))
    named = [party.name for party in load_parties(demo)]
    assert [party.name for party in load_parties(demo.replace(data={"partition": "relations"}))] == named
    for partition in ("apart", "importance", "correlation", "edges"):
        with pytest.raises(ConfigError, match=f"data.partition='{partition}': .* 'demo' consists of 3 parties already"):
            load_parties(demo.replace(data={"partition": partition}))
