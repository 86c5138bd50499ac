from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss

from glasu import registry
from glasu.config import TrainConfig
from glasu.model.task import TASKS, Multiclass, Task, task_of
from glasu.protocol.client import Client
from glasu.timing import Stopwatch
from support.tiny import settings, tiny_parties


def evaluate(probabilities: np.ndarray, labels: np.ndarray, task: str) -> dict[str, float]:
    return TASKS[task]().evaluate(probabilities, labels)


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


@pytest.mark.parametrize("task", TASKS)
def test_without_labelled_nodes_no_score_is_a_number(task):
    labels = np.full((2, 3), -1) if task == "multilabel" else np.full(2, -1)
    scores = evaluate(np.full((2, 3), 0.5), labels, task)
    assert list(scores) == [metric.name for metric in TASKS[task].metrics]
    assert all(math.isnan(value) for value in scores.values())


def test_no_positive_label_and_no_positive_prediction_is_no_division_by_zero():
    scores = evaluate(np.zeros((4, 3)), np.zeros((4, 3), np.int64), "multilabel")
    assert scores == {"accuracy": 1, "macro_f1": 0, "micro_f1": 0, "loss": 0}


@pytest.mark.parametrize("task", TASKS)
def test_the_score_that_selects_the_model_is_among_those_computed(task):
    assert TASKS[task].selected_by in TASKS[task].metrics


# The conformance suite: every task passes it.


def labels_of(task: Task, nodes: int = 40, classes: int = 4) -> np.ndarray:
    draw = random_multiclass if task.accepts(np.zeros(1, np.int64)) else random_multilabel
    return draw(0, nodes, classes)[1]


@pytest.mark.parametrize("name", TASKS)
def test_the_config_names_the_task(name):
    assert type(task_of(TrainConfig(task=name))) is TASKS[name]


@pytest.mark.parametrize("name", TASKS)
def test_the_gradient_at_the_logits_is_that_of_the_loss(name):
    task = TASKS[name]()
    labels = task.label_tensor(labels_of(task), torch.float64)
    logits = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, gradient = task.loss_and_gradient(logits, labels)
    for row, column in ((0, 0), (7, 3)):
        step = torch.zeros_like(logits)
        step[row, column] = 1e-6
        rise = task.loss_and_gradient(logits + step, labels)[0] - task.loss_and_gradient(logits - step, labels)[0]
        assert gradient[row, column].item() == pytest.approx(rise / 2e-6, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 4, 500])
@pytest.mark.parametrize("name", TASKS)
def test_scores_of_a_model_and_their_mean_pass_the_check(name, classes, dtype):
    task = TASKS[name]()
    generator = torch.Generator().manual_seed(0)
    scores = [task.scores(30 * torch.randn(200, classes, dtype=dtype, generator=generator)).numpy() for _ in range(3)]
    mean = (scores[0] + scores[1] + scores[2]) / np.asarray(3, scores[0].dtype)
    assert not [error for each in (*scores, mean) if (error := task.find_score_error(each))]


@pytest.mark.parametrize("value", [1e30, -5.0, -1e-6, 1.01, np.nan, np.inf])
@pytest.mark.parametrize("name", TASKS)
def test_scores_out_of_range_are_found(name, value):
    task = TASKS[name]()
    scores = task.scores(torch.zeros(5, 4)).numpy()
    scores[3, 1] = value
    assert "expected values in 0..1" in task.find_score_error(scores)


def test_rows_that_do_not_sum_to_one_are_found_for_one_class_per_node_only():
    scores = np.full((3, 4), 0.5, np.float32)
    assert "sums to 2" in TASKS["multiclass"]().find_score_error(scores)
    assert TASKS["multilabel"]().find_score_error(scores) == ""


@pytest.mark.parametrize("name", TASKS)
def test_an_empty_array_of_scores_is_correct(name):
    assert TASKS[name]().find_score_error(np.empty((0, 3), np.float32)) == ""


@pytest.mark.parametrize("name", TASKS)
def test_unknown_labels_have_the_form_of_the_task_and_nothing_can_be_learned_from_them(name):
    task = TASKS[name]()
    labels = task.unknown_labels(6, ("a", "b", "c"))
    assert task.accepts(labels)
    assert len(task.training_examples(labels, np.arange(6))) == 0
    labels[2:4] = 1
    assert task.training_examples(labels, np.array([1, 2, 5])).tolist() == [2]


def test_a_table_of_predictions_names_the_classes():
    scores = np.array([[0.1, 0.9], [0.8, 0.7]])
    single, several = (TASKS[name]().columns(scores, ("x", "y")) for name in ("multiclass", "multilabel"))
    assert single["prediction"] == ["y", "x"]
    assert several["prediction"] == ["y", "x y"]
    for columns in (single, several):
        assert list(columns) == ["prediction", "p_x", "p_y"]
        np.testing.assert_array_equal(columns["p_y"], [0.9, 0.7])
    assert TASKS["multiclass"]().predict(scores, ("x", "y")).tolist() == ["y", "x"]
    assert TASKS["multilabel"]().predict(scores, ("x", "y")).tolist() == [[0, 1], [1, 1]]


class Rejecting(Multiclass):
    """A task with one output more than there are classes."""

    def head_width(self, classes: Sequence[str]) -> int:
        return len(classes) + 1


def test_the_task_decides_the_width_of_the_head():
    registry.register("task", "rejecting", Rejecting)
    party = tiny_parties(1)[0]
    widths = [
        Client(settings(task=task), party, index=0, names=["a"], watch=Stopwatch(time.perf_counter))
        .learner.weights()["classifier.bias"]
        .shape
        for task in ("multiclass", "rejecting")
    ]
    assert widths == [(3,), (4,)]


@pytest.mark.parametrize("task", TASKS)
def test_an_example_of_a_node_task_is_a_node(task):
    examples = np.array([1, 5, 8])
    assert TASKS[task]().nodes_of(tiny_parties(1)[0], examples) is examples
