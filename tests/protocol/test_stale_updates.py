from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from glasu.privacy.release import Clip, Protection, Release
from glasu.protocol.messages import Gradient, Joint, Partial
from glasu.wire.encodings import use_for_all_kinds
from glasu.wire.floats import Plain
from support.messages import with_valid_scores
from support.monolith import ALL_LAYERS, Monolith, assert_same, gradients, run, settings, tiny_parties
from support.perturbations import Rounding, row_noise
from support.spies import run_with_spies


def extract(whole, joint, sent, m):
    """Return H_{-m}[l+1], by the paper's formula."""
    if whole.model.aggregation == "mean":
        return joint - sent / whole.num_clients
    width = sent.shape[1]
    return torch.cat([joint[:, : m * width], joint[:, (m + 1) * width :]], dim=1)


def merge(whole, others, partial, m):
    """Return Agg(H_{-m}[l+1], H_m^+[l])."""
    if whole.model.aggregation == "mean":
        return others + partial / whole.num_clients
    before = m * partial.shape[1]
    return torch.cat([others[:, :before], partial, others[:, before:]], dim=1)


def algorithm_1(whole, rounds, steps, rate, *, clip=lambda part: part, sent=lambda t, layer, m, part: part):
    """Train `whole` by the paper's Algorithms 1, 3 and 4 (6 and 7 with one label owner), without sampling.

    `clip` is the differentiable part of the gate; `sent` says what client m lets out of H_m^+[l] in round t.
    """
    clients, layers = range(whole.num_clients), range(whole.model.num_layers)
    owner = next((m for m in clients if "classifier.weight" not in whole.weights[m]), None)
    owner = None if owner is None else next(m for m in clients if "classifier.weight" in whole.weights[m])

    def rows(layer, values):  # S[L] is the batch, all other sets are all nodes
        return values[whole.train_nodes] if layer == layers[-1] else values

    for t in range(rounds):
        with torch.no_grad():  # JointInference
            hidden, initial = (list(pair) for pair in zip(*(whole.start(m) for m in clients), strict=True))
            others = {}
            for layer in layers:
                parts = [rows(layer, whole.partial(m, layer, hidden[m], initial[m])) for m in clients]
                if layer in whole.model.aggregation_layers:
                    parts = [sent(t, layer, m, part) for m, part in enumerate(parts)]
                    joint = whole.aggregate(parts)
                    others |= {(m, layer): extract(whole, joint, parts[m], m) for m in clients}
                    parts = [joint] * whole.num_clients
                hidden = parts
        if owner is not None:  # G
            top = hidden[owner].clone().requires_grad_()
            (G,) = torch.autograd.grad(whole.loss(owner, top), top)
        for m in clients:
            for _ in range(steps):  # LocalUpdate
                H, first = whole.start(m)
                for layer in layers:
                    H = rows(layer, whole.partial(m, layer, H, first))
                    if layer in whole.model.aggregation_layers:
                        H = merge(whole, others[m, layer], clip(H), m)
                loss = whole.loss(m, H) if owner in (None, m) else (G * H).sum()
                values = list(whole.weights[m].values())
                for value, gradient in zip(values, torch.autograd.grad(loss, values), strict=True):
                    with torch.no_grad():
                        value -= rate * gradient


