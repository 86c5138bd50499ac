from __future__ import annotations

import pytest
import torch

from support.monolith import (
    ALL_LAYERS,
    SOME_LAYERS,
    Monolith,
    assert_same,
    gradients,
    identical,
    run,
    settings,
    tiny_parties,
)

BACKBONES = ["gcn", "gcnii", "sage", "gat"]


def joint(**keys):
    return settings(backward="joint", **keys)


@pytest.mark.parametrize("layers", SOME_LAYERS)
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_joint_gradient_is_that_of_the_summed_losses_of_one_whole_model(backbone, aggregation, layers):
    config = joint(backbone=backbone, aggregation=aggregation, aggregation_layers=layers)
    parties = tiny_parties()
    done = run(config, parties, scatter=1)
    whole = Monolith(config, parties, done.initial)
    expected = whole.gradients(sum(whole.losses().values()))
    assert_same(gradients(done.clients), expected)
    matrices = [value for own in expected for key, value in own.items() if key.endswith("weight")]
    assert all(matrix.abs().max() > 1e-7 for matrix in matrices)  # the compared gradients are not zero


@pytest.mark.parametrize("layers", SOME_LAYERS)
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
@pytest.mark.parametrize("backbone", ["gcn", "gcnii"])
def test_with_labels_at_one_party_the_joint_gradient_is_that_of_the_owners_loss(backbone, aggregation, layers):
    config = joint(backbone=backbone, aggregation=aggregation, aggregation_layers=layers, labels="b")
    parties = tiny_parties(owner="b")
    done = run(config, parties, scatter=2)
    whole = Monolith(config, parties, done.initial)
    losses = whole.losses()
    assert list(losses) == [1]
    assert_same(gradients(done.clients), whole.gradients(losses[1]))


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
@pytest.mark.parametrize("labels", ["all", "c"])
def test_layer_norms_are_differentiated_through_the_server_too(labels, aggregation):
    config = joint(normalization="layer", aggregation=aggregation, aggregation_layers=(1, 3), labels=labels)
    parties = tiny_parties(owner=None if labels == "all" else labels)
    done = run(config, parties, scatter=3)
    whole = Monolith(config, parties, done.initial)
    assert_same(gradients(done.clients), whole.gradients(sum(whole.losses().values())))


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_rounds_of_joint_gradients_are_rounds_of_gradient_descent_on_one_model(aggregation):
    config = joint(backbone="gcnii", aggregation=aggregation, aggregation_layers=(1, 3), num_rounds=5)
    parties = tiny_parties()
    done = run(config, parties, scatter=4)
    whole = Monolith(config, parties, done.initial)
    losses = []
    for _ in range(5):
        found = whole.losses()
        losses.append(sum(loss.item() for loss in found.values()) / 3)
        whole.descend(whole.gradients(sum(found.values())), rate=0.1)
    assert_same(done.final, whole.weights)
    assert done.server.progress.losses == pytest.approx(losses, rel=1e-9)


def test_the_server_multiplies_gradients_by_one_over_m_for_mean_and_cuts_columns_for_concat():
    for aggregation in ("mean", "concat"):
        config = joint(aggregation=aggregation, aggregation_layers=(3,))
        sent, received = {}, {}

        def see(message, sent=sent, received=received):
            if type(message).__name__ == "Gradient":
                sent[message.key.client] = torch.from_numpy(message.value.copy())
            elif type(message).__name__ == "JointGradient":
                received[len(received)] = torch.from_numpy(message.value.copy())
            return message

        run(config, tiny_parties(), scatter=5, carry=see)
        total = sent[0] + sent[1] + sent[2]
        for m in range(3):
            share = total / 3 if aggregation == "mean" else total[:, 6 * m : 6 * m + 6]
            torch.testing.assert_close(received[m], share, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("optimizer", "keys"), [("sgd", {"momentum": 0.9, "weight_decay": 0.01}), ("adam", {})])
@pytest.mark.parametrize(("backward", "layers"), [("joint", ALL_LAYERS), ("local", (1, 3))])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_one_client_is_a_plain_centralised_model_step_by_step(backbone, layers, backward, optimizer, keys):
    config = settings(
        backbone=backbone,
        aggregation_layers=layers,
        backward=backward,
        optimizer=optimizer,
        learning_rate=0.02,
        num_rounds=4,
        **keys,
    )
    parties = tiny_parties(1)
    done = run(config, parties)
    whole = Monolith(config, parties, done.initial)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    plain = kind(list(whole.weights[0].values()), lr=0.02, foreach=False, **keys)
    for round_index in range(4):
        plain.zero_grad()
        whole.losses()[0].backward()
        plain.step()
        assert_same([done.after_round[0][round_index]], whole.weights)


def test_a_gradient_from_other_weights_would_be_noticed():
    config, parties = joint(aggregation_layers=(1, 3)), tiny_parties()
    done = run(config, parties, scatter=6)
    elsewhere = Monolith(config, parties, [{key: 1.001 * value for key, value in own.items()} for own in done.initial])
    with pytest.raises(AssertionError, match="off by"):
        assert_same(gradients(done.clients), elsewhere.gradients(sum(elsewhere.losses().values())))
    assert not identical(done.initial, done.final)
