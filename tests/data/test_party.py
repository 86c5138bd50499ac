from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.utils import coalesce, remove_self_loops

from glasu.data.graph import Graph
from glasu.data.party import PartyData, Splits, have_labels, hide_labels, measure_labels
from glasu.data.preprocessing import compact_features
from glasu.errors import DataError


def party(**changes):
    graph = Graph.from_edges(np.array([0, 1]), np.array([1, 2]), 3)
    fields = {"name": "a", "ids": np.arange(3), "features": np.ones((3, 2), np.float32), "graph": graph}
    return PartyData(**{**fields, **changes})


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40))
def test_a_graph_holds_the_edges_that_pyg_keeps_without_loops_and_duplicates(pairs):
    edges = np.array(pairs, np.int64).reshape(-1, 2).T
    graph = Graph.from_edges(edges[0], edges[1], 7)
    expected, _ = remove_self_loops(torch.from_numpy(edges.copy()))
    expected = coalesce(expected, num_nodes=7, sort_by_row=False)
    np.testing.assert_array_equal(graph.edge_index(), expected.numpy())


def test_a_party_has_numeric_labels_if_they_are_floats():
    assert party(labels=np.array([0.5, 1.0, np.nan])).has_numeric_labels
    assert not party(labels=np.array([0, 1, -1]), classes=("x", "y")).has_numeric_labels
    assert not party().has_numeric_labels


def test_weights_of_duplicate_edges_add_up_as_in_pyg():
    edges = torch.tensor([[0, 2, 0, 1, 1], [1, 1, 1, 1, 0]])
    weights = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    graph = Graph.from_edges(*edges.numpy(), 3, weights.numpy())
    expected = coalesce(*remove_self_loops(edges, weights), num_nodes=3, sort_by_row=False)
    np.testing.assert_array_equal(graph.edge_index(), expected[0].numpy())
    np.testing.assert_array_equal(graph.weights, expected[1].numpy())


def test_a_hub_and_isolated_nodes_have_the_neighbours_they_were_given():
    graph = Graph.from_edges(np.arange(1, 9), np.zeros(8, int), 10)
    assert np.diff(graph.indptr).tolist() == [8] + [0] * 9
    assert graph.indices.tolist() == list(range(1, 9))


def test_a_graph_may_have_no_edges():
    graph = Graph.from_edges(np.empty(0, int), np.empty(0, int), 4)
    assert graph.num_edges == 0
    assert graph.num_nodes == 4
    assert graph.edge_index().shape == (2, 0)


@pytest.mark.parametrize(("source", "target", "said"), [([0, 3], [1, 1], "source"), ([0, 1], [1, -1], "target")])
def test_an_edge_out_of_range_is_named(source, target, said):
    with pytest.raises(DataError, match=f"edge 1: its {said} is out of range"):
        Graph.from_edges(np.array(source), np.array(target), 3)


def test_a_weight_that_is_not_finite_is_refused():
    with pytest.raises(DataError, match="edge 0: its weight"):
        Graph.from_edges(np.array([0]), np.array([1]), 2, np.array([np.nan]))


@pytest.mark.parametrize(
    ("indptr", "indices", "weights", "said"),
    [
        ([], [], None, "indptr must rise from 0"),
        ([1, 2], [0], None, "indptr must rise from 0"),
        ([0, 2, 1, 2], [0, 1], None, "indptr must rise from 0"),
        ([0, 1, 2], [0], None, "indptr must rise from 0 to the number of edges"),
        ([0, 1, 1], [1, 0], None, "indptr must rise from 0 to the number of edges"),
        ([0, 1, 1], [2], None, r"indices must lie in 0\.\.1"),
        ([0, 1, 1], [-1], None, r"indices must lie in 0\.\.1"),
        ([0, 1, 1], [1], [1.0, 2.0], "2 weights for 1 edges"),
        ([0, 1, 1], [1], [-0.5], "an edge weight is negative"),
    ],
)
def test_a_graph_that_exists_is_a_graph_that_can_be_used(indptr, indices, weights, said):
    weights = None if weights is None else np.array(weights, np.float32)
    with pytest.raises(DataError, match=said):
        Graph(np.array(indptr, np.int64), np.array(indices, np.int32), weights)


