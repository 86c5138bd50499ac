"""Binary classification and regression over gRPC: the weights, figures and predictions of one process."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.tiny import assert_same_run, tiny


@pytest.mark.parametrize("labels", ["all", "b"])
@pytest.mark.parametrize("task", ["binary", "regression"])
def test_training_and_prediction_over_the_network_are_those_in_one_process(task, labels, kits, tmp_path):
    weights = "balanced" if task == "binary" else "none"
    config, parties = tiny(task=task, labels=labels, class_weights=weights)
    cluster = Cluster(config, parties, kits, tmp_path)
    served, _ = cluster.run()
    here = simulate_with_secrets(parties, config)
    assert_same_run(served, here.report)
    _, found = cluster.predict(b=np.array([5, 2]))
    model = TrainedModel.of(here.clients)
    assert np.array_equal(found["b"].scores, model.scores(parties, np.array([2, 5]))[::-1])
    with (tmp_path / "b" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "prediction", *(f"p_{name}" for name in model.classes)]
    said = [float(row["prediction"]) if task == "regression" else row["prediction"] for row in rows]
    assert said == model.predict(parties, np.array([5, 2])).tolist()


def test_a_party_whose_numbers_have_another_scale_is_refused_before_the_first_round(kits, tmp_path):
    config, parties = tiny(task="regression")
    parties[2] = replace(parties[2], labels=parties[2].labels / 1000)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    a, b = cluster.join("a"), cluster.join("b")
    cluster.until("server", "a: prepared")
    cluster.until("server", "b: prepared")
    error = str(cluster.join("c").error())
    assert "mean and deviation of labels (SHA-256)" in error
    assert "make labels and splits equal" in error
    cluster.end(server, a, b)


def test_the_error_of_a_party_with_classes_in_a_regression_names_the_remedy(kits, tmp_path):
    config, parties = tiny(task="regression", labels="b")
    _, classes = tiny(labels="b")
    cluster = Cluster(config, [parties[0], classes[1], parties[2]], kits, tmp_path)
    server = cluster.serve()
    assert 'label_type = "number"' in str(cluster.join("b").error())
    cluster.end(server)
