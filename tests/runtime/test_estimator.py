from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, r2_score
from torch_geometric.nn import SAGEConv

import glasu
from glasu.errors import ConfigError
from glasu.runtime.estimator import GLASUClassifier, GLASURegressor
from support.convolutions import register_convolution
from support.monolith import settings, tiny_parties

QUICK = {"hidden": 8, "num_rounds": 4, "num_local_steps": 2, "learning_rate": 0.05}


def test_fit_returns_the_estimator_and_predict_gives_class_names():
    parties = tiny_parties()
    model = GLASUClassifier(**QUICK)
    assert model.fit(parties) is model
    assert model.classes_.tolist() == ["class 0", "class 1", "class 2"]
    probabilities = model.predict_proba(parties)
    assert probabilities.shape == (24, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(model.predict(parties), model.classes_[probabilities.argmax(axis=1)])
    nodes = np.array([5, 2])
    np.testing.assert_array_equal(model.predict(parties, nodes), model.predict(parties)[nodes])


def test_score_is_the_accuracy_on_the_test_nodes_or_on_the_given_ones():
    parties = tiny_parties(num_nodes=40)
    model = GLASUClassifier(**QUICK).fit(parties)
    right = model.predict(parties) == model.classes_[parties[0].labels]
    assert model.score(parties) == pytest.approx(right[parties[0].splits.test].mean())
    assert model.score(parties) == pytest.approx(model.report_.test.accuracy)
    assert model.score(parties, nodes=np.arange(7)) == pytest.approx(right[:7].mean())


def test_fit_is_train_with_the_same_settings():
    parties = tiny_parties()
    report = glasu.train(
        parties,
        glasu.RunConfig(
            model=glasu.ModelConfig(hidden=8),
            train=glasu.TrainConfig(num_rounds=4, num_local_steps=2, learning_rate=0.05),
        ),
    )
    assert GLASUClassifier(**QUICK).fit(parties).report_.weights_sha256 == report.weights_sha256


def test_named_settings_override_those_of_the_config_and_the_rest_stays():
    config = settings(sampler="shared", labels="b", num_rounds=50, hidden=32)
    model = GLASUClassifier(config=config, **QUICK).fit(tiny_parties(owner="b"))
    ran = model.report_.config
    assert ran.train.sampler == "shared"
    assert ran.train.labels == "b"
    assert ran.train.num_rounds == 4
    assert ran.model.hidden == 8


def test_what_is_not_given_is_as_in_the_config_or_else_the_default():
    assert {name: value for name, value in GLASUClassifier().get_params().items() if value is not None} == {}
    assert GLASUClassifier().make_config() == glasu.RunConfig()
    config = settings(backbone="sage", hidden=12, seed=3, learning_rate=0.2, aggregation_layers=(3,))
    assert GLASUClassifier(config=config).make_config() == config
    assert GLASUClassifier(config=config, hidden=5).make_config() == config.replace(model={"hidden": 5})
    assert GLASUClassifier(seed=0, config=config).make_config().train.seed == 0  # zero is a value
    assert GLASUClassifier(aggregation_layers=(), config=config).make_config().model.aggregation_layers == ()


def test_every_named_parameter_is_a_setting():
    own = set(GLASUClassifier().get_params()) - {"config"}
    model, train = glasu.RunConfig().to_dict()["model"], glasu.RunConfig().to_dict()["train"]
    assert own <= set(model) | set(train)
    assert not set(model) & set(train)


def test_nodes_may_be_a_mask():
    parties = tiny_parties()
    model, mask = GLASUClassifier(**QUICK).fit(parties), np.arange(24) % 2 == 0
    np.testing.assert_array_equal(model.predict(parties, mask), model.predict(parties)[mask])
    assert model.score(parties, nodes=mask) == model.score(parties, nodes=np.flatnonzero(mask))


def test_parameters_are_those_of_the_constructor_and_survive_clone_and_set_params():
    model = GLASUClassifier(backbone="sage", aggregation_layers=(3,), **QUICK)
    assert is_classifier(model)
    own = model.get_params()
    assert own["backbone"] == "sage"
    assert own["num_rounds"] == 4
    copy = clone(model)
    assert copy is not model
    assert copy.get_params() == own
    copy.set_params(hidden=4, seed=7)
    assert (copy.hidden, copy.seed, model.hidden, model.seed) == (4, 7, 8, None)
    with pytest.raises(ValueError, match="Invalid parameter"):
        copy.set_params(depth=3)


def test_a_clone_of_a_fitted_estimator_is_not_fitted_and_learns_the_same():
    parties = tiny_parties()
    model = GLASUClassifier(**QUICK).fit(parties)
    copy = clone(model)
    with pytest.raises(NotFittedError):
        copy.predict(parties)
    assert copy.fit(parties).report_.weights_sha256 == model.report_.weights_sha256
    other = clone(model).set_params(seed=1).fit(parties)
    assert other.report_.weights_sha256 != model.report_.weights_sha256


@pytest.mark.parametrize("method", ["predict", "predict_proba", "score"])
def test_an_estimator_that_is_not_fitted_raises_not_fitted_error(method):
    with pytest.raises(NotFittedError):
        getattr(GLASUClassifier(), method)(tiny_parties())


def test_a_bad_setting_is_refused_when_fitting_not_when_constructing():
    model = GLASUClassifier(aggregation_layers=(0, 1))
    with pytest.raises(ConfigError, match="aggregation_layers"):
        model.fit(tiny_parties())


def test_a_registered_convolution_trains_and_predicts():
    parties, name = tiny_parties(), register_convolution(SAGEConv)
    model = GLASUClassifier(backbone=name, **QUICK).fit(parties)
    assert model.predict(parties).shape == (24,)
    assert clone(model).get_params()["backbone"] == name


def test_a_multilabel_task_predicts_zeros_and_ones_and_scores_micro_f1():
    rng = np.random.default_rng(7)
    labels = (rng.random((24, 4)) < 0.5).astype(np.int64)
    parties = [replace(one, labels=labels, classes=("p", "q", "r", "s")) for one in tiny_parties()]
    model = GLASUClassifier(config=settings(task="multilabel"), **QUICK).fit(parties)
    guess = model.predict(parties)
    assert guess.shape == (24, 4)
    assert set(np.unique(guess)) <= {0, 1}
    nodes = parties[0].splits.test
    hits = (guess & labels)[nodes].sum()
    assert model.score(parties) == pytest.approx(2 * hits / (guess[nodes].sum() + labels[nodes].sum()))


def test_a_binary_task_predicts_class_names_and_scores_accuracy():
    parties = tiny_parties(num_nodes=60, task="binary")
    model = GLASUClassifier(config=settings(task="binary"), **QUICK).fit(parties)
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.predict_proba(parties).shape == (60, 2)
    nodes = parties[0].splits.test
    truth = model.classes_[parties[0].labels[nodes]]
    assert model.score(parties) == pytest.approx(accuracy_score(truth, model.predict(parties, nodes)))


def test_a_regressor_predicts_numbers_and_scores_r2():
    parties = tiny_parties(num_nodes=60, task="regression")
    model = GLASURegressor(**QUICK)
    assert is_regressor(model)
    assert not is_classifier(model)
    assert clone(model).get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        model.predict(parties)
    assert model.fit(parties) is model
    nodes = parties[0].splits.test
    predicted = model.predict(parties, nodes)
    assert predicted.shape == nodes.shape
    assert model.score(parties) == pytest.approx(r2_score(parties[0].labels[nodes], predicted), abs=1e-9)
    assert model.score(parties) == pytest.approx(model.report_.test.r2, abs=1e-9)
    with pytest.raises(ConfigError, match="has no class probabilities; call predict"):
        model.model_.predict_proba(parties)
