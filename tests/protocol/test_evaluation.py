from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from glasu.data.party import Splits
from glasu.errors import ProtocolError
from glasu.protocol.messages import JointScores, Scores
from glasu.protocol.requests import Evaluated, Evaluating
from glasu.protocol.state import Selection
from glasu.runtime.trained_model import TrainedModel
from support.monolith import (
    NUM_CLASSES,
    Monolith,
    assert_same,
    gradients,
    identical,
    run,
    settings,
    tiny_parties,
)
from support.pairs import cover_pairs
from support.tiny import simulate


def train_model(parties, **keys):
    return TrainedModel.of(
        simulate(parties, settings(**{"num_rounds": 2, "aggregation_layers": (1, 3), **keys})).clients
    )


def predict_in_chunks(model, parties, nodes, chunk_rows):
    """Return class probabilities of the nodes by an exact joint inference, with few rows in one message."""
    return replace(model, config=model.config.replace(wire={"chunk_rows": chunk_rows})).predict_proba(parties, nodes)


def dense(model, parties):
    return Monolith(model.config, parties, model.weights).probabilities().numpy()


@pytest.mark.parametrize(
    ("backbone", "aggregation", "owner", "sampler"),
    cover_pairs(["gcn", "gcnii", "sage", "gat"], ["mean", "concat"], [None, "b"], ["full", "neighbor"]),
)
def test_exact_evaluation_in_any_chunks_is_dense_inference(backbone, aggregation, owner, sampler):
    parties = tiny_parties(owner=owner)
    model = train_model(parties, backbone=backbone, aggregation=aggregation, labels=owner or "all", sampler=sampler)
    expected = dense(model, parties)
    np.testing.assert_allclose(model.predict_proba(parties), expected, rtol=1e-10, atol=1e-12)
    for chunk_rows in (5, 24, 1):
        found = predict_in_chunks(model, parties, np.arange(24), chunk_rows)
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_asking_for_some_nodes_in_any_order_gives_their_rows():
    parties = tiny_parties()
    model = train_model(parties)
    everything = model.predict_proba(parties)
    nodes = np.array([17, 3, 23, 0, 9])
    np.testing.assert_allclose(model.predict_proba(parties, nodes), everything[nodes], rtol=1e-10)
    np.testing.assert_allclose(predict_in_chunks(model, parties, nodes, 2), everything[nodes], rtol=1e-10)
    assert model.predict_proba(parties, np.empty(0, int)).shape == (0, NUM_CLASSES)


@pytest.mark.parametrize("sampler", ["full", "neighbor"])
@pytest.mark.parametrize("backbone", ["gcn", "gcnii", "sage", "gat"])
def test_nodes_may_be_asked_for_in_any_order_and_again(backbone, sampler):
    parties = tiny_parties()
    model = train_model(parties, backbone=backbone, sampler=sampler)
    everything = model.predict_proba(parties)
    rng = np.random.default_rng(0)
    count = parties[0].num_nodes
    for nodes in (rng.permutation(count), rng.integers(0, count, count), np.array([5, 3]), np.array([4, 4])):
        np.testing.assert_allclose(model.predict_proba(parties, nodes), everything[nodes], rtol=1e-10)


def test_smaller_chunks_are_more_messages_in_as_many_exchanges_and_the_same_run():
    config = settings(aggregation_layers=(1, 3), num_rounds=3, evaluate_every=1)
    whole = run(config, tiny_parties())
    cut = run(config.replace(wire={"chunk_rows": 4}), tiny_parties())
    assert_same(cut.final, whole.final)
    assert cut.meter.exchanges == whole.meter.exchanges
    assert cut.meter.messages > whole.meter.messages
    assert cut.meter.by_kind["tensor"] == whole.meter.by_kind["tensor"]


@pytest.mark.parametrize("layers", [(1, 3), ()])
def test_an_evaluation_in_several_products_tells_how_far_each_party_is(layers):
    def collect_events(config, num_nodes):
        events = []
        simulate(tiny_parties(num_nodes=num_nodes), config, observer=events.append, workers=1)
        return events

    config = settings(aggregation_layers=layers, sampler="neighbor", num_rounds=1)
    assert not [event for event in collect_events(config, 24) if isinstance(event, Evaluating)]  # one product per layer
    events = collect_events(config, 20_000)
    for party in "abc":
        own = [event for event in events if getattr(event, "party", None) in (party, None)]
        until = next(place for place, event in enumerate(own) if isinstance(event, Evaluated))
        shares = [event.share for event in own[:until] if isinstance(event, Evaluating)]
        assert len(shares) == 3 * 3  # all layers but the last need three products of at most 8192 rows
        assert shares == sorted(set(shares))
        assert all(0 < share < 1 for share in shares)


