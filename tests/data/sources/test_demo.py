from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC

from glasu.config import DataConfig, RunConfig
from glasu.data.alignment import check_parties
from glasu.data.sources.demo import LOYALTY, SURPRISING, draw_news_service
from glasu.data.sources.synthetic import draw_graph

every_seed = pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]
)


@pytest.fixture(scope="module")
def departments():
    return draw_news_service(seed=0)


def average_over_followed(network, features):
    """Return the mean of the followed users' features; edges lead to the follower."""
    graph, nodes = network.graph, network.num_nodes
    adjacency = sp.csr_array((np.ones(graph.num_edges), graph.indices, graph.indptr), shape=(nodes, nodes))
    return sp.diags_array(1 / np.maximum(adjacency.sum(axis=1), 1)) @ adjacency @ features


def fit(model, features, party):
    """Fit a model of scikit-learn to the training users; return it and the scaled features."""
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    return model.fit(features[party.splits.train], party.labels[party.splits.train]), features


def accuracy(predictions, party):
    test = party.splits.test
    return float((predictions[test] == party.labels[test]).mean())


def predict(model, features, party):
    model, features = fit(model, features, party)
    return model.predict(features)


@every_seed
def test_no_department_and_no_average_of_departments_sees_the_interest(seed):
    profile, follower, reading = parties = draw_news_service(seed)
    degree = np.diff(follower.graph.indptr)[:, None]
    views = [profile.features, np.hstack([follower.features, degree]), reading.features]
    probabilities = []
    for view, party in zip(views, parties, strict=True):
        model, scaled = fit(RandomForestClassifier(100, min_samples_leaf=5, random_state=0), view, party)
        probabilities.append(model.predict_proba(scaled))
        assert accuracy(probabilities[-1].argmax(axis=1), party) < 0.5
    average = np.mean(probabilities, axis=0)
    assert accuracy(average.argmax(axis=1), profile) < 0.55
    for share in (0.2, 0.5, 0.8):  # personalised PageRank along the edges
        smooth = average
        for _ in range(20):
            smooth = (1 - share) * average + share * average_over_followed(follower, smooth)
        assert accuracy(smooth.argmax(axis=1), profile) < 0.55


@every_seed
def test_profiles_of_the_followed_users_and_reading_together_show_the_interest(seed):
    profile, follower, reading = draw_news_service(seed)
    together = np.hstack([average_over_followed(follower, profile.features), reading.features])
    assert accuracy(predict(SVC(), together, profile), profile) > 0.85
    assert accuracy(predict(LogisticRegression(), together, profile), profile) < 0.7  # the sum of two effects does not
    own = np.hstack([profile.features, reading.features])  # and neither do a user's own columns
    assert accuracy(predict(SVC(), own, profile), profile) < 0.6


def test_followed_users_do_not_share_interests(departments):
    source, target = departments[1].graph.edge_index()
    labels = departments[1].labels
    assert abs((labels[source] == labels[target]).mean() - 0.25) < 0.03


def test_departments_may_train_together_and_only_one_has_a_network(departments):
    check_parties(departments)
    assert [party.name for party in departments] == ["profile", "follower", "reading"]
    assert [party.graph.num_edges > 0 for party in departments] == [False, True, False]
    assert [party.num_features for party in departments] == [8, 2, 8]
    splits = departments[0].splits
    for part, count in ((splits.train, 960), (splits.validation, 480), (splits.test, 960)):
        assert abs(len(part) - count) <= 3
    assert len(np.unique(departments[0].labels)) == 4
    assert 0 < SURPRISING < 1 - LOYALTY < 0.5


def test_the_follower_network_has_celebrities(departments):
    followers = np.bincount(departments[1].graph.indices, minlength=2400)
    assert followers.max() > 10 * followers.mean()


def test_the_same_seed_gives_the_same_service_and_another_seed_another(departments):
    again, other = draw_news_service(seed=0), draw_news_service(seed=1)
    for before, after in zip(departments, again, strict=True):
        np.testing.assert_array_equal(before.features, after.features)
        np.testing.assert_array_equal(before.graph.indices, after.graph.indices)
    assert not np.array_equal(departments[0].labels, other[0].labels)


@pytest.mark.parametrize("num_users", [12, 100])
def test_a_small_service_works_too(num_users):
    assert [party.num_nodes for party in draw_news_service(seed=0, num_users=num_users)] == [num_users] * 3


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
