from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss

from glasu.model.metrics import NAMES, SELECTED_BY, evaluate, find_probability_error


def random_multiclass(seed: int, nodes: int = 60, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(classes), nodes), rng.integers(0, classes, nodes)


def random_multilabel(seed: int, nodes: int = 60, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.random((nodes, classes)), (rng.random((nodes, classes)) < 0.3).astype(np.int64)


@pytest.mark.parametrize("seed", range(5))
def test_of_one_label_per_node_the_scores_are_those_of_sklearn(seed):
    probabilities, labels = random_multiclass(seed)
    said = probabilities.argmax(axis=1)
    assert evaluate(probabilities, labels, "multiclass") == pytest.approx(
        {
            "accuracy": accuracy_score(labels, said),
            "macro_f1": f1_score(labels, said, average="macro"),
            "loss": log_loss(labels, probabilities, labels=np.arange(5)),
        }
    )


@pytest.mark.parametrize("seed", range(5))
def test_of_several_labels_per_node_the_scores_are_those_of_sklearn(seed):
    probabilities, labels = random_multilabel(seed)
    said = (probabilities > 0.5).astype(np.int64)
    assert evaluate(probabilities, labels, "multilabel") == pytest.approx(
        {
            "accuracy": accuracy_score(labels.ravel(), said.ravel()),
            "macro_f1": f1_score(labels, said, average="macro"),
            "micro_f1": f1_score(labels, said, average="micro"),
            "loss": log_loss(labels.ravel(), probabilities.ravel()),
        }
    )


@pytest.mark.parametrize(("task", "draw"), [("multiclass", random_multiclass), ("multilabel", random_multilabel)])
def test_nodes_with_an_unknown_label_do_not_count(task, draw):
    probabilities, labels = draw(0)
    unknown = labels.copy()
    unknown[::3] = -1
    known = np.arange(len(labels)) % 3 != 0
    assert evaluate(probabilities, unknown, task) == evaluate(probabilities[known], labels[known], task)
    assert evaluate(probabilities, unknown, task) != evaluate(probabilities, labels, task)


def test_a_class_that_nobody_has_and_nobody_predicts_is_left_out_of_the_macro_f1():
    probabilities, labels = random_multiclass(0, classes=4)
    probabilities[:, 2], labels[labels == 2] = 0, 3
    said = probabilities.argmax(axis=1)
    expected = f1_score(labels, said, average="macro")  # sklearn averages over the classes it sees
    assert evaluate(probabilities, labels, "multiclass")["macro_f1"] == pytest.approx(expected)
    assert evaluate(probabilities, labels, "multiclass")["macro_f1"] != pytest.approx(expected * 3 / 4)


def test_a_label_that_nobody_has_and_nobody_predicts_is_left_out_of_the_macro_f1():
    probabilities, labels = random_multilabel(0)
    probabilities[:, 1], labels[:, 1] = 0, 0
    said = (probabilities > 0.5).astype(np.int64)
    expected = f1_score(labels, said, average="macro", zero_division=np.nan)
    assert evaluate(probabilities, labels, "multilabel")["macro_f1"] == pytest.approx(expected)


def test_a_class_that_is_predicted_but_never_right_counts_as_zero():
    probabilities, labels = np.eye(3)[[0, 0, 2]], np.array([0, 0, 1])
    assert evaluate(probabilities, labels, "multiclass")["macro_f1"] == pytest.approx(1 / 3)


def test_single_precision_probabilities_are_scored_in_double():
    probabilities, labels = random_multiclass(0)
    single = probabilities.astype(np.float32)
    assert evaluate(single, labels, "multiclass") == evaluate(single.astype(np.float64), labels, "multiclass")


def test_a_probability_of_zero_costs_much_but_not_infinitely_much():
    loss = evaluate(np.array([[0.0, 1.0]]), np.array([0]), "multiclass")["loss"]
    assert 700 < loss < math.inf


@pytest.mark.parametrize("task", NAMES)
def test_without_labelled_nodes_no_score_is_a_number(task):
    labels = np.full((2, 3), -1) if task == "multilabel" else np.full(2, -1)
    scores = evaluate(np.full((2, 3), 0.5), labels, task)
    assert list(scores) == list(NAMES[task])
    assert all(math.isnan(value) for value in scores.values())


def test_no_positive_label_and_no_positive_prediction_is_no_division_by_zero():
    scores = evaluate(np.zeros((4, 3)), np.zeros((4, 3), np.int64), "multilabel")
    assert scores == {"accuracy": 1, "macro_f1": 0, "micro_f1": 0, "loss": 0}


@pytest.mark.parametrize("task", NAMES)
def test_the_score_that_selects_the_model_is_among_those_computed(task):
    assert SELECTED_BY[task] in NAMES[task]


PRECISIONS = [np.float32, np.float64]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("classes", [2, 7, 500])
def test_softmax_and_sigmoid_outputs_and_their_means_are_class_probabilities(classes, precision):
    logits = torch.from_numpy(10 * np.random.default_rng(0).normal(size=(3, 200, classes)).astype(precision))
    for task, outputs in (("multiclass", logits.softmax(dim=2)), ("multilabel", logits.sigmoid())):
        for values in (*outputs.numpy(), outputs.numpy().mean(axis=0)):
            assert find_probability_error(values, task) == ""
    assert find_probability_error(np.empty((0, classes), precision), "multiclass") == ""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
@pytest.mark.parametrize("value", [1e30, -5.0, -1e-3, 1.001, np.nan, np.inf])
def test_a_value_outside_0_and_1_is_no_probability(value, task, precision):
    values = np.full((4, 2), 0.5, precision)
    values[2, 1] = value
    assert "expected values in 0..1" in find_probability_error(values, task)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_the_rows_of_a_multiclass_task_must_sum_to_1(precision):
    values = np.full((4, 2), 0.5, precision)
    values[3] = 0.5, 0.501
    assert "a row that sums to 1.001" in find_probability_error(values, "multiclass")
    assert find_probability_error(values, "multilabel") == ""