@pytest.mark.parametrize("layers", [(3,), (1, 3)])
def test_the_prediction_is_the_mean_of_the_clients_probabilities(layers):
    parties = tiny_parties()
    model = train_model(parties, aggregation_layers=layers, optimizer="adam", num_local_steps=3)
    whole = Monolith(model.config, parties, model.weights)
    hidden = whole.forward()
    own = torch.stack([whole.logits(m, hidden[m]).softmax(dim=1) for m in range(3)])
    assert (own[0] - own[1]).abs().max() > 1e-3  # the classifiers differ by now
    np.testing.assert_allclose(model.predict_proba(parties), own.mean(dim=0).detach(), rtol=1e-10)


def test_with_labels_at_one_party_the_prediction_is_the_owners_and_no_probability_travels():
    parties = tiny_parties(owner="c")
    sent = []
    config = settings(aggregation_layers=(1, 3), labels="c", num_rounds=2)
    done = run(config, parties, carry=lambda message: (sent.append(type(message)), message)[1])
    assert Scores not in sent
    whole = Monolith(config, parties, done.final)
    expected = whole.logits(2, whole.forward()[2]).softmax(dim=1)
    found = done.events[-1].metrics["accuracy"]
    nodes = parties[2].splits.test
    assert found == pytest.approx((expected.argmax(1).numpy() == parties[2].labels)[nodes].mean())


BAD_SCORES = {"huge": 1e30, "negative": -5.0, "a row that sums to 3/2": 0.5}


def replace_scores(kind, client, number):
    """Return a carrier that fills the first row of one kind of message: of one client, or of the server (None)."""

    def carry(message):
        if not isinstance(message, kind) or client not in (None, message.key.client):
            return message
        value = message.value.copy()
        value[0] = number
        return replace(message, value=value)

    return carry


@pytest.mark.parametrize("number", BAD_SCORES.values(), ids=BAD_SCORES)
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_the_server_names_the_sender_of_invalid_class_probabilities(task, number):
    parties = tiny_parties()
    if task == "multilabel":
        parties = with_labels(parties, np.eye(NUM_CLASSES, dtype=np.int64)[parties[0].labels])
    config = settings(aggregation_layers=(1, 3), num_rounds=1, task=task)
    carry = replace_scores(Scores, 1, number)
    if task == "multilabel" and 0 <= number <= 1:
        run(config, parties, carry=carry)  # rows of a multi-label task have any sum
        return
    with pytest.raises(ProtocolError, match=r"party 'b', .*class probabilities: expected") as caught:
        run(config, parties, carry=carry)
    assert caught.value.party == "b"


@pytest.mark.parametrize("number", BAD_SCORES.values(), ids=BAD_SCORES)
def test_a_client_refuses_a_mean_that_holds_no_class_probabilities(number):
    config = settings(aggregation_layers=(1, 3), num_rounds=1)
    with pytest.raises(ProtocolError, match="class probabilities from the server: expected"):
        run(config, tiny_parties(), carry=replace_scores(JointScores, None, number))


# --- schedule, nodes and selection -------------------------------------------------------------------------------


def with_labels(parties, labels):
    return [replace(one, labels=labels) for one in parties]


def test_the_test_labels_change_nothing_but_the_final_figure():
    parties = tiny_parties(num_nodes=40)
    test = parties[0].splits.test
    other = parties[0].labels.copy()
    other[test] = (other[test] + 1) % NUM_CLASSES
    config = settings(aggregation_layers=(1, 3), num_rounds=6, evaluate_every=2, optimizer="adam", patience=2)
    first, second = (
        simulate(kind, config, clock=lambda: 0.0).report.to_dict() for kind in (parties, with_labels(parties, other))
    )
    assert first.pop("test") != second.pop("test")
    assert first == second


def test_unknown_labels_outside_the_training_split_do_not_count():
    parties = tiny_parties(num_nodes=40)
    validation = parties[0].splits.validation
    config = settings(aggregation_layers=(1, 3), num_rounds=2)
    some = parties[0].labels.copy()
    some[validation[::2]] = -1
    fewer = Splits(parties[0].splits.train, validation[1::2], parties[0].splits.test)
    unknown = simulate(with_labels(parties, some), config).report
    absent = simulate([replace(one, splits=fewer) for one in parties], config).report
    assert unknown.validation == absent.validation


