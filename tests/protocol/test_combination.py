"""Parties that train alone and predict together, compared with programs that use the public API and dense numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import glasu
from glasu.data.graph import Graph
from glasu.errors import ConfigError, DataError, GlasuError
from glasu.model.propagation import ALPHAS
from glasu.protocol.messages import Scores, Waiting
from glasu.protocol.requests import RoundDone
from glasu.report import list_alone
from glasu.runtime.trained_model import TrainedModel
from support.tiny import settings, simulate, tiny_parties

KEYS = {"num_rounds": 6, "evaluate_every": 2, "optimizer": "adam", "learning_rate": 0.05, "backbone": "sage"}
NODES = 60


def run(parties, **keys):
    return simulate(parties, settings(**{**KEYS, **keys}))


def alone(parties, **keys):
    """Train with the public API, every party alone; return the class probabilities of all nodes, one entry a party."""
    config = settings(**{**KEYS, "method": "standalone", **keys})
    model = glasu.GLASUClassifier(config=config).fit(parties).model_
    return np.stack([model.predict_proba(parties, party=party.name) for party in parties])


def dense_walk(graph):
    A = np.eye(graph.num_nodes)
    source, target = graph.edge_index()
    A[target, source] = 1 if graph.weights is None else graph.weights
    return A / A.sum(axis=1, keepdims=True)


def smooth(graph, P, alpha, steps=10):
    W, Z = dense_walk(graph), P
    for _ in range(steps):
        Z = alpha * P + (1 - alpha) * W @ Z
    return Z


def accuracy(scores, party, split):
    nodes = getattr(party.splits, split)
    return (scores[nodes].argmax(axis=1) == party.labels[nodes]).mean()


def without_edges(party):
    return replace(party, graph=Graph.from_edges(np.empty(0, int), np.empty(0, int), party.num_nodes))


# --- ensemble -----------------------------------------------------------------------------------------------------


def test_an_ensemble_is_the_mean_of_the_probabilities_of_the_parties_alone():
    parties = tiny_parties(num_nodes=NODES)
    own = alone(parties)
    done = run(parties, method="ensemble")
    got = TrainedModel.of(done.clients).predict_proba(parties)
    np.testing.assert_allclose(got, own.mean(axis=0), rtol=0, atol=1e-15)
    for split, scores in (("validation", done.report.validation), ("test", done.report.test)):
        assert scores.accuracy == pytest.approx(accuracy(own.mean(axis=0), parties[0], split))
        assert scores.per_client == pytest.approx([accuracy(each, parties[0], split) for each in own])
        assert scores.round is None


def test_training_has_the_bits_of_standalone_and_the_only_traffic_is_one_exchange_of_probabilities():
    parties = tiny_parties(num_nodes=NODES)
    done, silent = run(parties, method="ensemble").report, run(parties, method="standalone").report
    assert done.weights_sha256 == silent.weights_sha256
    assert done.test.per_client == silent.test.per_client
    assert set(done.traffic.by_phase) == {"evaluation"}
    assert done.traffic.exchanges == 1
    splits = parties[0].splits
    assert done.traffic.by_kind["tensor"] == 2 * 3 * (len(splits.validation) + len(splits.test)) * 3 * 8  # fp64
    assert len(done.history) == 1
    assert done.history[0].bytes == done.traffic.total_bytes


def test_an_ensemble_needs_labels_at_every_party():
    with pytest.raises(ConfigError, match=r'train.labels=.*train.method="ensemble" needs labels at every party'):
        settings(method="ensemble", labels="b")


# --- smooth -------------------------------------------------------------------------------------------------------


def test_smoothing_is_dense_pagerank_of_the_ensemble_with_each_party_s_best_alpha():
    parties = tiny_parties(num_nodes=NODES, degree=1.0)
    P = alone(parties).mean(axis=0)
    done = run(parties, method="smooth")
    expected, chosen = [], []
    for party in parties:
        candidates = {alpha: smooth(party.graph, P, alpha) for alpha in ALPHAS}
        scores = {alpha: accuracy(Z, party, "validation") for alpha, Z in candidates.items()}
        chosen.append(max(alpha for alpha in ALPHAS if scores[alpha] == max(scores.values())))
        expected.append(candidates[chosen[-1]])
    assert [client.progress.alpha for client in done.clients] == chosen
    assert min(chosen) < 1  # otherwise nothing was propagated
    mean = np.mean(expected, axis=0)
    np.testing.assert_allclose(TrainedModel.of(done.clients).predict_proba(parties), mean, rtol=0, atol=1e-14)
    assert done.report.test.accuracy == pytest.approx(accuracy(mean, parties[0], "test"))
    assert done.report.validation.accuracy == pytest.approx(accuracy(mean, parties[0], "validation"))
    assert done.report.traffic.exchanges == 2


def test_a_party_without_edges_contributes_to_the_ensemble_only():
    parties = tiny_parties(num_nodes=NODES)
    parties = [without_edges(parties[0]), parties[1], without_edges(parties[2])]
    sent = []
    config = settings(**KEYS, method="smooth")
    done = simulate(parties, config, carry=lambda message: sent.append(message) or message)
    last = [message for message in sent if message.key.layer == config.model.num_layers + 1]
    assert [type(message) for message in last[:3]] == [Waiting, Scores, Waiting]
    P = alone(parties).mean(axis=0)
    alpha = done.clients[1].progress.alpha
    assert [client.progress.alpha for client in done.clients] == [None, alpha, None]
    got = TrainedModel.of(done.clients).predict_proba(parties)
    np.testing.assert_allclose(got, smooth(parties[1].graph, P, alpha), rtol=0, atol=1e-14)


def test_without_any_edge_there_is_nothing_to_smooth():
    parties = [without_edges(party) for party in tiny_parties()]
    with pytest.raises(DataError, match=r'no party has an edge.*use "ensemble"'):
        run(parties, method="smooth")


@pytest.mark.parametrize("owner_has_edges", [True, False])
def test_with_labels_at_one_party_the_owner_s_predictions_are_smoothed(owner_has_edges):
    parties = tiny_parties(num_nodes=NODES, owner="b")
    if not owner_has_edges:
        parties[1] = without_edges(parties[1])
    done = run(parties, method="smooth", labels="b")
    owner = parties[1]
    full = [replace(each, labels=owner.labels, classes=owner.classes, splits=owner.splits) for each in parties]
    P = alone(full)[1]  # weights are drawn for the place of a party, so the others take part
    graphs = [party.graph for party in parties if party.graph.num_edges]
    candidates = {alpha: np.mean([smooth(graph, P, alpha) for graph in graphs], axis=0) for alpha in ALPHAS}
    scores = {alpha: accuracy(Z, owner, "validation") for alpha, Z in candidates.items()}
    chosen = max(alpha for alpha in ALPHAS if scores[alpha] == max(scores.values()))
    assert {client.progress.alpha for client in done.clients} == {chosen}
    got = TrainedModel.of(done.clients).predict_proba(parties)
    np.testing.assert_allclose(got, candidates[chosen], rtol=0, atol=1e-14)
    assert done.report.test.accuracy == pytest.approx(accuracy(candidates[chosen], owner, "test"))
    assert done.report.test.per_client == (None, pytest.approx(accuracy(P, owner, "test")), None)


def test_with_labels_at_one_party_the_bytes_are_those_that_the_docs_state():
    parties = tiny_parties(num_nodes=NODES, owner="b")
    traffic = run(parties, method="smooth", labels="b").report.traffic
    splits, row, with_edges = parties[1].splits, 3 * 8, 3
    validation, both = len(splits.validation), len(splits.validation) + len(splits.test)
    grid = (len(ALPHAS) - 1) * validation
    assert traffic.by_kind["tensor"] == row * (NODES * (1 + 3) + (grid + both) * (with_edges + 1))


@pytest.mark.parametrize("keys", [{"method": "ensemble"}, {"method": "smooth"}, {"method": "smooth", "labels": "b"}])
def test_chunks_change_no_bit(keys):
    parties = tiny_parties(num_nodes=NODES, owner=keys.get("labels"))
    whole = run(parties, **keys)
    parts = run(parties, **keys, chunk_rows=7)
    assert parts.report.test == whole.report.test
    assert parts.report.traffic.exchanges == whole.report.traffic.exchanges
    one, other = (TrainedModel.of(each.clients).predict_proba(parties) for each in (whole, parts))
    assert np.array_equal(one, other)


def test_a_saved_model_predicts_with_the_chosen_alpha(tmp_path):
    parties = tiny_parties(num_nodes=NODES)
    model = TrainedModel.of(run(parties, method="smooth").clients)
    model.save(tmp_path)
    loaded = TrainedModel.load(tmp_path)
    assert [entry.alpha for entry in loaded.clients] == [entry.alpha for entry in model.clients]
    nodes = np.array([5, 2, 40])
    assert np.array_equal(loaded.predict_proba(parties, nodes), model.predict_proba(parties)[nodes])
    with pytest.raises(ConfigError, match="the parties predict together"):
        loaded.predict_proba(parties, party="a")


# --- resume, and training once for several methods ----------------------------------------------------------------


class Stopped(BaseException):
    """Ends a run in the middle."""


@pytest.mark.parametrize(
    ("keys", "stop_at"),
    [
        ({"method": "ensemble"}, 4),
        ({"method": "ensemble", "patience": 2}, 1),
        ({"method": "smooth", "labels": "b"}, 1),
        ({"method": "smooth", "labels": "b"}, 4),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_run(keys, stop_at, tmp_path):
    parties = tiny_parties(num_nodes=NODES, owner=keys.get("labels"))
    config = settings(**{**KEYS, "evaluate_every": 1, "dropout": 0.5, **keys})

    def stop(event):
        if isinstance(event, RoundDone) and event.round == stop_at:
            raise Stopped

    with pytest.raises(Stopped):
        simulate(parties, config, checkpoints=tmp_path, observer=stop, workers=1)
    rounds = []
    again = simulate(
        parties,
        config,
        checkpoints=tmp_path,
        observer=lambda event: rounds.append(getattr(event, "round", None)),
    )
    assert 0 not in rounds
    whole = simulate(parties, config).report
    assert again.report.weights_sha256 == whole.weights_sha256
    assert (again.report.test, again.report.validation) == (whole.test, whole.validation)
    assert again.report.traffic == whole.traffic


def test_trained_parties_are_not_trained_again():
    parties, rounds = tiny_parties(num_nodes=NODES), []
    first = run(parties, method="standalone")
    second = simulate(parties, settings(**KEYS, method="smooth"), trained=first.clients, observer=rounds.append)
    assert not any(isinstance(event, RoundDone) for event in rounds)
    whole = run(parties, method="smooth").report
    assert second.report.weights_sha256 == whole.weights_sha256
    assert (second.report.test, second.report.traffic) == (whole.test, whole.traffic)


# --- standalone: label propagation --------------------------------------------------------------------------------


def test_standalone_compares_each_model_with_label_propagation():
    parties = tiny_parties(num_nodes=NODES)
    parties[2] = without_edges(parties[2])
    report = run(parties, method="standalone").report
    party = parties[0]
    start = np.tile(np.eye(3)[party.labels[party.splits.train]].mean(axis=0), (NODES, 1))
    start[party.splits.train] = np.eye(3)[party.labels[party.splits.train]]
    for m in (0, 1):
        candidates = [smooth(parties[m].graph, start, alpha) for alpha in ALPHAS[1:]]
        best = max(candidates, key=lambda Z: accuracy(Z, party, "validation"))
        assert report.validation.per_client_propagation[m] == pytest.approx(accuracy(best, party, "validation"))
        assert report.test.per_client_propagation[m] == pytest.approx(accuracy(best, party, "test"))
    assert report.test.per_client_propagation[2] is None
    scores = zip(report.validation.per_client_propagation, report.validation.per_client, strict=True)
    expected = tuple("propagation" if here is not None and here > there else "model" for here, there in scores)
    assert report.validation.per_client_better == expected


def test_with_labels_at_one_party_only_this_party_trains_alone_and_its_label_propagation_counts():
    everywhere = run(tiny_parties(num_nodes=NODES), method="standalone").report
    done = run(tiny_parties(num_nodes=NODES), method="standalone", labels="b")
    report = done.report
    for split in ("validation", "test"):
        owner, whole = getattr(report, split), getattr(everywhere, split)
        assert owner.per_client == (None, whole.per_client[1], None)
        assert owner.per_client_propagation == (None, whole.per_client_propagation[1], None)
        assert owner.accuracy == whole.per_client[1]
    assert report.validation.per_client_better == (None, everywhere.validation.per_client_better[1], None)
    assert report.weights_sha256[1] == everywhere.weights_sha256[1]
    assert [bool(client.progress.losses) for client in done.clients] == [False, True, False]
    assert report.traffic.messages == 0
    assert [each.party for each in list_alone("abc", report.validation, report.test)] == ["b", "b"]


def test_with_labels_at_one_party_only_the_model_of_this_party_predicts():
    parties = tiny_parties(num_nodes=NODES, owner="b")
    model = TrainedModel.of(run(parties, method="standalone", labels="b").clients)
    assert model.predict_proba(parties, party="b").shape == (NODES, 3)
    with pytest.raises(ConfigError, match=r"party='a'.*choose the one that predicts.*: b\."):
        model.predict_proba(parties, party="a")


def test_a_party_that_sends_no_probabilities_in_an_ensemble_is_named():
    parties = tiny_parties()

    def drop(message):
        return Waiting(message.key) if isinstance(message, Scores) and message.key.client == 1 else message

    with pytest.raises(GlasuError, match="party 'b': expected Scores"):
        simulate(parties, settings(**KEYS, method="ensemble"), carry=drop)


def test_a_party_that_propagates_some_chunks_only_is_named():
    parties, config = tiny_parties(), settings(**KEYS, method="smooth", chunk_rows=4)

    def drop(message):
        later = isinstance(message, Scores) and message.key.layer == config.model.num_layers + 1 and message.key.chunk
        return Waiting(message.key) if later and message.key.client == 1 else message

    with pytest.raises(GlasuError, match=r"party 'b'.*expected all chunks of a tensor or none, got a Waiting"):
        simulate(parties, config, carry=drop)


# --- other tasks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["binary", "regression"])
@pytest.mark.parametrize("labels", ["all", "b"])
def test_other_tasks_are_smoothed_in_the_unit_of_their_labels(task, labels):
    parties = tiny_parties(num_nodes=NODES, owner=None if labels == "all" else labels)
    numbers = 7.0 + 3.0 * np.random.default_rng(5).standard_normal(NODES)
    known = {"binary": ((numbers > 7).astype(np.int64), ("no", "yes")), "regression": (numbers, ())}[task]
    parties = [each if each.labels is None else replace(each, labels=known[0], classes=known[1]) for each in parties]
    done = run(parties, method="smooth", labels=labels, task=task)
    model = TrainedModel.of(done.clients)
    full = [replace(each, labels=known[0], classes=known[1], splits=parties[1].splits) for each in parties]
    silent = TrainedModel.of(run(full, method="standalone", task=task).clients)
    own = np.stack([silent.scores(full, party=party.name) for party in full])
    P = own.mean(axis=0) if labels == "all" else own[1]
    alphas = [client.progress.alpha for client in done.clients]
    expected = np.mean([smooth(each.graph, P, alpha) for each, alpha in zip(parties, alphas, strict=True)], axis=0)
    np.testing.assert_allclose(model.scores(parties), expected, rtol=0, atol=1e-12)
    assert done.report.test.metrics.keys() == silent_metrics(task)


def silent_metrics(task):
    return {"binary": {"roc_auc", "average_precision", "accuracy", "macro_f1", "loss"}, "regression": {"r2", "mse"}}[
        task
    ]
