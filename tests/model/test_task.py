from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    log_loss,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)
from sklearn.utils.class_weight import compute_class_weight

from glasu import registry
from glasu.config import TrainConfig
from glasu.errors import ConfigError
from glasu.model.task import TASKS, Multiclass, Task, check_predictions, make_task
from glasu.protocol.client import Client
from glasu.timing import Stopwatch
from support.tiny import settings as tiny_settings
from support.tiny import tiny_parties


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


def test_macro_f1_omits_a_class_without_labels_and_predictions():
    probabilities, labels = random_multiclass(0, classes=4)
    probabilities[:, 2], labels[labels == 2] = 0, 3
    said = probabilities.argmax(axis=1)
    expected = f1_score(labels, said, average="macro")  # sklearn averages over the classes it sees
    assert evaluate(probabilities, labels, "multiclass")["macro_f1"] == pytest.approx(expected)
    assert evaluate(probabilities, labels, "multiclass")["macro_f1"] != pytest.approx(expected * 3 / 4)


def test_macro_f1_omits_a_label_that_is_never_set_or_predicted():
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
    labels = TASKS[task]().unknown_labels(2, "abc")
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


LABELS = {
    "multiclass": random_multiclass(0, 40, 4)[1],
    "multilabel": random_multilabel(0, 40, 4)[1],
    "binary": random_multiclass(0, 40, 2)[1],
    "regression": np.random.default_rng(0).normal(5e6, 1e3, 40),
}
CLASSES = {"multiclass": "abcd", "multilabel": "abcd", "binary": "ab", "regression": ""}


def fit(name: str, **train: Any) -> Task:
    """Return a task that has seen its labels."""
    task = TASKS[name]()
    task.fit(LABELS[name], CLASSES[name], TrainConfig(task=name, **train))
    return task


def random_logits(name: str, nodes: int = 40, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(nodes, TASKS[name]().head_width(CLASSES[name]), dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", TASKS)
def test_the_config_names_the_task(name):
    assert type(make_task(TrainConfig(task=name))) is TASKS[name]


@pytest.mark.parametrize("name", TASKS)
def test_the_gradient_at_the_logits_is_that_of_the_loss(name):
    task, logits = fit(name), random_logits(name)
    labels = task.label_tensor(LABELS[name], torch.float64)
    _, gradient = task.loss_and_gradient(logits, labels)
    for row, column in ((0, 0), (7, logits.shape[1] - 1)):
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
    shape = 200, task.head_width(["class"] * classes)
    scores = [task.scores(300 * torch.randn(shape, dtype=dtype, generator=generator)).numpy() for _ in range(3)]
    mean = (scores[0] + scores[1] + scores[2]) / np.asarray(3, scores[0].dtype)
    assert not [error for each in (*scores, mean) if (error := task.find_score_error(each))]


@pytest.mark.parametrize("value", [1e30, -5.0, -1e-6, 1.01, np.nan, np.inf])
@pytest.mark.parametrize("name", TASKS)
def test_scores_out_of_range_are_found(name, value):
    task = TASKS[name]()
    scores = task.scores(torch.zeros(5, task.head_width(CLASSES[name]))).numpy()
    bounds, factor = ("-100..100", 100) if name == "regression" else ("0..1", 1)
    scores[3, -1] = -1.01 * factor if value == -1e-6 and name == "regression" else factor * value
    assert f"expected values in {bounds}, got" in task.find_score_error(scores)


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
    labels = task.unknown_labels(6, CLASSES[name])
    assert task.accepts(labels, CLASSES[name])
    assert len(task.training_examples(labels, np.arange(6))) == 0
    labels[2:4] = 1
    assert task.training_examples(labels, np.array([1, 2, 5])).tolist() == [2]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_accepts_its_own_labels_only(name):
    fitting = [other for other in TASKS if TASKS[name]().accepts(LABELS[other], CLASSES[other])]
    assert fitting == (["multiclass", "binary"] if name == "multiclass" else [name])


@pytest.mark.parametrize("name", TASKS)
def test_scores_in_a_message_have_the_stated_width(name):
    task = TASKS[name]()
    assert task.scores(random_logits(name)).shape == (40, task.num_scores(len(CLASSES[name])))


# Class weights.

WEIGHTS = {"none": np.ones(4), "balanced": None, (1.0, 2.0, 0.5, 4.0): np.array([1.0, 2.0, 0.5, 4.0])}


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_the_weighted_loss_of_all_training_labels_is_that_of_torch(weights):
    logits, labels = random_logits("multiclass").requires_grad_(), torch.from_numpy(LABELS["multiclass"])
    given = WEIGHTS[weights]
    if given is None:
        given = compute_class_weight("balanced", classes=np.arange(4), y=labels.numpy())
    expected = torch.nn.functional.cross_entropy(logits, labels, torch.from_numpy(given))
    expected.backward()
    loss, gradient = fit("multiclass", class_weights=weights).loss_and_gradient(logits.detach(), labels)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("weights", ["none", "balanced", (1.0, 3.0), (10.0, 30.0)], ids=str)
def test_the_binary_loss_is_that_of_torch_with_a_weight_of_the_positive_class(weights):
    logits, labels = random_logits("binary").requires_grad_(), torch.from_numpy(LABELS["binary"])
    positive, negative = int((labels == 1).sum()), int((labels == 0).sum())
    pos_weight = {"none": 1.0, "balanced": negative / positive}.get(weights, 3.0)
    mean_weight = (negative + pos_weight * positive) / len(labels)  # GLASU divides by it, so the step size stays
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits[:, 0], labels.double(), pos_weight=torch.tensor(pos_weight, dtype=torch.float64)
    )
    (expected / mean_weight).backward()
    loss, gradient = fit("binary", class_weights=weights).loss_and_gradient(logits.detach(), labels)
    assert loss == pytest.approx(expected.item() / mean_weight, rel=1e-12)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-12, atol=1e-15)