@pytest.mark.parametrize("labels", ["all", "b"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("layers", [(3,), (1, 3), ALL_LAYERS])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_training_gives_the_weights_of_algorithm_1(aggregation, layers, steps, labels):
    backbone = "gcnii" if steps == 4 else "gcn"
    keys = {"aggregation": aggregation, "aggregation_layers": layers, "num_local_steps": steps, "labels": labels}
    config = settings(backbone=backbone, num_rounds=2, learning_rate=0.2, **keys)
    parties = tiny_parties(owner=None if labels == "all" else labels)
    done = run(config, parties, scatter=9)
    whole = Monolith(config, parties, done.initial)
    algorithm_1(whole, rounds=2, steps=steps, rate=0.2)
    assert_same(done.final, whole.weights)


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_with_one_step_per_round_and_one_aggregation_nothing_is_stale(aggregation):
    """Algorithm 1 with Q = 1, K = 1 and one label owner is gradient descent on the whole model."""
    keys = {"aggregation": aggregation, "aggregation_layers": (3,), "labels": "a"}
    config, parties = settings(backbone="sage", num_rounds=4, **keys), tiny_parties(owner="a")
    done = run(config, parties, scatter=10)
    whole = Monolith(config, parties, done.initial)
    for _ in range(4):
        whole.descend(whole.gradients(whole.losses()[0]), rate=0.1)
    assert_same(done.final, whole.weights)


def test_more_steps_per_round_lead_elsewhere_than_as_many_rounds():
    keys = {"aggregation_layers": (1, 3), "learning_rate": 0.2}
    stale = run(settings(num_rounds=1, num_local_steps=4, **keys), tiny_parties(), scatter=11)
    fresh = run(settings(num_rounds=4, num_local_steps=1, **keys), tiny_parties(), scatter=11)
    with pytest.raises(AssertionError, match="off by"):
        assert_same(stale.final, fresh.final)


@pytest.mark.parametrize("steps", [1, 3])
def test_others_minimise_the_product_with_the_one_gradient_of_the_round_and_the_owner_its_present_loss(steps):
    gradients_sent, joints = [], []

    def see(message):
        if isinstance(message, Gradient):
            gradients_sent.append(torch.from_numpy(message.value.copy()))
        elif isinstance(message, Joint):
            joints.append(torch.from_numpy(message.value.copy()))
        return message

    config = settings(aggregation_layers=(3,), labels="b", num_local_steps=steps, learning_rate=0.3)
    parties = tiny_parties(owner="b")
    done = run(config, parties, scatter=12, carry=see)
    assert len(gradients_sent) == 1
    (G,) = gradients_sent
    before_last = (
        run(settings(**{**vars_of(config), "num_local_steps": steps - 1}), parties, scatter=12) if steps > 1 else None
    )
    start = done.initial if before_last is None else before_last.final
    whole = Monolith(config, parties, done.initial)
    batch = whole.train_nodes
    parts = [whole_partial(whole, m)[batch].detach() for m in range(3)]  # the values that were sent
    torch.testing.assert_close(joints[0], whole.aggregate(parts), rtol=1e-12, atol=1e-12)
    leaf = joints[0].requires_grad_()
    torch.testing.assert_close(G, torch.autograd.grad(whole.loss(1, leaf), leaf)[0], rtol=1e-12, atol=1e-14)
    now = Monolith(config, parties, start)  # the weights at the start of the last step
    expected = []
    for m in range(3):
        H = merge(whole, extract(whole, joints[0].detach(), parts[m], m), whole_partial(now, m)[batch], m)
        loss = now.loss(1, H) if m == 1 else (G * H).sum()
        expected.append(now.gradients(loss)[m])
    assert_same(gradients(done.clients), expected)


def vars_of(config):
    """Return the keys of a config that `settings` can take again."""
    parts = (config.model, config.train, config.wire)
    return {item.name: getattr(part, item.name) for part in parts for item in fields(part)}


def whole_partial(whole, m):
    """Return H_m^+[L-1] at all nodes, where nothing is aggregated below."""
    H, initial = whole.start(m)
    for layer in range(whole.model.num_layers):
        H = whole.partial(m, layer, H, initial)
    return H


@pytest.mark.parametrize("backbone", ["gcn", "gcnii", "gat"])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_the_first_step_has_the_dropout_masks_of_the_joint_inference_and_later_steps_have_new_ones(
    aggregation, backbone
):
    keys = {"aggregation": aggregation, "aggregation_layers": (1, 3), "backbone": backbone}
    config = settings(dropout=0.5, num_local_steps=2, learning_rate=1e-300, num_rounds=2, **keys)  # weights stand still
    grid = behind(bits=45)  # a release that is not transparent: step 0 goes forward again
    _, spies = run_with_spies(config, tiny_parties(), scatter=13, arrange=grid, carry=with_valid_scores())
    for spy in spies:
        assert len(spy.extracted) == 4  # two rounds, two layers
        assert len(spy.merged) == 8  # two steps each
        for t in range(2):
            joints = [joint for joint, _, _ in spy.extracted[2 * t : 2 * t + 2]]
            first, later = spy.merged[4 * t : 4 * t + 2], spy.merged[4 * t + 2 : 4 * t + 4]
            for joint, (_, _, again), (_, _, anew) in zip(joints, first, later, strict=True):
                torch.testing.assert_close(again, joint, rtol=1e-12, atol=1e-12)
                assert (anew - joint).abs().max() > 1e-3
        assert (spy.extracted[0][1] - spy.extracted[2][1]).abs().max() > 1e-3  # another round, other masks


def gate(clip=None, noise=0.0, bits=None):
    """Return the gate that replaces a client's plain gate."""
    perturbations = [] if bits is None else [Rounding(bits)]
    noisy = row_noise(noise, 1.0 if clip is None else clip) if noise else None
    protection = Protection(None if clip is None else Clip(clip), noisy, perturbations)
    return Release(use_for_all_kinds(Plain("fp64")), use_for_all_kinds(protection))


def behind(**keys):
    def arrange(clients):
        for client in clients:
            client.release = gate(**keys)

    return arrange


def recorder():
    """Return a `carry` and the partials that it saw: {(round, layer, client): tensor}."""
    seen = {}

    def carry(message):
        if isinstance(message, Partial) and message.key.phase.reported == "training":
            seen[message.key.round, message.key.layer, message.key.client] = torch.from_numpy(message.value.copy())
        return message

    return carry, seen


@pytest.mark.parametrize(
    "protection", [{"bits": 3}, {"clip": 0.8, "noise": 0.3}, {"clip": 0.8, "noise": 0.3, "bits": 3}]
)
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_extract_uses_the_tensor_as_it_was_sent(aggregation, protection):
    config = settings(aggregation=aggregation, aggregation_layers=(1, 3), num_local_steps=2)
    carry, seen = recorder()
    parties = tiny_parties()
    done, spies = run_with_spies(
        config, parties, scatter=14, arrange=behind(**protection), carry=with_valid_scores(carry)
    )
    whole = Monolith(config, parties, done.initial)
    for m, spy in enumerate(spies):
        for layer, (joint, sent, others) in zip((1, 3), spy.extracted, strict=True):
            assert torch.equal(sent, seen[0, layer, m])
            torch.testing.assert_close(joint, whole.aggregate([seen[0, layer, c] for c in range(3)]))
            torch.testing.assert_close(others, extract(whole, joint, seen[0, layer, m], m), rtol=1e-13, atol=1e-13)


def test_in_local_updates_the_own_part_is_clipped_but_neither_noised_nor_rounded():
    config = settings(aggregation_layers=(1, 3), num_local_steps=1)
    carry, seen = recorder()
    parties = tiny_parties()
    done, spies = run_with_spies(
        config, parties, scatter=15, arrange=behind(clip=0.8, noise=0.3, bits=3), carry=with_valid_scores(carry)
    )
    whole = Monolith(config, parties, done.initial)
    for m, spy in enumerate(spies):
        clean = whole.partial(m, 1, whole.partial(m, 0, *whole.start(m)), None).detach()
        lengths = clean.norm(dim=1, keepdim=True)
        assert (lengths > 0.8).any()  # some values are clipped
        clipped = clean * torch.minimum(torch.tensor(1.0), 0.8 / lengths)
        torch.testing.assert_close(spy.merged[0][1], clipped, rtol=1e-12, atol=1e-12)
        sent = seen[0, 1, m]
        assert torch.equal(sent * 8, (sent * 8).round())  # on the grid
        assert (sent - clipped).abs().mean() > 0.1  # noised


@pytest.mark.parametrize("labels", ["all", "b"])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_behind_a_gate_training_is_algorithm_1_with_the_tensors_that_were_sent(aggregation, labels):
    keys = {"aggregation": aggregation, "aggregation_layers": (1, 3), "num_local_steps": 3, "labels": labels}
    config = settings(num_rounds=2, learning_rate=0.2, **keys)
    carry, seen = recorder()
    parties = tiny_parties(owner=None if labels == "all" else labels)
    protect = behind(clip=2.0) if labels == "b" else behind(clip=0.8, noise=0.2, bits=6)
    done = run(config, parties, scatter=16, arrange=protect, carry=with_valid_scores(carry))
    norm = 2.0 if labels == "b" else 0.8  # G passes the gate too; a clip of 2.0 does not change it
    whole = Monolith(config, parties, done.initial)
    algorithm_1(
        whole,
        rounds=2,
        steps=3,
        rate=0.2,
        clip=lambda part: part * (norm / part.norm(dim=1, keepdim=True).clamp(min=norm)),
        sent=lambda t, layer, m, part: seen[t, layer, m],
    )
    assert_same(done.final, whole.weights)


def test_a_redone_release_is_the_same_bytes_and_another_round_has_other_noise():
    config = settings(aggregation_layers=(3,), num_rounds=2, learning_rate=1e-300)
    (first, seen), (again, repeated) = recorder(), recorder()
    run(config, tiny_parties(), arrange=behind(noise=0.5), carry=with_valid_scores(first))
    run(config, tiny_parties(), arrange=behind(noise=0.5), carry=with_valid_scores(again))
    assert all(torch.equal(seen[key], repeated[key]) for key in seen)
    assert (seen[0, 3, 0] - seen[1, 3, 0]).abs().mean() > 0.1