@pytest.mark.parametrize(
    ("rounds", "every", "expected"), [(6, 2, [2, 4, 6]), (5, 2, [2, 4, 5]), (3, 10, [3]), (2, 1, [1, 2])]
)
def test_evaluation_follows_every_nth_round_and_the_last_one(rounds, every, expected):
    for layers in [(1, 3), ()]:
        config = settings(aggregation_layers=layers, num_rounds=rounds, evaluate_every=every)
        history = simulate(tiny_parties(), config).report.history
        assert [entry["round"] for entry in history] == expected


def test_a_history_entry_tells_the_loss_of_its_round_the_scores_and_the_bytes_so_far():
    config = settings(aggregation_layers=(1, 3), num_rounds=4, evaluate_every=2, num_local_steps=2)
    report = simulate(tiny_parties(), config).report
    assert [entry["loss"] for entry in report.history] == [report.losses[1], report.losses[3]]
    assert report.history[0]["bytes"] < report.history[1]["bytes"]
    moved = report.traffic["bytes_to_server"] + report.traffic["bytes_to_clients"]
    assert report.history[1]["bytes"] < moved
    assert report.history[0]["exchanges"] < report.history[1]["exchanges"] < report.traffic["exchanges"]
    scores = {"loss", "val_accuracy", "val_macro_f1", "val_loss"}
    assert set(report.history[0]) == {"round", *scores, "bytes", "exchanges", "seconds"}


def search(**keys):
    """Run with a high learning rate, so that validation scores vary; return run and accuracies by round."""
    config = settings(aggregation_layers=(1, 3), evaluate_every=1, optimizer="adam", **keys)
    done = run(config, tiny_parties(num_nodes=40, seed=5))
    found = [event for event in done.events if isinstance(event, Evaluated) and event.split == "validation"]
    return done, {event.round: event.metrics["accuracy"] for event in found}


def test_the_selected_model_is_the_earliest_of_the_best_on_validation():
    done, accuracy = search(num_rounds=14, learning_rate=0.08)
    best = max(accuracy.values())
    rounds = [index for index in accuracy if accuracy[index] == best]
    assert len(rounds) > 1  # there is a tie ...
    assert rounds[0] < 14
    assert done.server.progress.selection.best_round == rounds[0]
    chosen = [own[rounds[0] - 1] for own in done.after_round]
    assert identical([client.progress.best_weights for client in done.clients], chosen)
    assert identical(
        [client.learner.weights() for client in done.clients], chosen
    )  # ... and the test was on those weights
    assert not identical(done.final, chosen)
    parties = tiny_parties(num_nodes=40, seed=5)
    guess = Monolith(done.clients[0].config, parties, chosen).probabilities().argmax(dim=1).numpy()
    nodes = parties[0].splits.test
    assert done.events[-1].metrics["accuracy"] == pytest.approx((guess == parties[0].labels)[nodes].mean())


@pytest.mark.parametrize("aggregation_layers", [(1, 3), ()])
def test_a_run_stops_at_the_first_evaluation_that_reaches_the_score_asked_for(aggregation_layers):
    keys = {"aggregation_layers": aggregation_layers, "num_rounds": 14, "evaluate_every": 1, "learning_rate": 0.5}
    parties = tiny_parties()[: 2 if aggregation_layers else 1]
    whole = simulate(parties, settings(**keys)).report
    scores = [entry["val_accuracy"] for entry in whole.history]
    goal = max(scores)
    first = next(index for index, score in enumerate(scores) if score >= goal)
    stopped = simulate(parties, settings(**keys, stop_at=goal)).report
    assert [entry["val_accuracy"] for entry in stopped.history] == scores[: first + 1]
    assert 0 < first < 13  # neither immediately nor never
    assert stopped.validation.round == first + 1


@pytest.mark.parametrize("patience", [1, 3])
def test_a_run_stops_after_patience_evaluations_without_improvement(patience):
    _, accuracy = search(num_rounds=14, learning_rate=0.08)
    best, since, expected = -1.0, 0, 14
    for index, score in accuracy.items():
        best, since = (score, 0) if score > best else (best, since + 1)
        if since == patience:
            expected = index
            break
    assert expected < 14
    done, seen = search(num_rounds=14, learning_rate=0.08, patience=patience)
    assert list(seen) == list(range(1, expected + 1))
    assert [len(own) for own in done.after_round] == [expected] * 3
    assert len(done.server.progress.losses) == expected
    assert done.server.progress.stopped


