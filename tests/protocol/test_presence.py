"""Party dropout against one dense model that knows which clients contribute to a round."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glasu.config import RunConfig
from glasu.errors import AlignmentError, ConfigError, ProtocolError
from glasu.protocol.messages import Partial, Waiting
from glasu.protocol.presence import draw_present, list_subsets
from glasu.protocol.requests import SubsetScored
from glasu.protocol.state import Identity
from glasu.runtime.trained_model import TrainedModel
from support.monolith import ALL_LAYERS, Monolith, assert_same, identical, run, settings, tiny_parties

RATE, ROUNDS = 0.2, 5


def descend(whole, loss, m, rate):
    values = list(whole.weights[m].values())
    found = torch.autograd.grad(loss, values, materialize_grads=True)
    with torch.no_grad():
        for value, gradient in zip(values, found, strict=True):
            value -= rate * gradient


def train_densely(whole, config, owner):
    """Train the dense model: only the clients that are present contribute to a mean, and only they take steps."""
    layers, last = range(whole.model.num_layers), whole.model.num_layers - 1

    def rows(layer, values):  # S[L] is the batch, all other sets are all nodes
        return values[whole.train_nodes] if layer == last else values

    def walk(m, joints, sent, present, C=None):
        """Return H_m[L], and the sum of <C_m[l], H_m^+[l]>."""
        (hidden, initial), linear = whole.start(m), 0.0
        for layer in layers:
            hidden = rows(layer, whole.partial(m, layer, hidden, initial))
            if layer in whole.model.aggregation_layers:
                linear = linear + (C[m, layer] * hidden).sum() if C else linear
                hidden = joints[layer].detach() + (hidden - sent[m, layer]) / len(present)
        return hidden, linear

    for index in range(config.train.num_rounds):
        present = draw_present(config, 3, index)
        hidden, initial = {}, {}
        for m in present:
            hidden[m], initial[m] = whole.start(m)
        sent, joints, copies = {}, {}, {}
        for layer in layers:
            parts = {m: rows(layer, whole.partial(m, layer, hidden[m], initial[m])) for m in present}
            if layer in whole.model.aggregation_layers:
                joints[layer] = sum(parts.values()) / len(present)
                sent |= {(m, layer): part.detach() for m, part in parts.items()}
                parts = {m: joints[layer].clone() for m in present}  # a client's copy has that client's gradient
                copies |= {(m, layer): part for m, part in parts.items()}
            hidden = parts
        top = joints[last]
        if config.train.backward == "joint":
            losers = present if owner is None else (owner,)
            total = sum(whole.loss(m, hidden.get(m, top)) for m in losers)
            leaves = [value for m in present for value in whole.weights[m].values()]
            tensors = [*leaves, *joints.values(), *copies.values()]
            found = torch.autograd.grad(total, tensors, materialize_grads=True)
            whole_at = dict(zip(joints, found[len(leaves) :], strict=False))
            own_at = dict(zip(copies, found[len(leaves) + len(joints) :], strict=True))
            C = {(m, layer): (whole_at[layer] - own_at[m, layer]) / len(present) for m, layer in copies}
            for step in range(config.train.num_local_steps):
                if step:
                    walked = [(m, *walk(m, joints, sent, present, C)) for m in present]
                    own = sum(linear + (whole.loss(m, H) if owner in (None, m) else 0) for m, H, linear in walked)
                    found = torch.autograd.grad(own, leaves, materialize_grads=True)
                with torch.no_grad():
                    for leaf, gradient in zip(leaves, found, strict=False):
                        leaf -= RATE * gradient
            continue
        leaf = top.detach().clone().requires_grad_()
        if owner is not None:
            (G,) = torch.autograd.grad(whole.loss(owner, leaf), leaf)
        for m in present:
            for _ in range(config.train.num_local_steps):
                H, _ = walk(m, joints, sent, present)
                descend(whole, whole.loss(m, H) if owner in (None, m) else (G * H).sum(), m, RATE)


@pytest.mark.parametrize("owner", [None, 1])
@pytest.mark.parametrize(("backward", "steps"), [("local", 3), ("joint", 1), ("joint", 3)])
@pytest.mark.parametrize("layers", [(3,), (1, 3), ALL_LAYERS])
def test_only_the_clients_that_are_present_contribute_and_take_steps(layers, backward, steps, owner):
    keys = {"aggregation_layers": layers, "backward": backward, "num_local_steps": steps, "learning_rate": RATE}
    labels = "all" if owner is None else "b"
    config = settings(num_rounds=ROUNDS, labels=labels, party_dropout=0.5, **keys)
    assert any(len(draw_present(config, 3, index)) < 3 for index in range(ROUNDS))
    parties = tiny_parties(owner=None if owner is None else "b")
    done = run(config, parties, scatter=3)
    whole = Monolith(config, parties, done.initial)
    train_densely(whole, config, owner)
    assert_same(done.final, whole.weights)


def test_an_absent_client_keeps_its_weights_and_sends_no_tensor():
    config = settings(num_rounds=ROUNDS, party_dropout=0.5)
    senders = []

    def see(message):
        if isinstance(message, (Partial, Waiting)) and message.key.phase.name == "TRAINING":
            senders.append((message.key.round, message.key.client, isinstance(message, Partial)))
        return message

    done = run(config, tiny_parties(), carry=see)
    for index, client, is_tensor in senders:
        assert is_tensor == (client in draw_present(config, 3, index))
    for client, weights in enumerate(done.after_round):
        states = [done.initial[client], *weights]
        for index in range(ROUNDS):
            moved = not identical([states[index]], [states[index + 1]])
            assert moved == (client in draw_present(config, 3, index))


def test_rounds_in_which_all_are_present_have_the_bits_of_the_plain_algorithm():
    config = settings(num_rounds=1, party_dropout=1e-9)
    assert draw_present(config, 3, 0) == (0, 1, 2)
    plain, dropped = run(settings(num_rounds=1), tiny_parties()), run(config, tiny_parties())
    assert identical(dropped.final, plain.final)


def test_some_client_is_always_present_and_the_share_of_absences_is_the_rate():
    config = settings(party_dropout=0.9)
    drawn = [draw_present(config, 3, index) for index in range(2000)]
    assert min(map(len, drawn)) == 1
    assert len({present[0] for present in drawn if len(present) == 1}) == 3
    shares = np.bincount(np.concatenate(drawn), minlength=3) / len(drawn)
    expected = 0.1 + 0.9**3 / 3  # present by itself, or drawn because all would be absent
    np.testing.assert_allclose(shares, expected, atol=0.04)


def test_a_tensor_from_an_absent_client_is_refused():
    config = settings(num_rounds=ROUNDS, party_dropout=0.5)
    kept = {}

    def pretend(message):
        if isinstance(message, Partial):
            kept["value"] = message.value
        if isinstance(message, Waiting) and "value" in kept:
            return Partial(message.key, kept["value"])
        return message

    with pytest.raises(ProtocolError, match="expected a tensor from party"):
        run(config, tiny_parties(), carry=pretend)


def test_all_but_one_and_each_alone_are_scored_and_a_subset_has_the_label_owner():
    def subsets(names, labels, rate=0.3):
        config = RunConfig().replace(train={"party_dropout": rate, "labels": labels})
        return list_subsets(config, Identity(names, config.train.label_owner, 0, b""))

    three = ("a", "b", "c")
    assert subsets(three, "all") == [(1, 2), (0, 2), (0, 1), (0,), (1,), (2,)]
    assert subsets(three, "b") == [(1, 2), (0, 1), (1,)]
    assert subsets(("a", "b"), "all") == [(1,), (0,)]
    assert subsets(three, "all", rate=0.0) == []


@pytest.mark.parametrize(
    ("model", "reason"),
    [({"aggregation": "concat"}, 'use aggregation = "mean"'), ({"aggregation_layers": ()}, "train alone")],
)
def test_party_dropout_is_refused_where_a_mean_over_some_parties_does_not_exist(model, reason):
    with pytest.raises(ConfigError, match=reason):
        RunConfig().replace(model=model, train={"party_dropout": 0.3})


@pytest.mark.parametrize("owner", [None, "b"])
@pytest.mark.parametrize("layers", [(3,), (1, 3)])
def test_a_subset_is_scored_as_a_model_of_these_parties_alone(layers, owner):
    config = settings(num_rounds=2, party_dropout=0.4, aggregation_layers=layers, labels=owner or "all")
    parties = tiny_parties(owner=owner)
    done = run(config, parties)
    events = {event.parties: event.metrics for event in done.events if isinstance(event, SubsetScored)}
    expected = list_subsets(config, done.clients[0].identity)
    assert list(events) == [tuple("abc"[client] for client in subset) for subset in expected]
    model = TrainedModel.of(done.clients)
    labelled = next(party for party in parties if party.labels is not None)
    validation = labelled.splits.validation
    for names, metrics in events.items():
        chosen = [party for party in parties if party.name in names]
        scores = model.scores(chosen, validation)
        found = done.clients[0].learner.task.evaluate(scores, labelled.labels[validation])
        assert found == pytest.approx(metrics, nan_ok=True)
        assert model.find_subset(names).metrics == metrics


def test_a_subset_predicts_the_mean_of_its_own_parts():
    config = settings(num_rounds=2, party_dropout=0.4)
    parties = tiny_parties()
    done = run(config, parties)
    chosen = [0, 2]
    kept = [parties[m] for m in chosen]
    whole = Monolith(config, kept, [done.clients[m].progress.best_weights for m in chosen])
    scores = TrainedModel.of(done.clients).scores(kept)
    np.testing.assert_allclose(scores, whole.probabilities().numpy(), atol=1e-12)


def test_a_subset_cannot_predict_without_party_dropout_or_the_label_owner():
    parties = tiny_parties()
    plain = TrainedModel.of(run(settings(num_rounds=1), parties).clients)
    with pytest.raises(AlignmentError, match="after training with train"):
        plain.scores(parties[:2])
    owned = tiny_parties(owner="c")
    dropped = TrainedModel.of(run(settings(num_rounds=1, party_dropout=0.3, labels="c"), owned).clients)
    with pytest.raises(ConfigError, match="it has the labels"):
        dropped.scores(owned[:2])


def test_a_saved_model_keeps_the_scores_of_subsets(tmp_path):
    model = TrainedModel.of(run(settings(num_rounds=1, party_dropout=0.3), tiny_parties()).clients)
    model.save(tmp_path)
    assert TrainedModel.load(tmp_path).subsets == model.subsets != ()