def test_the_weighted_losses_of_batches_have_the_mean_of_the_whole():
    task, logits, labels = fit("binary", class_weights="balanced"), random_logits("binary"), LABELS["binary"]
    labels = task.label_tensor(labels, torch.float64)
    parts = [task.loss_and_gradient(logits[rows], labels[rows])[0] for rows in torch.arange(40).split(10)]
    assert np.mean(parts) == pytest.approx(task.loss_and_gradient(logits, labels)[0], rel=1e-12)


def test_a_class_without_training_labels_has_no_share_in_the_balance():
    task = TASKS["multiclass"]()
    task.fit(np.array([0, 0, 0, 2]), "abc", TrainConfig(class_weights="balanced"))
    assert task.weights.tolist() == pytest.approx([2 / 3, 0, 2])


def test_class_weights_need_one_number_per_class():
    with pytest.raises(
        ConfigError, match=r"train.class_weights=\[1.0, 2.0\]: there are 4 classes; give one weight per"
    ):
        fit("multiclass", class_weights=(1.0, 2.0))


# Regression.


def test_the_loss_of_numbers_is_the_squared_error_of_standardised_labels_in_any_unit():
    logits, labels = random_logits("regression").requires_grad_(), LABELS["regression"]
    expected = torch.nn.functional.mse_loss(logits[:, 0], torch.from_numpy((labels - labels.mean()) / labels.std()))
    expected.backward()
    for factor in (1.0, 1e-9, -1e12):
        task = TASKS["regression"]()
        task.fit(factor * labels, (), TrainConfig())
        sign = math.copysign(1.0, factor)
        own = task.label_tensor(factor * labels, torch.float64)
        loss, gradient = task.loss_and_gradient(sign * logits.detach(), own)
        assert loss == pytest.approx(expected.item(), rel=1e-9)
        torch.testing.assert_close(sign * gradient, logits.grad, rtol=1e-8, atol=1e-12)


def test_predicted_numbers_are_in_the_unit_of_the_labels():
    task, labels = fit("regression"), LABELS["regression"]
    standardized = task.label_tensor(labels, torch.float32)[:, None]
    assert standardized.mean().abs() < 1e-6
    converted = task.convert_scores(task.scores(standardized).numpy())
    np.testing.assert_allclose(converted[:, 0], labels, rtol=1e-9)
    assert task.columns(converted, ()).keys() == {"prediction"}
    np.testing.assert_array_equal(task.predict(converted, ()), converted[:, 0])


def test_a_constant_label_is_not_divided_by_zero():
    task = TASKS["regression"]()
    task.fit(np.full(4, 7.0), (), TrainConfig())
    assert task.label_tensor(np.full(4, 7.0), torch.float64).tolist() == [0, 0, 0, 0]


def test_a_prediction_is_cut_at_100_deviations_and_a_diverged_one_stays_visible():
    logits = torch.tensor([[5e4], [-1e9], [3.0], [math.inf], [math.nan]])
    assert TASKS["regression"]().scores(logits)[:3, 0].tolist() == [100, -100, 3]
    assert not TASKS["regression"]().scores(logits)[3:].isfinite().any()


