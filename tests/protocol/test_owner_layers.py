"""`model.owner_layers`: dense layers of the label owner before its classifier."""

from __future__ import annotations

import pytest
import torch

from glasu.config import RunConfig
from glasu.errors import ConfigError
from support.monolith import Monolith, assert_same, gradients, run, settings, tiny_parties
from support.tiny import simulate, tiny


def setup(**keys):
    config, parties = settings(labels="b", **keys), tiny_parties(owner="b")
    done = run(config, parties, scatter=5)
    whole = Monolith(config, parties, done.initial)
    (loss,) = whole.losses().values()
    return gradients(done.clients), whole.gradients(loss)


@pytest.mark.parametrize("owner_layers", [1, 3])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
@pytest.mark.parametrize("backbone", ["gcn", "gcnii", "sage", "gat"])
def test_with_one_aggregation_every_party_descends_the_gradient_of_the_whole_model(backbone, aggregation, owner_layers):
    keys = {"backbone": backbone, "aggregation": aggregation, "owner_layers": owner_layers}
    got, expected = setup(aggregation_layers=(3,), **keys)
    assert_same(got, expected)
    assert expected[1][f"head.{owner_layers - 1}.weight"].abs().max() > 1e-7


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
@pytest.mark.parametrize("backbone", ["gcn", "gcnii"])
def test_the_joint_gradient_is_that_of_the_whole_model(backbone, aggregation):
    keys = {"backbone": backbone, "aggregation": aggregation, "normalization": "layer"}
    assert_same(*setup(backward="joint", owner_layers=2, aggregation_layers=(1, 3), **keys))


def test_only_the_label_owner_has_the_layers_and_its_first_weights_follow_from_its_secret():
    config, parties = settings(labels="b", owner_layers=2, hidden=8), tiny_parties(owner="b")
    first, second = (
        simulate(parties, config.replace(train={"num_rounds": 1, "learning_rate": 1e-300}), secrets=secrets).clients
        for secrets in ({name: bytes(32) for name in "abc"}, {"a": bytes(32), "b": b"1" * 32, "c": bytes(32)})
    )
    names = [[name for name in client.progress.best_weights if name.startswith("head.")] for client in first]
    assert names == [[], ["head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"], []]
    one, other = (clients[1].progress.best_weights["head.1.weight"] for clients in (first, second))
    assert one.shape == (8, 8)
    assert not torch.equal(one, other)


def test_every_dense_layer_is_dropped_with_its_own_mask():
    config, parties = tiny(labels="b", owner_layers=1, dropout=0.5, num_rounds=1, hidden=64)
    (client,) = (client for client in simulate(parties, config).clients if client.has_labels)
    head = client.learner.dropout(0, 0)
    masks = [head.mask(layer) for layer in range(6)]
    assert len({(mask.low, mask.high) for mask in masks}) == 6
    rows = torch.ones(5, 64)
    with_masks, without = (
        client.learner.model.classify(rows, drop) for drop in (head, client.learner.dropout(0, None))
    )
    assert not torch.allclose(with_masks, without)


def test_layers_of_an_owner_need_an_owner():
    with pytest.raises(ConfigError, match=r"model.owner_layers=2: .* name that party in train.labels"):
        RunConfig.from_dict({"model": {"owner_layers": 2}})
    pooled = {"model": {"owner_layers": 2}, "train": {"method": "centralized", "labels": "b"}}
    assert RunConfig.from_dict(pooled).model.owner_layers == 2


def test_pooled_data_of_an_owner_can_be_trained_with_the_same_head():
    config, parties = settings(labels="b", owner_layers=1), tiny_parties(owner="b")
    config = config.replace(train={"method": "centralized"})
    (client,) = simulate(parties, config).clients
    assert "head.0.weight" in client.progress.best_weights
