"""Propagation over edges, compared with dense numpy and with the layers of PyG."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch_geometric.nn import APPNP, LabelPropagation

from glasu.data.graph import Graph
from glasu.model.propagation import ALPHAS, choose_alpha, propagate, start_from_labels
from glasu.model.task import Multiclass, Multilabel
from support.tiny import tiny_parties


def random_walk(graph: Graph) -> np.ndarray:
    """Return D^-1 (A + I) as a dense matrix."""
    A = np.eye(graph.num_nodes)
    source, target = graph.edge_index()
    A[target, source] = 1 if graph.weights is None else graph.weights
    return A / A.sum(axis=1, keepdims=True)


def edges_of(W: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a dense matrix as edge_index and weights, as PyG wants them."""
    target, source = np.nonzero(W)
    return torch.from_numpy(np.stack([source, target])), torch.from_numpy(W[target, source])


@pytest.fixture(params=[0, 1], ids=["plain edges", "weighted edges"])
def graph(request):
    return tiny_parties()[request.param].graph


@pytest.fixture
def scores(graph):
    drawn = np.random.default_rng(3).uniform(size=(graph.num_nodes, 3))
    return drawn / drawn.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("steps", [1, 10])
def test_it_is_personalised_pagerank_of_a_dense_matrix_and_of_pyg(graph, scores, alpha, steps):
    W, Z = random_walk(graph), scores
    for _ in range(steps):
        Z = alpha * scores + (1 - alpha) * W @ Z
    got = propagate(graph, scores, alpha, steps)
    np.testing.assert_allclose(got, Z, rtol=0, atol=1e-14)
    edge_index, weights = edges_of(W)
    layer = APPNP(steps, alpha, add_self_loops=False, normalize=False)
    np.testing.assert_allclose(got, layer(torch.from_numpy(scores), edge_index, weights), rtol=0, atol=1e-14)


def test_many_steps_reach_the_fixed_point(graph, scores):
    W = random_walk(graph)
    exact = 0.2 * np.linalg.solve(np.eye(len(W)) - 0.8 * W, scores)
    np.testing.assert_allclose(propagate(graph, scores, 0.2, steps=200), exact, rtol=0, atol=1e-12)


def test_rows_stay_probabilities_and_nodes_without_edges_keep_theirs(graph, scores):
    got = propagate(graph, scores.astype(np.float32), 0.1)
    assert got.dtype == np.float32
    assert not Multiclass().find_score_error(got)
    np.testing.assert_allclose(got[-3:], scores[-3:], rtol=1e-6)  # they have no edge anywhere
    assert np.abs(got[:-3] - scores[:-3]).max() > 0.05


@pytest.mark.parametrize("alpha", ALPHAS[1:])
def test_label_propagation_is_that_of_pyg(alpha):
    party = tiny_parties()[0]
    start = start_from_labels(Multiclass(), party)
    train = party.splits.train
    one_hot = np.eye(3)[party.labels[train]]
    assert np.array_equal(start[train], one_hot)
    assert np.allclose(np.delete(start, train, axis=0), one_hot.mean(axis=0))
    edge_index, weights = edges_of(random_walk(party.graph))
    expected = LabelPropagation(10, 1 - alpha)(torch.from_numpy(start), edge_index, edge_weight=weights)
    np.testing.assert_allclose(propagate(party.graph, start, alpha), expected, rtol=0, atol=1e-14)


def test_labels_of_several_classes_are_their_own_scores():
    labels = np.array([[1, 0, 1], [0, 0, 0]])
    assert np.array_equal(Multilabel().label_scores(labels, ("x", "y", "z")), labels)


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [((0.5, 0.7, 0.6), 0.5), ((0.7, 0.5, 0.7), 0.1), ((math.nan,) * 3, 0.1), ((math.nan, math.nan, 0.2), 1.0)],
)
def test_the_best_alpha_is_chosen_and_the_first_of_equals(scores, chosen):
    found = dict(zip((0.1, 0.5, 1.0), scores, strict=True))
    assert choose_alpha(found.__getitem__, found) == chosen