# Metrics of rankings and numbers, against scikit-learn.

FEW = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.50001, 1.0])  # so that ties occur
RANKED = st.lists(st.tuples(st.booleans(), FEW | st.floats(0, 1)), min_size=1, max_size=40)
SINGLE = st.floats(-1e6, 1e6, width=32)  # squares of smaller numbers would overflow in a quotient, also in scikit-learn
NUMBERS = st.lists(st.tuples(SINGLE, SINGLE), min_size=1, max_size=40)


@settings(deadline=None)
@given(RANKED)
def test_rankings_are_measured_as_sklearn_does(rows):
    labels, positive = np.array([int(label) for label, _ in rows]), np.array([score for _, score in rows])
    scores = np.stack([1 - positive, positive], axis=1)
    found = evaluate(scores, labels, "binary")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one class only
        area = roc_auc_score(labels, positive) if 0 < labels.mean() < 1 else math.nan
        precision = average_precision_score(labels, positive)
    said = scores.argmax(axis=1)
    assert found["roc_auc"] == pytest.approx(area, abs=1e-12, nan_ok=True)
    assert found["average_precision"] == pytest.approx(precision, abs=1e-12)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, said), abs=1e-12)
    assert found["macro_f1"] == pytest.approx(f1_score(labels, said, average="macro"), abs=1e-12)
    assert list(found) == [metric.name for metric in TASKS["binary"].metrics]


@settings(deadline=None)
@given(NUMBERS)
def test_numbers_are_measured_as_sklearn_does(rows):
    labels, predicted = (np.array(column) for column in zip(*rows, strict=True))
    found = evaluate(predicted[:, None], labels, "regression")
    assert found["mse"] == pytest.approx(mean_squared_error(labels, predicted), rel=1e-12)
    expected = r2_score(labels, predicted) if len(labels) > 1 else math.nan
    assert found["r2"] == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize(("predicted", "r2"), [([3.0, 3.0], 1.0), ([3.0, 4.0], 0.0)])
def test_of_equal_labels_r2_is_that_of_sklearn(predicted, r2):
    assert r2_score([3.0, 3.0], predicted) == r2
    assert evaluate(np.array(predicted)[:, None], np.array([3.0, 3.0]), "regression")["r2"] == r2


def test_where_the_selecting_score_is_undefined_the_lowest_loss_selects():
    binary, regression = TASKS["binary"](), TASKS["regression"]()
    assert binary.selection_score({"roc_auc": 0.7, "loss": 0.2}) == 0.7
    assert binary.selection_score({"roc_auc": math.nan, "loss": 0.2}) == -0.2
    assert regression.selection_score({"r2": math.nan, "mse": 3.0}) == -3.0
    assert math.isnan(binary.selection_score({"roc_auc": math.nan, "loss": math.nan}))


def test_a_table_of_binary_predictions_has_both_classes():
    columns = TASKS["binary"]().columns(np.array([[0.25, 0.75], [0.5, 0.5]]), ("no", "yes"))
    assert columns["prediction"] == ["yes", "no"]
    assert list(columns) == ["prediction", "p_no", "p_yes"]


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
        Client(tiny_settings(task=task), party, index=0, names=["a"], watch=Stopwatch(time.perf_counter))
        .learner.weights()["classifier.bias"]
        .shape
        for task in ("multiclass", "rejecting")
    ]
    assert widths == [(3,), (4,)]


@pytest.mark.parametrize("task", TASKS)
def test_an_example_of_a_node_task_is_a_node(task):
    examples = np.array([1, 5, 8])
    targets = TASKS[task]().find_targets(tiny_parties(1)[0], examples)
    assert targets.nodes is targets.examples is examples
    assert targets.rows is None


def is_collapsed(task: Task, scores: np.ndarray, labels: np.ndarray, classes: int) -> bool:
    names = [str(index) for index in range(classes)]
    return task.is_collapsed(task.evaluate(scores, labels), labels, names)


