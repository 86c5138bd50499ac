"""Binary classification and regression as whole runs, against one dense model and against scikit-learn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, mean_squared_error, r2_score, roc_auc_score

from glasu.errors import ProtocolError
from glasu.protocol.messages import Metrics, Scores
from glasu.protocol.requests import RoundDone
from glasu.runtime.trained_model import TrainedModel
from support.monolith import Monolith, assert_same, run, settings, tiny_parties
from support.roles import Killed
from support.tiny import simulate

TASKS = {
    "binary": {"task": "binary"},
    "balanced": {"task": "binary", "class_weights": "balanced"},
    "regression": {"task": "regression"},
}
LEARNING = {"backbone": "sage", "num_layers": 2, "aggregation_layers": (0, 1), "hidden": 16, "precision": "fp32"}
LEARNING |= {"optimizer": "adam", "learning_rate": 0.02, "num_rounds": 60, "evaluate_every": 10}


@pytest.mark.parametrize("labels", ["all", "b"])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
@pytest.mark.parametrize("backbone", ["gcn", "gcnii"])
@pytest.mark.parametrize("task", TASKS)
def test_a_training_is_gradient_descent_on_one_dense_model(task, backbone, aggregation, labels):
    keys = {**TASKS[task], "backbone": backbone, "aggregation": aggregation, "labels": labels}
    config = settings(backward="joint", num_rounds=3, **keys)
    parties = tiny_parties(owner=None if labels == "all" else labels, task=keys["task"])
    done = run(config, parties, scatter=4)
    whole, losses = Monolith(config, parties, done.initial), []
    for _ in range(3):
        found = whole.losses()
        losses.append(sum(loss.item() for loss in found.values()) / len(found))
        whole.descend(whole.gradients(sum(found.values())), rate=0.1)
    assert_same(done.final, whole.weights)
    assert done.server.progress.losses == pytest.approx(losses, rel=1e-9)


def learn(task: str, **keys):
    """Return the report, the model and the parties of a run with 400 nodes that has time to learn."""
    keys = {**LEARNING, **TASKS[task], **keys}
    labels = keys.get("labels", "all")
    parties = tiny_parties(num_nodes=400, owner=None if labels == "all" else labels, task=keys["task"])
    done = simulate(parties, settings(**keys))
    return done.report, TrainedModel.of(done.clients), parties


@pytest.mark.parametrize("labels", ["all", "b"])
def test_a_binary_task_is_learned_and_measured_as_sklearn_does(labels):
    report, model, parties = learn("balanced", labels=labels)
    owner = next(party for party in parties if party.labels is not None)
    nodes = owner.splits.test
    truth, scores = owner.labels[nodes], model.predict_proba(parties, nodes)
    assert scores.shape == (100, 2)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-6)
    assert report.test.roc_auc == pytest.approx(roc_auc_score(truth, scores[:, 1]), abs=1e-12)
    assert report.test.average_precision == pytest.approx(average_precision_score(truth, scores[:, 1]), abs=1e-12)
    assert report.test.roc_auc > 0.85
    assert report.validation.roc_auc == max(entry.metrics["roc_auc"] for entry in report.history)
    assert set(model.predict(parties)) == {"no", "yes"}


@pytest.mark.parametrize("labels", ["all", "b"])
def test_numbers_are_learned_in_their_own_unit_and_measured_as_sklearn_does(labels):
    report, model, parties = learn("regression", labels=labels)
    owner = next(party for party in parties if party.labels is not None)
    nodes = owner.splits.test
    predicted = model.predict(parties, nodes)
    assert predicted.shape == (100,)
    assert report.test.r2 == pytest.approx(r2_score(owner.labels[nodes], predicted), abs=1e-9)
    assert report.test.mse == pytest.approx(mean_squared_error(owner.labels[nodes], predicted), rel=1e-9)
    assert report.test.r2 > 0.5
    assert report.validation.r2 == max(entry.metrics["r2"] for entry in report.history)


def test_the_unit_of_the_labels_changes_no_weight():
    config = settings(**TASKS["regression"], num_rounds=3, optimizer="adam", evaluate_every=3)
    parties = tiny_parties(task="regression")
    small = simulate(parties, config)
    large = simulate([replace(party, labels=4 * party.labels) for party in parties], config)  # exact in binary
    assert large.report.losses == small.report.losses
    assert large.report.test.mse == 16 * small.report.test.mse
    assert large.report.test.r2 == small.report.test.r2
    for here, there in zip(small.clients, large.clients, strict=True):
        weights = there.learner.weights()
        scale = weights.pop("label_scale")
        assert torch.equal(scale, 4 * here.learner.weights()["label_scale"])
        assert all(torch.equal(value, here.learner.weights()[key]) for key, value in weights.items())


def test_a_model_keeps_the_scale_of_the_labels(tmp_path):
    _, model, parties = learn("regression", num_rounds=2)
    model.save(tmp_path)
    bare = [replace(party, labels=None, splits=None) for party in parties]
    np.testing.assert_array_equal(TrainedModel.load(tmp_path).predict(bare), model.predict(parties))
    known = parties[0].labels[parties[0].splits.train]
    known = known[~np.isnan(known)]
    assert model.weights[0]["label_scale"].tolist() == pytest.approx([known.mean(), known.std()], rel=1e-12)
    assert model.weights[0]["label_scale"].dtype == torch.float64


@pytest.mark.parametrize("task", TASKS)
def test_a_run_that_resumes_from_its_checkpoint_has_the_weights_of_an_unbroken_run(task, tmp_path):
    config = settings(**TASKS[task], num_rounds=4, num_local_steps=2, dropout=0.5, evaluate_every=1, precision="fp32")
    parties = tiny_parties(task=config.train.task)

    def stop(event):
        if isinstance(event, RoundDone) and event.round == 2:
            raise Killed

    with pytest.raises(Killed):
        simulate(parties, config, checkpoints=tmp_path, observer=stop)
    seen: list[object] = []
    resumed, unbroken = simulate(parties, config, checkpoints=tmp_path, observer=seen.append), simulate(parties, config)
    assert resumed.report.weights_sha256 == unbroken.report.weights_sha256
    assert resumed.report.test == unbroken.report.test
    assert min(event.round for event in seen if isinstance(event, RoundDone)) > 0


def test_without_both_classes_among_the_validation_nodes_the_lowest_loss_selects():
    parties = tiny_parties(task="binary")
    one_class = parties[0].labels.copy()
    one_class[parties[0].splits.validation] = 1
    parties = [replace(party, labels=one_class) for party in parties]
    keys = {**TASKS["binary"], "num_rounds": 6, "evaluate_every": 1, "learning_rate": 1.0}
    report = simulate(parties, settings(**keys)).report
    losses = {entry.round: entry.metrics["loss"] for entry in report.history}
    assert np.isnan(report.validation.roc_auc)
    assert report.validation.round == min(losses, key=losses.get)
    assert report.to_dict()["validation"]["roc_auc"] is None
    assert "validation -" in report.summary()


def test_a_party_that_sends_an_absurd_prediction_is_refused():
    def carry(message):
        if isinstance(message, Scores) and message.key.client == 1:
            return replace(message, value=message.value + 1000)
        return message

    with pytest.raises(ProtocolError, match=r"party 'b', .*predictions: expected values in -100..100, got 1000"):
        run(settings(task="regression"), tiny_parties(task="regression"), carry=carry)


@pytest.mark.parametrize(("place", "allowed"), [(0, True), (2, False)])
def test_an_undefined_metric_is_accepted_only_where_it_can_be_undefined(place, allowed):
    def carry(message):
        if isinstance(message, Metrics):
            values = message.values.copy()
            values[place] = np.nan
            return replace(message, values=values)
        return message

    config, parties = settings(task="binary"), tiny_parties(task="binary")
    if allowed:
        run(config, parties, carry=carry)
    else:
        with pytest.raises(ProtocolError, match="expected finite metrics"):
            run(config, parties, carry=carry)