def test_negative_weights_are_refused_and_zero_is_allowed():
    with pytest.raises(DataError, match="negative"):
        Graph.from_edges(np.array([0, 1]), np.array([1, 0]), 2, np.array([1.0, -1.0]))
    assert Graph.from_edges(np.array([0]), np.array([1]), 2, np.array([0.0])).weights.tolist() == [0.0]


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (np.array([3, 1, 2], np.uint64), np.dtype(np.int64)),
        (np.array([3, 1, 2], np.int16), np.dtype(np.int64)),
        ([3, 1, 2], np.dtype(np.int64)),
        (np.array(["x", "y", "long name"], object), np.dtype("<U9")),
        (["x", "y", "z"], np.dtype("<U1")),
    ],
)
def test_ids_of_any_form_become_64_bit_integers_or_strings(ids, kind):
    got = party(ids=ids)
    assert got.ids.dtype == kind
    assert got.ids.tolist() == list(ids)
    assert len(got.ids_digest()) == 64


def test_ids_of_other_forms_have_the_digest_of_the_plain_ones():
    numbers, words = party(ids=np.array([3, 1, 2])), party(ids=np.array(["x", "y", "z"]))
    assert party(ids=np.array([3, 1, 2], np.uint64)).ids_digest() == numbers.ids_digest()
    assert party(ids=np.array(["x", "y", "z"], object)).ids_digest() == words.ids_digest()


def test_the_digest_of_columns_tells_names_and_orders_apart():
    names = [(), ("p", "q"), ("q", "p"), ("p", "r"), ("pq", "")]
    digests = [party(feature_names=own).columns_digest() for own in names]
    assert digests[0] == ""
    assert len(set(digests)) == len(names)


def test_nodes_count_as_labelled_where_every_label_is_known():
    assert have_labels(np.array([0, -1, 2])).tolist() == [True, False, True]
    assert have_labels(np.array([[0, 1], [-1, 1], [-1, -1]])).tolist() == [True, False, False]
    assert have_labels(np.empty((0, 4), int)).shape == (0,)
    assert have_labels(np.array([-1.0, np.nan, 0.0])).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("labels", "classes", "said"),
    [
        (np.array([0.0, 1.0, 0.0]), ("x", "y"), "give integer labels for classification"),
        (np.zeros((3, 2)), (), "one float per node and no classes"),
        (np.array([1.0, -np.inf, np.nan]), (), "the label of node 1 is infinite or beyond 1e.100; use another"),
        (np.array([np.nan, 1.0, 2e100]), (), "the label of node 2 is infinite or beyond 1e.100"),
        (np.array([1.0, 2.0]), (), "2 labels for 3 nodes"),
    ],
)
def test_numbers_to_predict_are_one_finite_float_per_node(labels, classes, said):
    with pytest.raises(DataError, match=said):
        party(labels=labels, classes=classes)


def test_numbers_to_predict_become_doubles_and_change_the_digest():
    single, double = (party(labels=np.array([0.5, 2, np.nan], kind)) for kind in (np.float32, np.float64))
    assert single.labels.dtype == np.float64
    assert single.data_digest() == double.data_digest()
    assert single.data_digest() != party(labels=np.array([0.5, 3, np.nan])).data_digest()


@settings(deadline=None)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50))
def test_the_scale_of_labels_is_numpys_mean_and_deviation(labels):
    mean, deviation = measure_labels(np.array(labels))
    assert mean == pytest.approx(np.mean(labels), rel=1e-9, abs=1e-9)
    assert deviation == pytest.approx(np.std(labels) or 1.0, rel=1e-6, abs=1e-6) or np.std(labels) < 1e-6


def test_hidden_labels_are_unknown_and_the_others_stay():
    for labels in (np.array([2, 1, 0]), np.array([0.5, 1.5, 2.5]), np.array([[0, 1], [1, 0], [1, 1]])):
        hidden = hide_labels(labels, np.array([1]))
        assert have_labels(hidden).tolist() == [True, False, True]
        np.testing.assert_array_equal(hidden[[0, 2]], labels[[0, 2]])