def test_a_model_no_better_than_the_most_frequent_class_has_learned_nothing_whatever_it_predicts():
    labels = np.repeat([0, 1, 2], [50, 25, 25])
    constant, several, useful = np.zeros(100, int), labels.copy(), labels.copy()
    several[:50], several[50:] = np.arange(50) % 2, np.arange(50) % 3  # 25 + 16 hits
    useful[np.arange(100) % 10 < 4] = 0  # 80 hits
    said = {"constant": constant, "several": several, "useful": useful}
    found = {name: is_collapsed(Multiclass(), np.eye(3)[each], labels, 3) for name, each in said.items()}
    assert found == {"constant": True, "several": True, "useful": False}


@pytest.mark.parametrize("hits", [50, 54, 56, 70])
def test_a_model_has_learned_something_if_it_exceeds_the_most_frequent_class_by_more_than_a_standard_error(hits):
    labels = np.repeat([0, 1], 50)
    said = labels.copy()
    said[: 100 - hits] = 1
    assert is_collapsed(Multiclass(), np.eye(2)[said], labels, 2) == (hits < 55)  # one standard error is 5 nodes


def test_of_two_classes_the_ranking_decides_and_not_the_threshold():
    labels = (np.arange(400) % 20 == 0).astype(np.int64)  # 5 % are positive
    noise = np.random.default_rng(0).uniform(0, 0.1, 400)
    ranked, blind = noise + 0.05 * labels, noise
    collapsed = [is_collapsed(TASKS["binary"](), np.stack([1 - p, p], axis=1), labels, 2) for p in (ranked, blind)]
    assert collapsed == [False, True]


def test_of_several_classes_per_node_predicting_the_usual_value_of_each_class_is_nothing():
    labels = (np.random.default_rng(0).random((200, 3)) < [0.8, 0.2, 0.1]).astype(np.int64)
    usual = np.tile([0.8, 0.2, 0.1], (200, 1))
    useful = np.where(labels == 1, 0.7, 0.3)
    assert [is_collapsed(TASKS["multilabel"](), each, labels, 3) for each in (usual, useful)] == [True, False]


def test_a_regression_that_does_not_beat_the_mean_has_learned_nothing():
    task, rng = TASKS["regression"](), np.random.default_rng(0)
    labels = 1e6 + rng.standard_normal(200)
    task.fit(labels, (), TrainConfig(task="regression"))
    guesses = {"mean": np.full(200, 1e6), "noise": 1e6 + rng.standard_normal(200), "useful": labels + 0.3}
    found = {name: is_collapsed(task, each[:, None], labels, 0) for name, each in guesses.items()}
    assert found == {"mean": True, "noise": True, "useful": False}


def test_of_few_nodes_or_of_equal_labels_nothing_is_said():
    for labels in (np.repeat([0, 1], [10, 9]), np.zeros(100, int), np.repeat([0, -1], 50)):
        assert not is_collapsed(Multiclass(), np.eye(2)[np.zeros(len(labels), int)], labels, 2)


@pytest.mark.parametrize(
    ("task", "labels"),
    [
        ("multiclass", np.array([2])),
        ("binary", np.array([1])),
        ("multilabel", np.array([[1, 0, 1]])),
        ("regression", np.array([2.5])),
    ],
)
def test_the_predictions_of_every_task_of_glasu_have_the_right_form(task, labels):
    classes = {"binary": ("a", "b"), "regression": ()}.get(task, ("a", "b", "c"))
    made = TASKS[task]()
    made.fit(labels, classes, TrainConfig())
    check_predictions(made, labels, classes)


class Indices(Multiclass):
    def predict(self, scores: np.ndarray, classes: Sequence[str]) -> np.ndarray:
        return scores.argmax(axis=1)

    def unknown_labels(self, num_nodes: int, classes: Sequence[str]) -> np.ndarray:
        return np.zeros(num_nodes, np.int64)


class OneRow(Multiclass):
    def columns(self, scores: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
        return {"prediction": [classes[0]]}


def test_predictions_of_the_wrong_form_are_refused_before_training():
    registry.register("task", "indices", Indices)
    config, watch = tiny_settings(task="indices"), Stopwatch(time.perf_counter)
    with pytest.raises(ConfigError) as caught:
        Client(config, tiny_parties(1)[0], index=0, names=["a"], watch=watch)
    assert str(caught.value) == (
        "The task Indices: unknown_labels must return -1 or NaN for every node, in the form of the labels; predict "
        "must return names of classes, or columns must convert its result to text. Correct the extension."
    )


def test_a_table_of_predictions_must_have_one_value_per_row():
    with pytest.raises(ConfigError, match="every column of columns must have one value per row of scores"):
        check_predictions(OneRow(), np.array([0, 1]), ("a", "b"))
