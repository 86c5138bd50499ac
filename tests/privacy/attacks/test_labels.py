"""Labels from gradients, on planted classifiers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glasu.privacy.attacks.labels import (
    choose_labelled,
    cluster_rows,
    complete_model,
    match_classes,
    match_gradients,
    normalize_rows,
    shuffle_labels,
    solve_labels,
)

NODES, WIDTH, CLASSES = 90, 16, 3


def plant(seed: int = 0, dropped: float = 0.0):
    """Return the gradients of a cross-entropy at H (by autograd), H, the labels, and the classifier."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.rand(NODES, WIDTH, generator=rng, dtype=torch.float64)
    weight = torch.randn(WIDTH, CLASSES, generator=rng, dtype=torch.float64)
    labels = torch.arange(NODES) % CLASSES
    leaf = hidden.clone().requires_grad_()
    mask = (torch.rand(NODES, WIDTH, generator=rng) >= dropped).double() / (1 - dropped)
    torch.nn.functional.cross_entropy((leaf * mask) @ weight, labels).backward()
    return leaf.grad.numpy(), hidden.numpy(), labels.numpy(), weight.numpy()


@pytest.mark.parametrize("dropped", [0.0, 0.5])
def test_with_the_classifier_every_label_follows_from_one_gradient(dropped):
    gradients, hidden, labels, weight = plant(dropped=dropped)
    assert np.array_equal(solve_labels(gradients, hidden, weight, np.zeros(CLASSES)), labels)


def test_another_classifier_gives_no_labels():
    gradients, hidden, labels, _ = plant()
    *_, other = plant(seed=1)
    assert (solve_labels(gradients, hidden, other, np.zeros(CLASSES)) == labels).mean() < 0.8


def test_clusters_of_gradients_are_the_classes_up_to_their_names():
    gradients, _, labels, _ = plant()
    assert match_classes(cluster_rows(normalize_rows(gradients), CLASSES, 0), labels, CLASSES) == 1.0


def test_gradient_matching_finds_the_classes_without_the_classifier():
    gradients, hidden, labels, _ = plant(dropped=0.5)
    assert match_classes(match_gradients(gradients, hidden, CLASSES, 0), labels, CLASSES) >= 0.95


def test_one_known_label_of_each_class_names_the_clusters():
    gradients, _, labels, _ = plant()
    known = choose_labelled(labels, 1, 0)
    assert known.sum() == CLASSES
    assert (complete_model(normalize_rows(gradients), labels, known) == labels[~known]).mean() == 1.0


def test_without_rows_the_guess_is_the_most_frequent_known_label():
    labels = np.array([0, 1, 1, 0, 1])
    known = np.array([True, True, True, False, False])
    assert complete_model(np.empty((5, 0)), labels, known).tolist() == [1, 1]


def test_labels_at_unknown_nodes_are_not_read():
    gradients, _, labels, _ = plant()
    known = choose_labelled(labels, 2, 0)
    hidden = np.where(known, labels, 0)
    expected = complete_model(normalize_rows(gradients), labels, known)
    assert np.array_equal(complete_model(normalize_rows(gradients), hidden, known), expected)


def test_a_random_order_is_chance():
    labels = np.arange(300) % CLASSES
    shuffled = shuffle_labels(labels, 0)
    assert np.array_equal(np.bincount(shuffled), np.bincount(labels))
    assert match_classes(shuffled, labels, CLASSES) < 0.45


def test_the_best_assignment_of_names_counts():
    assert match_classes(np.array([2, 2, 0, 1]), np.array([0, 0, 1, 2]), 3) == 1.0
    assert match_classes(np.array([0, 0, 0, 0]), np.array([0, 0, 1, 2]), 3) == 0.5