def test_restricting_renumbers_the_nodes_in_the_order_given():
    graph = Graph.from_edges(np.array([0, 1, 2]), np.array([1, 2, 3]), 4, np.array([1.0, 2.0, 3.0]))
    part = graph.restrict(np.array([3, 2, 0]))
    assert part.edge_index().tolist() == [[1], [0]]  # 2 -> 3
    assert part.weights.tolist() == [3.0]


def test_a_party_may_have_one_feature_and_no_edges():
    lonely = party(features=np.ones((3, 1)), graph=Graph.from_edges(np.empty(0, int), np.empty(0, int), 3))
    assert (lonely.num_nodes, lonely.num_features, lonely.graph.num_edges) == (3, 1, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"features": np.ones((3, 0))}, "at least one column"),
        ({"features": np.ones((2, 2))}, "features are for 2 nodes"),
        ({"features": np.array([[1.0, np.nan]] * 3)}, "NaN or infinity"),
        ({"features": np.array([[1.0, np.inf]] * 3)}, "NaN or infinity"),
        ({"features": sp.csr_array(np.array([[np.nan, 0, 0, 0, 0, 0, 0]] * 3))}, "NaN or infinity"),
        ({"graph": Graph.from_edges(np.array([0]), np.array([1]), 2)}, "edges are for 2 nodes"),
        ({"ids": np.array([0, 1, 1])}, "distinct"),
        ({"feature_names": ("x",)}, "1 names for 2 feature columns"),
        ({"feature_names": ("x", "x")}, "two columns have the name 'x'"),
        ({"labels": np.array([0, 1, 2]), "classes": ("x", "y")}, "the label of node 2 is out of range"),
        ({"labels": np.array([0, 1, -2]), "classes": ("x", "y")}, "the label of node 2 is out of range"),
        ({"labels": np.array([0, 1]), "classes": ("x", "y")}, "2 labels for 3 nodes"),
        ({"labels": np.zeros(3, int), "classes": ("x",)}, "at least two"),
        ({"labels": np.zeros((3, 3), int), "classes": ("x", "y")}, "3 label columns for 2 classes"),
        ({"labels": np.full((3, 2), 2), "classes": ("x", "y")}, "the label of node 0 is out of range"),
        ({"splits": Splits(np.array([0]), np.array([3]), np.array([1]))}, "a split names a node that does not exist"),
        ({"splits": Splits(np.array([0]), np.array([0]), np.array([1]))}, "two splits"),
        ({"splits": Splits(np.array([1, 0]), np.array([2]), np.array([], int))}, "'train' must be increasing integers"),
        ({"splits": Splits(np.array([0]), np.array([2]), np.array([1, 1]))}, "'test' must be increasing integers"),
        ({"splits": Splits(np.array([0]), np.array([False, False, True]), np.array([1]))}, "use np.unique"),
    ],
)
def test_a_party_that_exists_is_a_party_that_can_train(changes, said):
    with pytest.raises(DataError, match=said):
        party(**changes)


def test_equal_features_have_one_form_whether_they_come_sparse_or_dense():
    few = np.zeros((4, 10), np.float64)
    few[1, 3] = 2
    many = np.ones((4, 10))
    assert sp.issparse(compact_features(few))
    assert sp.issparse(compact_features(sp.coo_array(few)))
    assert isinstance(compact_features(sp.csr_array(many)), np.ndarray)
    assert compact_features(few).dtype == compact_features(sp.csr_array(many)).dtype == np.float32


def test_the_digest_of_ids_tells_orders_apart_and_integers_of_any_width_alike():
    assert party(ids=np.array([0, 1, 2])).ids_digest() != party(ids=np.array([0, 2, 1])).ids_digest()
    assert party(ids=np.array([0, 1, 2], np.int32)).ids_digest() == party(ids=np.array([0, 1, 2])).ids_digest()
    assert party(ids=np.array(["a", "b", "c"])).ids_digest() != party(ids=np.array(["a", "c", "b"])).ids_digest()
