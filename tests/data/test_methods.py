"""The methods: the settings that each one prescribes, and the data that its parties see."""

from __future__ import annotations

import pytest

from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from glasu.data.methods import METHODS, apply_method, find_method, override_settings
from support.monolith import settings, tiny_parties


def test_a_centralized_run_has_one_client_and_says_what_it_changed():
    config, overridden = override_settings(RunConfig(train=TrainConfig(method="centralized")))
    assert (config.data.num_clients, config.model.aggregation_layers, config.train.num_local_steps) == (1, (), 1)
    assert overridden == {
        "data.num_clients": {"requested": 3, "used": 1},
        "model.aggregation_layers": {"requested": (1, 3), "used": ()},
        "train.num_local_steps": {"requested": 4, "used": 1},
    }


def test_a_standalone_run_aggregates_nowhere_but_keeps_its_local_steps():
    config, overridden = override_settings(RunConfig(train=TrainConfig(method="standalone")))
    assert (config.model.aggregation_layers, config.train.num_local_steps) == ((), 4)
    assert list(overridden) == ["model.aggregation_layers"]


def test_a_simulated_run_aggregates_everywhere_with_the_joint_gradient():
    config, overridden = override_settings(RunConfig(train=TrainConfig(method="simulated")))
    assert config.model.aggregation_layers == (0, 1, 2, 3)
    assert (config.train.num_local_steps, config.train.backward) == (1, "joint")
    assert config.data.edge_fraction == 1.0
    assert overridden["data.edge_fraction"] == {"requested": 0.8, "used": 1.0}
    assert set(overridden) == {
        "data.edge_fraction", "model.aggregation_layers", "train.num_local_steps", "train.backward",
    }  # fmt: skip


def test_a_method_that_prescribes_nothing_needs_no_function():
    assert METHODS["glasu"].prescribe is None
    assert not METHODS["glasu"].prescribes("train", "num_local_steps")
    config = RunConfig(train=TrainConfig(num_local_steps=7))
    assert override_settings(config) == (config, {})


def test_only_what_differs_counts_as_overridden():
    asked = RunConfig(
        data=DataConfig(edge_fraction=1.0),
        model=ModelConfig(aggregation_layers=(0, 1, 2, 3)),
        train=TrainConfig(method="simulated", num_local_steps=1, backward="joint"),
    )
    assert override_settings(asked)[1] == {}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_applied_twice_changes_nothing_more(method):
    once, _ = override_settings(RunConfig(train=TrainConfig(method=method)))
    assert override_settings(once) == (once, {})


def test_glasu_and_standalone_leave_the_data_of_every_party_as_it_is():
    parties = tiny_parties()
    for method in ("glasu", "standalone"):
        assert apply_method(settings(method=method), parties).parties == parties


def test_centralized_gives_everything_to_one_party():
    (pooled,) = apply_method(settings(method="centralized"), tiny_parties()).parties
    assert pooled.num_features == sum(party.num_features for party in tiny_parties())
    assert pooled.graph.num_edges >= max(party.graph.num_edges for party in tiny_parties())


def test_simulated_gives_all_edges_to_everyone_and_no_features():
    before, after = tiny_parties(), find_method(settings(method="simulated")).prepare(tiny_parties())
    assert len({party.graph.num_edges for party in after}) == 1
    assert after[0].graph.num_edges >= max(party.graph.num_edges for party in before)
    assert [party.num_features for party in after] == [party.num_features for party in before]


def test_every_method_of_the_config_is_in_the_table():
    for method in METHODS:
        assert RunConfig(train=TrainConfig(method=method)).train.method == method