def test_a_client_alone_stops_by_its_own_scores():
    config = settings(aggregation_layers=(), num_rounds=14, evaluate_every=1, patience=2, learning_rate=1e-300)
    history = simulate(tiny_parties(), config).report.history  # nothing changes, so nothing improves
    assert [entry["round"] for entry in history] == [1, 2, 3]


def test_selection_keeps_the_earlier_of_equals_and_the_latest_where_there_is_no_score():
    selection = Selection()
    for index, score in enumerate([0.3, 0.5, 0.5, 0.4], start=1):
        selection = selection.add_score(score, index)
    assert (selection.best, selection.best_round, selection.evaluations_since) == (0.5, 2, 2)
    blind = Selection().add_score(float("nan"), 1).add_score(float("nan"), 2)
    assert (blind.best_round, blind.evaluations_since) == (2, 0)


def test_a_subset_of_validation_nodes_is_fixed_and_does_not_touch_the_test():
    seen = []

    def see(message):
        if isinstance(message, Scores) and message.key.client == 0:
            seen.append(len(message.value))
        return message

    parties = tiny_parties(num_nodes=40)
    config = settings(aggregation_layers=(3,), num_rounds=3, evaluate_every=1, evaluate_nodes=4, learning_rate=1e-300)
    done = run(config, parties, carry=see)
    assert seen == [4, 4, 4, 10]
    chosen = done.clients[0].data.validation_examples()
    assert len(chosen) == 4
    assert np.isin(chosen, parties[0].splits.validation).all()
    scores = [event.metrics for event in done.events if isinstance(event, Evaluated) and event.split == "validation"]
    assert scores[0] == scores[1] == scores[2]  # the same nodes each time
    guess = Monolith(config, parties, done.final).probabilities().argmax(dim=1).numpy()
    assert scores[0]["accuracy"] == pytest.approx((guess == parties[0].labels)[chosen].mean())


# --- several labels per node -------------------------------------------------------------------------------------


def multilabel_parties(owner=None):
    parties = tiny_parties(num_nodes=40)
    rng = np.random.default_rng(6)
    scores = sum(one.features @ rng.standard_normal((one.num_features, 4)) for one in parties)
    told = {"labels": (scores > 0.3).astype(np.int64), "classes": ("p", "q", "r", "s")}
    nobody = {"labels": None, "classes": (), "splits": None}
    return [replace(one, **(told if owner in (None, one.name) else nobody)) for one in parties]


@pytest.mark.parametrize("owner", [None, "a"])
def test_a_multilabel_task_trains_by_the_gradient_of_its_binary_losses(owner):
    parties = multilabel_parties(owner)
    config = settings(task="multilabel", aggregation_layers=(1, 3), backward="joint", labels=owner or "all")
    done = run(config, parties, scatter=17)
    whole = Monolith(config, parties, done.initial)
    assert_same(gradients(done.clients), whole.gradients(sum(whole.losses().values())))


@pytest.mark.parametrize("owner", [None, "a"])
def test_a_multilabel_task_is_learned_selected_by_micro_f1_and_predicted(owner):
    parties = multilabel_parties(owner)
    config = settings(
        task="multilabel",
        aggregation_layers=(1, 3),
        hidden=12,
        num_local_steps=2,
        optimizer="adam",
        learning_rate=0.03,
        num_rounds=20,
        evaluate_every=4,
        labels=owner or "all",
    )
    done = simulate(parties, config)
    report = done.report
    assert report.losses[-1] < 0.8 * report.losses[0]
    scores = {entry["round"]: entry["val_micro_f1"] for entry in report.history}
    assert report.validation.micro_f1 == max(scores.values())
    assert report.validation.round == max(scores, key=lambda index: (scores[index], -index))
    model = TrainedModel.of(done.clients)
    guess = model.predict(parties)
    np.testing.assert_array_equal(guess, dense(model, parties) > 0.5)
    truth, nodes = parties[0].labels, parties[0].splits.test
    hits = (guess & truth)[nodes].sum()
    assert report.test.micro_f1 == pytest.approx(2 * hits / (guess[nodes].sum() + truth[nodes].sum()))
    assert report.test.accuracy == pytest.approx((guess == truth)[nodes].mean())
