"""Warm start against a dense program, and the ensemble as a candidate in model selection."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glasu.config import RunConfig
from glasu.data.methods import override_settings
from glasu.errors import ConfigError, TrainingError
from glasu.protocol.messages import KeyOffer, KeyOffers, Metrics, Scores, Sealed, Waiting
from glasu.protocol.requests import Evaluated, WarmStepDone
from glasu.protocol.warm_start import take_warm_steps
from glasu.runtime.inprocess import ScriptRun, open_client_map, run_alone
from glasu.runtime.simulation import make_clients
from glasu.runtime.trained_model import TrainedModel
from support.monolith import Monolith, assert_same, identical, run, settings, tiny_parties
from support.tiny import simulate

STEPS = 5
ALL_EDGES = {"sampler": "neighbor", "fanout": 100}  # sparse blocks: gcnii takes its fused step
RUINOUS = {"learning_rate": 0.5, "optimizer": "adam", "weight_decay": 0.0}


def warm_up(config, parties, actions=None):
    """Return clients after their warm steps, and their weights before them; `actions` collects saves and events."""
    clients = make_clients(config, parties, lambda: 0.0)
    before = [client.learner.weights() for client in clients]
    observe = None if actions is None else actions.append
    with open_client_map():
        run_alone([ScriptRun(client.name, take_warm_steps(client), client.watch, observe) for client in clients])
    return clients, before


def weights_of(clients):
    return [client.learner.weights() for client in clients]


def is_fixed(name):
    return name.startswith(("classifier.", "norms.3."))


def descend_densely(config, parties, weights):
    """Train every party of the dense model alone; its classifier, and the norm before it, are not changed."""
    whole, train = Monolith(config, parties, weights), config.train
    for m, own in enumerate(whole.weights):
        learned = [value for name, value in own.items() if not is_fixed(name)]
        keys = {"lr": train.learning_rate, "weight_decay": train.weight_decay}
        optimizer = (
            torch.optim.Adam(learned, **keys)
            if train.optimizer == "adam"
            else torch.optim.SGD(learned, momentum=train.momentum, **keys)
        )
        for _ in range(train.warm_start):
            hidden, initial = whole.start(m)
            for layer in range(config.model.num_layers):
                hidden = whole.partial(m, layer, hidden, initial)
            optimizer.zero_grad()
            whole.loss(m, hidden[whole.train_nodes]).backward()
            optimizer.step()
    return [{name: value.detach() for name, value in own.items()} for own in whole.weights]


@pytest.mark.parametrize("sampling", [{}, ALL_EDGES], ids=["full", "neighbor"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"weight_decay": 0.01, "momentum": 0.9},
        {"optimizer": "adam", "learning_rate": 0.02, "weight_decay": 0.01},
        {"normalization": "layer"},
    ],
    ids=["sgd", "momentum", "adam", "norms"],
)
@pytest.mark.parametrize("backbone", ["gcnii", "sage"])
@pytest.mark.parametrize("layers", [(3,), (1, 3)])
def test_warm_steps_are_those_of_a_dense_program_in_which_each_party_is_alone(layers, backbone, keys, sampling):
    parties = tiny_parties()
    config = settings(backbone=backbone, warm_start=STEPS, aggregation_layers=layers, **keys, **sampling)
    clients, before = warm_up(config, parties)
    assert_same(weights_of(clients), descend_densely(config, parties, before))
    assert not identical(weights_of(clients), before)


@pytest.mark.parametrize("sampler", ["full", "neighbor", "shared"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("backbone", ["gcnii", "gat"])
def test_classifiers_stay_equal_and_fixed_and_the_optimizer_starts_again(backbone, optimizer, sampler):
    keys = {} if sampler == "full" else {"fanout": 1, "batch_size": 4}
    config = settings(
        backbone=backbone, optimizer=optimizer, sampler=sampler, dropout=0.5, precision="fp32", warm_start=4, **keys
    )
    clients, before = warm_up(config, tiny_parties())
    for client, first in zip(clients, before, strict=True):
        for name, value in client.learner.weights().items():
            assert torch.equal(value, first[name]) == is_fixed(name), name
            assert not is_fixed(name) or torch.equal(value, before[0][name])
        assert client.learner.optimizer.steps == 0
        assert client.learner.optimizer.moments == {}


def test_warm_steps_draw_other_batches_and_masks_than_rounds():
    """The first warm step would move the weights as round 0 of parties that train alone, if both drew the same."""
    keys = {"dropout": 0.5, "batch_size": 4, "num_rounds": 1, "precision": "fp32"}
    clients, before = warm_up(settings(warm_start=1, **keys), tiny_parties())
    alone = simulate(tiny_parties(), settings(method="standalone", **keys)).clients
    assert identical(before, weights_of(make_clients(settings(**keys), tiny_parties())))
    for client, other in zip(clients, alone, strict=True):
        changed = {name: value for name, value in client.learner.weights().items() if not is_fixed(name)}
        assert not identical([changed], [{name: other.progress.best_weights[name] for name in changed}])


def test_only_keys_are_sent_before_the_evaluation_and_that_is_before_round_0():
    messages = []
    config = settings(warm_start=STEPS, num_rounds=2, evaluate_every=1, sampler="neighbor", fanout=2, batch_size=4)
    done = run(config, tiny_parties(), carry=lambda message: messages.append(message) or message)
    keys = [message for message in messages if message.key.phase.name == "CONTROL"]
    assert messages[: len(keys)] == keys
    assert {type(message) for message in keys} == {KeyOffer, KeyOffers, Sealed, Waiting}
    messages = messages[len(keys) :]
    phases = [message.key.phase.name for message in messages]
    start = next(index for index, phase in enumerate(phases) if phase != "EVALUATION")
    first = messages[:start]
    assert {message.key.round for message in first} == {0, config.train.num_rounds + 2}
    assert isinstance(first[0], Scores)  # the ensemble, of which no representation is sent
    assert sum(isinstance(message, Metrics) for message in first) == 2 * len(done.clients)
    events = [event for event in done.events if isinstance(event, Evaluated) and event.split == "validation"]
    assert [(event.round, event.ensemble) for event in events] == [(0, True), (0, False), (1, False), (2, False)]


def test_both_candidates_are_scored_as_a_dense_program_scores_them():
    config, parties = settings(backbone="gcnii", warm_start=STEPS, num_rounds=1), tiny_parties()
    clients, _ = warm_up(config, parties)
    nodes = parties[0].splits.validation
    alone = [Monolith(config, parties[m : m + 1], [client.learner.weights()]) for m, client in enumerate(clients)]
    means = {
        True: torch.stack([each.probabilities() for each in alone]).mean(dim=0),
        False: Monolith(config, parties, weights_of(clients)).probabilities(),
    }
    events = [event for event in run(config, parties).events if isinstance(event, Evaluated) and event.round == 0]
    for event in events[:2]:
        expected = clients[0].learner.task.evaluate(means[event.ensemble].numpy()[nodes], parties[0].labels[nodes])
        assert event.metrics == pytest.approx(expected)


def ruin(**keys):
    """Return the simulation of a run whose rounds make the model worse than the ensemble after the warm start."""
    config = settings(**{"warm_start": 60, "num_rounds": 4, "evaluate_every": 1, **RUINOUS, **keys})
    return simulate(tiny_parties(degree=0.5), config)


def test_the_ensemble_is_tested_saved_and_predicts_where_joint_rounds_make_it_worse(tmp_path, caplog):
    parties, done = tiny_parties(degree=0.5), ruin()
    config, report = done.report.config, done.report
    assert (report.warm_start.selected, report.warm_start.steps, report.validation.round) == ("ensemble", 60, 0)
    assert report.validation.metrics == report.warm_start.ensemble
    assert max(entry.metrics["accuracy"] for entry in report.history) <= report.validation.accuracy
    assert [line for line in caplog.messages if "joint training did not help" in line]
    assert "the ensemble after the warm start" in report.summary()
    clients, _ = warm_up(config, parties)
    assert identical([client.progress.best_weights for client in done.clients], weights_of(clients))
    alone = [Monolith(config, parties[m : m + 1], [client.learner.weights()]) for m, client in enumerate(clients)]
    mean = torch.stack([each.probabilities() for each in alone]).mean(dim=0).numpy()
    test = parties[0].splits.test
    found = clients[0].learner.task.evaluate(mean[test], parties[0].labels[test])
    assert report.test.metrics == pytest.approx(found)
    TrainedModel.of(done.clients).save(tmp_path)
    np.testing.assert_allclose(TrainedModel.load(tmp_path).predict_proba(parties), mean, atol=1e-12)


def test_a_joint_model_that_is_better_replaces_the_ensemble():
    config = settings(warm_start=1, num_rounds=30, evaluate_every=5, learning_rate=0.02, optimizer="adam")
    done = simulate(tiny_parties(), config)
    assert done.report.warm_start.selected == "joint"
    assert done.report.validation.round > 0
    assert not TrainedModel.of(done.clients).ensemble


def test_patience_counts_from_round_0_on_and_a_requested_score_can_stop_before_it():
    patient = ruin(patience=2).report
    assert [entry.round for entry in patient.history] == [0, 1, 2]
    reached = ruin(stop_at=0.01).report
    assert (reached.losses, reached.warm_start.selected) == ((), "ensemble")
    assert [entry.round for entry in reached.history] == [0]


def test_subsets_of_the_parties_are_ensembles_too():
    done = ruin(party_dropout=0.3)
    assert done.report.warm_start.selected == "ensemble"
    model, parties = TrainedModel.of(done.clients), tiny_parties(degree=0.5)
    kept = [parties[0], parties[2]]
    alone = [Monolith(done.report.config, [parties[m]], [done.clients[m].progress.best_weights]) for m in (0, 2)]
    mean = torch.stack([each.probabilities() for each in alone]).mean(dim=0).numpy()
    np.testing.assert_allclose(model.predict_proba(kept), mean, atol=1e-12)
    nodes = parties[0].splits.validation
    found = done.clients[0].learner.task.evaluate(mean[nodes], parties[0].labels[nodes])
    assert model.find_subset(["a", "c"]).metrics == pytest.approx(found)


def test_every_step_is_an_event_and_saves_are_as_frequent_as_in_rounds():
    actions = []
    warm_up(settings(warm_start=7, num_local_steps=3), tiny_parties(num_clients=1), actions)
    expected = [1, 2, "saved", 3, 4, 5, "saved", 6, "saved", 7]
    assert [action.step if isinstance(action, WarmStepDone) else "saved" for action in actions] == expected


def test_a_warm_start_that_diverges_is_refused_with_the_step():
    with pytest.raises(TrainingError, match=r"warm start, .* steps before round 0: the loss is .*learning_rate"):
        simulate(tiny_parties(), settings(warm_start=50, learning_rate=1e200))


@pytest.mark.parametrize(
    ("model", "train", "reason"),
    [
        ({}, {"labels": "b"}, "have no labels to train alone"),
        ({"aggregation": "concat"}, {}, "no party can train alone"),
        ({"aggregation_layers": ()}, {}, "no common rounds"),
    ],
)
def test_warm_start_is_refused_where_a_party_cannot_prepare_for_joint_rounds(model, train, reason):
    with pytest.raises(ConfigError, match=reason):
        RunConfig().replace(model=model, train={"warm_start": 10, **train})


@pytest.mark.parametrize("method", ["centralized", "standalone", "ensemble", "smooth", "simulated"])
def test_methods_with_their_own_training_have_no_warm_start_and_say_so(method):
    config, overridden = override_settings(RunConfig().replace(train={"method": method, "warm_start": 10}))
    assert config.train.warm_start == 0
    assert overridden["train.warm_start"] == {"requested": 10, "used": 0}
