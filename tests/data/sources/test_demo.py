from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression

from glasu.config import DataConfig, RunConfig
from glasu.data.alignment import check_parties
from glasu.data.sources.demo import DEPARTMENTS, INTERESTS, news_service
from glasu.data.sources.synthetic import draw_graph


@pytest.fixture(scope="module")
def departments():
    return news_service(seed=0)


def smoothed(party):
    """Return one- and two-hop means of the features, with the node itself."""
    graph, nodes = party.graph, party.num_nodes
    adjacency = sp.csr_array((np.ones(graph.num_edges), graph.indices, graph.indptr), shape=(nodes, nodes))
    adjacency = adjacency + sp.eye_array(nodes)
    mean = sp.diags_array(1 / adjacency.sum(axis=1)) @ adjacency
    once = mean @ party.features
    return np.hstack([once, mean @ once])


def probe(features, party):
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    train, test = party.splits.train, party.splits.test
    model = LogisticRegression(C=0.03, max_iter=500).fit(features[train], party.labels[train])
    return model.score(features[test], party.labels[test])


def test_a_department_alone_sees_part_of_the_truth_and_together_they_see_most_of_it(departments):
    views = [smoothed(party) for party in departments]
    for view, party in zip(views, departments, strict=True):
        assert 0.5 < probe(view, party) < 0.7
    assert 0.88 < probe(np.hstack(views), departments[0]) < 0.96


def test_any_two_interests_are_told_apart_by_at_least_two_departments():
    groups = np.array([department.groups for department in DEPARTMENTS])
    for first in range(len(INTERESTS)):
        for second in range(first):
            assert (groups[:, first] != groups[:, second]).sum() >= 2


def test_departments_may_train_together_and_networks_are_as_told(departments):
    check_parties(departments)
    professional, personal, follower = departments
    assert [party.name for party in departments] == ["professional", "personal", "follower"]
    assert [len(part) for part in (follower.splits.train, follower.splits.validation)] == [300, 600]
    for party, symmetric in ((professional, True), (personal, True), (follower, False)):
        source, target = party.graph.edge_index()
        edges = set(zip(source.tolist(), target.tolist(), strict=True))
        assert all((b, a) in edges for a, b in edges) == symmetric


def test_the_follower_network_has_celebrities(departments):
    followers = np.bincount(departments[2].graph.indices, minlength=3000)
    assert followers.max() > 20 * followers.mean()


def test_the_same_seed_gives_the_same_service_and_another_seed_another(departments):
    again, other = news_service(seed=0), news_service(seed=1)
    for before, after in zip(departments, again, strict=True):
        np.testing.assert_array_equal(before.features, after.features)
        np.testing.assert_array_equal(before.graph.indices, after.graph.indices)
    assert not np.array_equal(departments[0].labels, other[0].labels)


@pytest.mark.parametrize("num_users", [12, 100])
def test_a_small_service_works_too(num_users):
    assert [party.num_nodes for party in news_service(seed=0, num_users=num_users)] == [num_users] * 3


def synthetic_graph(**sizes):
    return draw_graph(RunConfig(data=DataConfig(name="synthetic", **sizes)))


def test_a_synthetic_graph_has_the_sizes_asked_for():
    whole = synthetic_graph(num_nodes=5000, average_degree=20.0, num_features=7, num_classes=4)
    assert whole.features.shape == (5000, 7)
    assert set(whole.labels.tolist()) == {0, 1, 2, 3}
    assert abs(whole.graph.num_edges / 5000 - 20) < 0.5


def test_a_synthetic_graph_is_a_valid_symmetric_graph_without_loops():
    graph = synthetic_graph(num_nodes=300, average_degree=40.0).graph
    source, target = graph.edge_index()
    assert (source != target).all()
    key = target * 300 + source
    assert (np.diff(key) > 0).all()
    assert set(key.tolist()) == set((source * 300 + target).tolist())
    assert (graph.indptr.dtype, graph.indices.dtype) == (np.int64, np.int32)


def test_synthetic_classes_show_in_features_and_edges():
    whole = synthetic_graph(num_nodes=3000)
    source, target = whole.graph.edge_index()
    assert (whole.labels[source] == whole.labels[target]).mean() > 0.6
    party = whole
    model = LogisticRegression(max_iter=500).fit(party.features[:1500], party.labels[:1500])
    assert model.score(party.features[1500:], party.labels[1500:]) > 0.5


@pytest.mark.parametrize("sizes", [{"num_nodes": 1}, {"num_nodes": 50, "average_degree": 0.0}, {"num_nodes": 3}])
def test_tiny_synthetic_graphs_and_graphs_without_edges_exist(sizes):
    whole = synthetic_graph(**sizes)
    assert whole.graph.num_nodes == sizes["num_nodes"]


def test_a_synthetic_graph_is_a_function_of_its_seed():
    once, again = synthetic_graph(num_nodes=500), synthetic_graph(num_nodes=500)
    np.testing.assert_array_equal(once.graph.indices, again.graph.indices)
    assert not np.array_equal(once.labels, synthetic_graph(num_nodes=500, seed=1).labels)
