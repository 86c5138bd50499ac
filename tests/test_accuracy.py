"""The accuracy of the committed settings on real data."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from glasu.cli.demo import make_demo_config
from glasu.config import DataConfig, RunConfig
from glasu.data.sources.catalog import load_parties
from glasu.experiments.plan import METHOD_SETTINGS
from glasu.runtime.simulation import train

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_stale_updates_reach_82_percent_on_cora_with_the_committed_settings(data_root):
    accuracies = []
    for seed in range(3):
        config = RunConfig.from_toml(EXAMPLES / "cora.toml", [f"train.seed={seed}", f'data.root="{data_root}"'])
        assert config.train.num_local_steps == 4
        assert config.model.aggregation_layers == (1, 3)
        accuracies.append(train(load_parties(config), config).test.accuracy)
    assert statistics.mean(accuracies) >= 0.82, accuracies


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("cora", 0.80), ("citeseer", 0.70), ("pubmed", 0.82)])
def test_the_defaults_train_on_raw_features(data_root, name, least):
    config = RunConfig(data=DataConfig(name=name, root=str(data_root)))
    assert train(load_parties(config), config).test.accuracy >= least


DEEP = {"num_layers": 4, "aggregation_layers": [0, 1, 2, 3]}


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["features", "apart"])
@pytest.mark.parametrize("backbone", ["gcn", "sage"])
@pytest.mark.parametrize("num_local_steps", [None, 4])
def test_the_preset_keeps_deep_networks_from_collapse_on_cora(data_root, backbone, partition, num_local_steps):
    train_keys = {} if num_local_steps is None else {"num_local_steps": num_local_steps}
    data = {"name": "cora", "partition": partition, "root": str(data_root)}
    config = RunConfig.from_dict({"data": data, "model": {"backbone": backbone, **DEEP}, "train": train_keys})
    report = train(load_parties(config), config)
    assert report.test.accuracy >= 0.75
    assert not report.notes


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "partition"), [("gcn", "apart"), ("sage", "features"), ("gcn", "features")])
def test_without_the_preset_a_deep_network_that_learned_nothing_is_reported(data_root, backbone, partition):
    data = {"name": "cora", "partition": partition, "root": str(data_root)}
    sections = {"data": data, "model": {"backbone": backbone, **DEEP}, "train": {"preset": "none"}}
    config = RunConfig.from_dict(sections)
    report = train(load_parties(config), config)
    assert report.test.accuracy < 0.4
    assert any("learned nothing" in note for note in report.notes)


@pytest.mark.parametrize("backbone", ["gcn", "sage"])
def test_a_deep_network_on_synthetic_data_learns_more_with_the_preset(backbone):
    found = {}
    for preset in ("none", "auto"):
        sections = {
            "data": {
                "name": "synthetic",
                "num_nodes": 400,
                "num_features": 24,
                "average_degree": 4.0,
                "num_classes": 4,
            },
            "model": {"backbone": backbone, "hidden": 16, **DEEP},
            "train": {"preset": preset, "num_rounds": 40},
        }
        config = RunConfig.from_dict(sections)
        found[preset] = train(load_parties(config), config).test.accuracy
    assert found["auto"] >= 0.8 > 0.65 > found["none"], found


def demo_accuracy(method, num_rounds, seed=0):
    config = make_demo_config(num_rounds, seed).replace(train=METHOD_SETTINGS[method])
    return train(load_parties(config), config).test


def test_on_the_demo_data_glasu_with_exact_gradients_is_far_above_every_department():
    alone = demo_accuracy("standalone", num_rounds=40).per_client
    assert demo_accuracy("glasu-1", num_rounds=40).accuracy >= max(alone) + 0.2, alone


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_on_the_demo_data_glasu_is_near_pooled_data_and_far_above_every_cheap_method(seed):
    joint = demo_accuracy("glasu-1", 120, seed).accuracy
    assert joint >= demo_accuracy("centralized", 120, seed).accuracy - 0.02
    alone = demo_accuracy("standalone", 120, seed)
    parties = [each for each in (*alone.per_client, *alone.per_client_propagation) if each is not None]
    cheap = [demo_accuracy(method, 120, seed).accuracy for method in ("ensemble", "smooth")]
    assert joint >= max(*parties, *cheap) + 0.1
