from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import tomli_w

from glasu.config import (
    SMALL_GRAPH,
    DataConfig,
    ModelConfig,
    PrivacyConfig,
    RunConfig,
    TrainConfig,
    WireConfig,
    resolve,
)
from glasu.data.methods import METHODS
from glasu.errors import ConfigError
from glasu.records import describe

SECTIONS = {
    "data": DataConfig,
    "model": ModelConfig,
    "train": TrainConfig,
    "wire": WireConfig,
    "privacy": PrivacyConfig,
}


def write_and_read(tmp_path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return RunConfig.from_toml(path, overrides)


# Defaults: the table of the specification.


def test_the_defaults_are_those_of_the_specification():
    config = RunConfig().to_dict()
    table = {
        "data": {"num_clients": 3, "edge_fraction": 0.8, "split": "paper", "seed": None, "features": "auto"},
        "model": {
            "backbone": "gcnii",
            "num_layers": 4,
            "hidden": 64,
            "aggregation": "mean",
            "aggregation_layers": [1, 3],
            "dropout": 0.5,
        },
        "train": {
            "method": "glasu",
            "num_rounds": 100,
            "num_local_steps": 4,
            "batch_size": "auto",
            "sampler": "auto",
            "fanout": 3,
            "backward": "local",
            "labels": "all",
            "optimizer": "adam",
            "learning_rate": 0.005,
            "seed": 0,
            "evaluate_every": 10,
            "prefetch": 16,
        },
        "wire": {"precision": "fp32"},
        "privacy": {"secure_aggregation": "none", "dp_noise_multiplier": 0.0, "dp_clip": 1.0},
    }
    for section, keys in table.items():
        assert {key: config[section][key] for key in keys} == keys


def test_the_keys_that_the_specification_fixes_exist():
    fixed = {
        "train": "sampling blocks task weight_decay momentum schedule patience evaluate_nodes checkpoint_every",
        "model": "normalization input_scale alpha theta heads",
        "privacy": "delta target_epsilon blind_server allow_two_parties range",
        "data": "name parties root seed missing features",
    }
    for section, names in fixed.items():
        known = {item.name for item in dataclasses.fields(SECTIONS[section])}
        assert set(names.split()) <= known


# Reading


def test_the_label_owner_is_the_only_party_with_labels_if_there_is_one():
    assert TrainConfig().label_owner is None
    assert TrainConfig(labels="all").label_owner is None
    assert TrainConfig(labels="b").label_owner == "b"


def test_a_config_survives_the_way_through_toml(tmp_path):
    config = RunConfig(
        data=DataConfig(name="cora", split=(0.6, 0.2, 0.2), seed=4),
        model=ModelConfig(backbone="gat", aggregation_layers=(0, 3), input_scale=0.5),
        train=TrainConfig(batch_size=32, learning_rate=0.01, sampled_evaluation=True),
    )
    sections = {
        name: {key: value for key, value in keys.items() if value is not None}  # TOML has no null
        for name, keys in config.to_dict().items()
    }
    assert write_and_read(tmp_path, tomli_w.dumps(sections)) == config


def test_a_config_survives_the_way_through_json():
    config = RunConfig(data=DataConfig(split=(0.6, 0.2, 0.2)), model=ModelConfig(aggregation_layers=(3,)))
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_empty_file_is_the_default_config(tmp_path):
    assert write_and_read(tmp_path, "") == RunConfig()


def test_whole_numbers_may_stand_where_any_number_may(tmp_path):
    config = write_and_read(tmp_path, "[train]\nlearning_rate = 1\n[data]\nsplit = [1, 0, 0]")
    assert config.train.learning_rate == 1.0
    assert isinstance(config.train.learning_rate, float)
    assert config.data.split == (1.0, 0.0, 0.0)


def test_relative_paths_are_relative_to_the_file(tmp_path):
    config = write_and_read(tmp_path, '[data]\nroot = "raw"\nparties = ["a", "../b", "/abs/c"]')
    here = tmp_path.resolve()
    assert config.data.root == str(here / "raw")
    assert config.data.parties == (str(here / "a"), str(here.parent / "b"), "/abs/c")


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert write_and_read(tmp_path, '[data]\nroot = "~/raw"').data.root == "/home/somebody/raw"


@pytest.mark.parametrize("path", ["~no-such-user/raw", "raw\\u0000"])
def test_a_path_that_leads_nowhere_is_an_error_of_the_config(tmp_path, path):
    with pytest.raises(ConfigError, match=r"run\.toml: the path .*raw.* is invalid"):
        write_and_read(tmp_path, f'[data]\nroot = "{path}"')


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read .*give the path of a TOML file"):
        RunConfig.from_toml(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"run\.toml: is not valid TOML"):
        write_and_read(tmp_path, "[train\nseed = 1")
    (tmp_path / "latin.toml").write_bytes(b'[data]\nname = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml: is not valid TOML: line 2 is not UTF-8; save it as UTF-8\.$"):
        RunConfig.from_toml(tmp_path / "latin.toml")


# Overrides


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.seed=7", "train", "seed", 7),
        ("train.learning_rate=1e-3", "train", "learning_rate", 0.001),
        ("data.name=cora", "data", "name", "cora"),
        ('data.name="cora"', "data", "name", "cora"),
        ("data.name = cora ", "data", "name", "cora"),
        ("model.aggregation_layers=[0, 3]", "model", "aggregation_layers", (0, 3)),
        ("model.aggregation_layers=[]", "model", "aggregation_layers", ()),
        ("train.sampled_evaluation=true", "train", "sampled_evaluation", True),
        ("data.split=[0.5, 0.25, 0.25]", "data", "split", (0.5, 0.25, 0.25)),
        ("train.labels=x=y", "train", "labels", "x=y"),
    ],
)
def test_an_override_is_read_as_toml_and_else_as_a_plain_string(tmp_path, override, section, key, value):
    config = write_and_read(tmp_path, "[train]\nseed = 1\n", override)
    assert getattr(getattr(config, section), key) == value


def test_an_override_beats_the_file_and_the_last_one_the_others(tmp_path):
    text = "[train]\nseed = 1\nfanout = 5\n"
    assert write_and_read(tmp_path, text, "train.seed=2", "train.seed=3").train == TrainConfig(seed=3, fanout=5)


@pytest.mark.parametrize("override", ["train.seed", "seed=1", "=1", ".seed=1", "train.=1", ""])
def test_an_override_of_another_form_is_refused_with_an_example(tmp_path, override):
    with pytest.raises(ConfigError, match=r"section\.key=value, for example train\.seed=1"):
        write_and_read(tmp_path, "", override)


def test_the_faults_of_all_overrides_and_of_the_file_are_listed_together(tmp_path):
    with pytest.raises(ConfigError) as caught:
        write_and_read(
            tmp_path, '[data]\nroot = "~no-such-user"\n', "foo=1", "train.sead=2", "bar", "wire.chunk_rows=0"
        )
    for part in ("--set foo=1: must look like", "train.sead", "--set bar: ", "wire.chunk_rows=0", "no-such-user"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"--set train\.seed=1: only .* --set data: must look like"):
        RunConfig().apply_overrides(["train.seed=1", "data"], ("data",))


# Unknown names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trian]\nseed = 1", r"unknown section \[trian\]; did you mean 'train'\?"),
        ("[zzz]\nseed = 1", r"unknown section \[zzz\]; known are data, model, privacy, train, wire"),
        ("[train]\nnum_round = 1", r"unknown key train\.num_round; did you mean 'num_rounds'\?"),
        ("[train]\nzzzzzzzz = 1", r"unknown key train\.zzzzzzzz; known are backward, batch_size, .*weight_decay"),
        ("train = 3", r"train=3: must be a section, written \[train\]"),
        ("[train.seed]\nx = 1", r"train\.seed=\{'x': 1\}: must be an integer"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        write_and_read(tmp_path, text)
    assert "run.toml" in str(caught.value) or "must be an integer" in said


def test_an_unknown_name_in_an_override_is_refused_too(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key train\.sead; did you mean 'seed'"):
        write_and_read(tmp_path, "", "train.sead=1")


@pytest.mark.parametrize("value", [[], "x", -1, None, [("train", {})]], ids=str)
def test_settings_that_are_not_an_object_are_refused_with_their_source_and_an_example(value):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(value, "report.json")
    assert str(caught.value) == (
        f"report.json: the settings are {value!r} and must be an object of sections, for example "
        '{"train": {"seed": 1}}; known sections are data, model, privacy, train, wire.'
    )


def test_all_faults_of_all_sections_are_listed_together(tmp_path):
    with pytest.raises(ConfigError) as caught:
        write_and_read(tmp_path, "wire = 3", "model.hidden=0", "train.learning_rate=-1", "trian.x=1", "train.sead=1")
    for part in ("model.hidden=0: ", "train.learning_rate=-1", "section [trian]", "key train.sead", "wire=3: must be"):
        assert part in str(caught.value)


# Types and rules: the message names the key, the value and the way out.


@pytest.mark.parametrize(
    ("section", "key", "value", "way_out"),
    [
        ("train", "seed", "7", "must be an integer"),
        ("train", "seed", 7.0, "must be an integer"),
        ("train", "seed", True, "must be an integer"),
        ("train", "batch_size", "large", '"auto" or an integer'),
        ("train", "learning_rate", "fast", "must be a number"),
        ("train", "learning_rate", True, "must be a number"),
        ("train", "learning_rate", float("nan"), "must be a finite number"),
        ("train", "learning_rate", float("inf"), "must be a finite number"),
        ("train", "sampled_evaluation", 1, "true or false"),
        ("train", "labels", 3, "must be a string"),
        ("train", "method", "sgd", '"glasu" or "centralized" or "standalone" or "ensemble" or'),
        ("model", "backbone", "gin", '"gcn" or "gcnii" or "gat" or "sage"'),
        ("model", "aggregation_layers", 3, "a list of integers"),
        ("model", "aggregation_layers", 3.0, "a list of integers"),
        ("model", "input_scale", "big", '"auto" or a number'),
        ("data", "parties", "a", "a list of strings"),
        ("data", "split", [0.5, 0.5], '"paper" or "public" or a list of 3 numbers'),
        ("data", "split", "random", '"paper" or "public" or a list of 3 numbers'),
        ("data", "seed", "x", "must be an integer"),
        ("wire", "precision", "fp8", '"fp32"'),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_what_is_expected(section, key, value, way_out):
    assert_refused(section, {key: value}, key, way_out)


@pytest.mark.parametrize(
    ("section", "values", "key", "way_out"),
    [
        ("data", {"num_clients": 0}, "num_clients", "[1, 2^31-1]"),
        ("data", {"edge_fraction": -0.1}, "edge_fraction", "[0, 1]"),
        ("data", {"edge_fraction": 1.1}, "edge_fraction", "[0, 1]"),
        ("data", {"seed": -1}, "seed", "[0, 2^63-1]"),
        ("data", {"seed": 2**63}, "seed", "must fit into 64 bits"),
        ("data", {"num_nodes": 0}, "num_nodes", "[1, 2^31-1]"),
        ("data", {"average_degree": -1.0}, "average_degree", "0 means no edges"),
        ("data", {"num_features": 0}, "num_features", "[1, 2^31-1]"),
        ("data", {"num_classes": 1}, "num_classes", "[2, 2^31-1]"),
        ("data", {"split": [0.6, 0.3, 0.2]}, "split", "sum of at most 1"),
        ("data", {"split": [0.0, 0.5, 0.5]}, "split", "sum of at most 1"),
        ("data", {"split": [0.9, -0.1, 0.2]}, "split", "sum of at most 1"),
        ("model", {"num_layers": 0}, "num_layers", "[1, 1000]"),
        ("model", {"num_layers": 1001}, "num_layers", "[1, 1000]"),
        ("model", {"num_layers": 10**9, "aggregation_layers": (10**9 - 1,)}, "num_layers", "[1, 1000]"),
        ("model", {"hidden": 0}, "hidden", "[1, 2^31-1]"),
        ("model", {"dropout": 1.0}, "dropout", "0 turns dropout off"),
        ("model", {"dropout": -0.1}, "dropout", "0 turns dropout off"),
        ("model", {"input_scale": 0.0}, "input_scale", '"auto"'),
        ("model", {"alpha": 1.5}, "alpha", "[0, 1]"),
        ("model", {"theta": 0.0}, "theta", "above 0"),
        ("model", {"heads": 0}, "heads", "[1, 2^31-1]"),
        ("model", {"backbone": "gat", "heads": 3}, "heads", "must divide model.hidden=64"),
        ("train", {"num_rounds": 0}, "num_rounds", "[1, 2^31-1]"),
        ("train", {"num_local_steps": 0}, "num_local_steps", "[1, 2^31-1]"),
        ("train", {"batch_size": -1}, "batch_size", "0 means all training nodes"),
        ("train", {"fanout": 0}, "fanout", "[1, 2^31-1]"),
        ("train", {"max_nodes": -1}, "max_nodes", "0 means no limit"),
        ("train", {"max_nodes": 10, "batch_size": 11}, "max_nodes", "a smaller batch"),
        ("train", {"max_nodes": 10, "batch_size": 0}, "max_nodes", "a smaller batch"),
        ("train", {"max_nodes": 10, "sampler": "full"}, "max_nodes", 'use "neighbor"'),
        ("train", {"labels": ""}, "labels", '"all" or the name'),
        ("train", {"learning_rate": 0.0}, "learning_rate", "above 0"),
        ("train", {"weight_decay": -0.1}, "weight_decay", "at least 0"),
        ("train", {"momentum": 1.0}, "momentum", "[0, 1)"),
        ("train", {"patience": -1}, "patience", "[0, 2^31-1]"),
        ("train", {"stop_at": 1.5}, "stop_at", "share"),
        ("train", {"evaluate_nodes": -1}, "evaluate_nodes", "[0, 2^31-1]"),
        ("train", {"prefetch": -1}, "prefetch", "[0, 1024]"),
        ("train", {"prefetch": 1025}, "prefetch", "at most 1024"),
        ("train", {"evaluate_every": 0}, "evaluate_every", "[1, 2^31-1]"),
        ("train", {"checkpoint_every": -1}, "checkpoint_every", "0 means never"),
        ("train", {"seed": -1}, "seed", "[0, 2^63-1]"),
        ("train", {"seed": 2**63}, "seed", "must fit into 64 bits"),
        ("train", {"method": "ensemble", "labels": "a"}, "labels", "labels at every party"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_rule_it_breaks(section, values, key, way_out):
    assert_refused(section, values, key, way_out)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dp_clip", 0.5),
        ("dp_clip_gradients", 0.5),
        ("dp_clip_probabilities", 0.5),
        ("dp_noise_multiplier_gradients", 0.5),
        ("dp_noise_multiplier_probabilities", 0.5),
        ("delta", 1e-6),
        ("target_epsilon", 2.0),
    ],
)
def test_a_setting_of_noise_is_refused_without_noise(key, value):
    assert_refused("privacy", {key: value}, key, "no effect without privacy.dp_noise_multiplier")
    assert PrivacyConfig(dp_noise_multiplier=1.0, **{key: value}).adds_noise


def noisy(**sections):
    return RunConfig.from_dict({"privacy": {"dp_noise_multiplier": 1.0}, **sections})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"wire": {"feedback": True}}, r"wire\.feedback=true: .*depends on clean rows; remove it"),
        ({"train": {"labels": "a"}}, r"train\.labels='a': .*the label owner would release node sets"),
        ({"train": {"method": "ensemble"}}, r'train\.method="ensemble": .*no metrics.*release = "once"'),
        ({"train": {"method": "smooth"}}, r'train\.method="smooth": .*no metrics'),
        ({"train": {"task": "regression"}}, r'train\.task="regression": .*mean and deviation'),
        ({"train": {"sampler": "neighbor"}}, r'train\.sampler="neighbor": .*they reveal edges'),
        ({"train": {"party_dropout": 0.3}}, r"train\.party_dropout=0\.3: .*subsets"),
        ({"train": {"sampler": "shared", "sampled_evaluation": True}}, r"train\.sampled_evaluation=true"),
    ],
)
def test_with_noise_nothing_else_that_depends_on_data_may_leave(sections, said):
    with pytest.raises(ConfigError, match=said):
        noisy(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"train": {"sampler": "neighbor"}, "model": {"aggregation_layers": [3]}},
        {"train": {"method": "standalone"}},
        {"train": {"release": "once"}},
        {"train": {"release": "once"}, "privacy": {"dp_noise_multiplier": 1.0, "secure_aggregation": "masks"}},
    ],
)
def test_these_runs_can_have_noise(sections):
    assert noisy(**sections).privacy.adds_noise


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"aggregation_layers": [1, 3]}}, r"aggregation_layers=\[1, 3\]: .*use one layer of 0\.\.2.*\[1\]"),
        ({"model": {"aggregation_layers": [3]}}, r"aggregation_layers=\[3\]: .*releases one layer"),
        ({"model": {"aggregation_layers": []}}, r"aggregation_layers=\[\]: .*releases one layer"),
        ({"model": {"num_layers": 1, "aggregation_layers": [0]}}, r"model\.num_layers=1: .*use 2 or more"),
        ({"train": {"labels": "a"}}, r"train\.labels='a': .*every party trains alone"),
        ({"train": {"backward": "joint"}}, r"train\.backward='joint': .*no rounds of messages"),
        ({"train": {"party_dropout": 0.1}}, r"train\.party_dropout=0\.1: "),
        ({"train": {"warm_start": 3}}, r"train\.warm_start=3: "),
        ({"wire": {"feedback": True}}, r"wire\.feedback=true: "),
        ({"train": {"preset": "none"}}, r"aggregation_layers=\[1, 3\]: "),
    ],
)
def test_one_release_refuses_what_it_cannot_use(sections, said):
    sections = {**sections, "train": {"release": "once", **sections.get("train", {})}}
    with pytest.raises(ConfigError, match=said):
        RunConfig.from_dict(sections)


@pytest.mark.parametrize(("num_layers", "layer"), [(4, 1), (5, 1), (6, 2)])
def test_the_preset_chooses_the_layer_of_one_release(num_layers, layer):
    config = RunConfig.from_dict({"model": {"num_layers": num_layers}, "train": {"release": "once"}})
    assert resolve(config, 100)[0].model.aggregation_layers == (layer,)


def test_probabilities_stay_at_the_parties_only_with_one_release():
    assert_refused("privacy", {"release_probabilities": False}, "release_probabilities", 'train.release = "once"')


def test_numbers_have_no_randomised_response():
    with pytest.raises(ConfigError, match=r'privacy\.label_epsilon=2\.0: train\.task="regression" has no classes'):
        RunConfig.from_dict({"train": {"task": "regression"}, "privacy": {"label_epsilon": 2.0}})


@pytest.mark.parametrize("key", ["train.seed", "train.learning_rate", "data.seed", "privacy.range", "model.hidden"])
@pytest.mark.parametrize(
    "number", ["9" * 5000, "0x" + "f" * 5000, "1e" + "9" * 5000, "-" + "9" * 4000], ids=["long", "hex", "e", "minus"]
)
def test_an_absurdly_long_number_is_refused_kindly(tmp_path, key, number):
    section, _, name = key.partition(".")
    for text, overrides in (("", [f"{key}={number}"]), (f"[{section}]\n{name} = {number}", [])):
        with pytest.raises(ConfigError) as caught:
            write_and_read(tmp_path, text, *overrides)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700 + len(str(tmp_path))


def test_an_integer_beyond_every_float_is_no_number():
    with pytest.raises(ConfigError, match=r"train\.learning_rate=1000+\.\.\.0+: must be a finite number"):
        TrainConfig(learning_rate=10**400)


def test_the_borders_of_ranges_are_allowed():
    assert DataConfig(edge_fraction=0.0, seed=2**63 - 1).edge_fraction == 0.0
    assert TrainConfig(prefetch=1024, seed=2**63 - 1).prefetch == 1024


def assert_refused(section, values, key, way_out):
    """Expect an error that names section.key, the value as it was given, and `way_out`."""
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({section: values})
    said, value = str(caught.value), values.get(key, getattr(SECTIONS[section](), key))
    shown = {describe(value), repr(tuple(value))} if isinstance(value, list) else {describe(value)}
    assert any(f"{section}.{key}={text}" in said for text in shown), said
    assert way_out in said, said
    assert "\n" not in said


def test_data_come_from_a_name_or_from_folders_not_both():
    with pytest.raises(ConfigError, match=r"data\.name='cora' and data\.parties=\['a'\].*remove the other"):
        DataConfig(name="cora", parties=("a",))


@pytest.mark.parametrize("layers", [(3,), (1, 3), (0, 1, 2, 3), (0, 3), ()])
def test_aggregation_layers_that_rise_and_end_with_the_last_are_allowed(layers):
    assert ModelConfig(aggregation_layers=layers).aggregation_layers == layers


@pytest.mark.parametrize("layers", [(1,), (3, 1), (1, 1, 3), (-1, 3), (1, 4), (0, 1, 2)])
def test_other_aggregation_layers_are_refused(layers):
    with pytest.raises(ConfigError, match=r"model\.aggregation_layers=\[.*lie in 0\.\.3 and end with 3.*use \[\]"):
        RunConfig(model=ModelConfig(aggregation_layers=layers))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"labels": "a"}, r"train\.labels='a': without aggregation layers.*labels = \"all\""),
        ({"backward": "joint"}, r'train\.backward="joint": without.*backward = "local"'),
    ],
)
def test_without_aggregation_layers_nothing_can_be_sent(train, said):
    with pytest.raises(ConfigError, match=said):
        RunConfig(model=ModelConfig(aggregation_layers=()), train=TrainConfig(**train))
    RunConfig(train=TrainConfig(**train))


def test_a_config_cannot_be_changed_only_copied():
    config = RunConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.seed = 1
    assert config.replace(train={"seed": 1}).train.seed == 1
    assert config.train.seed == 0
    with pytest.raises(ConfigError, match=r"train\.seed=-1"):
        config.replace(train={"seed": -1})


def test_the_seed_of_the_data_is_that_of_the_training_unless_given():
    assert RunConfig(train=TrainConfig(seed=5)).data_seed == 5
    assert RunConfig(train=TrainConfig(seed=5), data=DataConfig(seed=0)).data_seed == 0


# Resolving


@pytest.mark.parametrize(
    ("num_nodes", "sampler", "batch_size"), [(SMALL_GRAPH, "full", 0), (SMALL_GRAPH + 1, "neighbor", 512)]
)
def test_auto_means_the_full_graph_where_it_is_small(num_nodes, sampler, batch_size):
    config, overridden = resolve(RunConfig(), num_nodes)
    assert (config.train.sampler, config.train.batch_size) == (sampler, batch_size)
    assert overridden == {}


@pytest.mark.parametrize(("bound", "batch_size"), [(100, 100), (2000, 512)])
def test_a_bound_on_the_node_sets_means_sampled_ones_however_small_the_graph(bound, batch_size):
    config, overridden = resolve(RunConfig(train=TrainConfig(max_nodes=bound)), SMALL_GRAPH)
    assert (config.train.sampler, config.train.batch_size) == ("neighbor", batch_size)
    assert overridden == {}


@pytest.mark.parametrize("num_nodes", [10, SMALL_GRAPH + 1])
@pytest.mark.parametrize("method", METHODS)
def test_resolving_twice_changes_nothing_more(method, num_nodes):
    once, _ = resolve(RunConfig(train=TrainConfig(method=method)), num_nodes)
    assert resolve(once, num_nodes) == (once, {})


def test_what_was_given_is_kept():
    asked = RunConfig(train=TrainConfig(sampler="shared", batch_size=7))
    assert resolve(asked, 10) == (asked, {})


@pytest.mark.parametrize("key", [{"sampling": "layer"}, {"blocks": "induced"}, {"sampled_evaluation": True}], ids=str)
def test_what_only_a_sample_can_obey_is_refused_where_nothing_is_sampled(key):
    (name,) = key
    with pytest.raises(ConfigError, match=f"train.{name}=.*no effect.*sampler=.full.*remove it"):
        TrainConfig(sampler="full", **key)
    asked = RunConfig(train=TrainConfig(**key))  # "auto": the sampler was not resolved yet
    config, overridden = resolve(asked, SMALL_GRAPH)
    assert config.train.sampler == "full"
    assert overridden == {f"train.{name}": {"requested": key[name], "used": getattr(TrainConfig(), name)}}
    config, overridden = resolve(asked, SMALL_GRAPH + 1)
    assert (getattr(config.train, name), overridden) == (key[name], {})


@pytest.mark.parametrize("asked", [2, 3])
def test_a_number_of_clients_that_contradicts_the_folders_is_refused(asked, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'[data]\nparties = ["a", "b", "c", "d"]\nnum_clients = {asked}\n')
    with pytest.raises(ConfigError, match=f"data.num_clients={asked}: data.parties lists 4.*set it to 4"):
        RunConfig.from_toml(path)
    path.write_text('[data]\nparties = ["a", "b", "c", "d"]\n')
    assert RunConfig.from_toml(path, ["data.num_clients=4"]).data.num_clients == 4
    assert len(RunConfig.from_toml(path).data.parties) == 4


# The digest


def test_the_digest_depends_on_the_settings_alone(tmp_path):
    first = write_and_read(tmp_path, "[train]\nseed = 1\nfanout = 4\n[model]\nhidden = 8")
    second = write_and_read(tmp_path, "[model]\nhidden = 8\n[train]\nfanout = 4\nseed = 1")
    assert first.digest() == second.digest()
    assert len(bytes.fromhex(first.digest())) == 32


def test_the_digest_does_not_depend_on_where_the_data_lies_on_this_machine():
    here, there = DataConfig(root="/here", parties=("/here/a",)), DataConfig(root="/there", parties=("/there/a",))
    assert RunConfig(data=here).digest() == RunConfig(data=there).digest()


def test_the_digest_changes_with_every_setting():
    changes = [
        {"data": {"name": "cora"}},
        {"data": {"seed": 0}},
        {"model": {"aggregation_layers": (3,)}},
        {"model": {"dropout": 0.25}},
        {"train": {"seed": 1}},
        {"train": {"labels": "a"}},
        {"wire": {"precision": "fp64"}},
        {"wire": {"precision": "bf16"}},
        {"wire": {"precision": "int8"}},
        {"train": {"prefetch": 4}},
    ]
    digests = {RunConfig().replace(**change).digest() for change in changes}
    assert len(digests | {RunConfig().digest()}) == len(changes) + 1


MASKS = {"privacy": {"secure_aggregation": "masks"}}
REFUSED_WITH_MASKS = [
    ({"model": {"aggregation": "concat"}}, 'model.aggregation="concat"', 'use aggregation = "mean"'),
    ({"train": {"sampler": "neighbor"}}, 'train.sampler="neighbor"', 'use sampler = "full"'),
    ({"data": {"num_clients": 2}}, "data.num_clients=2", "privacy.allow_two_parties = true"),
    ({"data": {"num_clients": 1}}, "data.num_clients=1", "use three parties or more"),
    ({"data": {"num_clients": 16}, "wire": {"precision": "int8"}}, 'wire.precision="int8"', "15 levels, and 16 are"),
    ({"wire": {"precision": "fp64"}}, "wire.precision='fp64'", '"fp32", "bf16" or "int8"'),
    ({"wire": {"feedback": True}}, "wire.feedback=true", "remove one of the two"),
    ({"train": {"party_dropout": 0.3}}, "train.party_dropout=0.3", "at least 3 parties contribute to every sum"),
    ({"train": {"method": "smooth"}}, 'train.method="smooth"', 'use method = "ensemble"'),
]


@pytest.mark.parametrize("way", ["masks", "ckks"])
@pytest.mark.parametrize(("changes", "named", "way_out"), REFUSED_WITH_MASKS, ids=str)
def test_settings_under_which_a_hidden_sum_protects_nothing_are_refused(changes, named, way_out, way):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({"privacy": {"secure_aggregation": way}, **changes})
    assert str(caught.value).startswith(named)
    assert way_out in str(caught.value)
    RunConfig.from_dict(changes)


def test_more_parties_than_encrypted_sums_are_exact_for_are_refused():
    for way, most in (("masks", 1000), ("ckks", 95)):
        RunConfig.from_dict({"privacy": {"secure_aggregation": way}, "data": {"num_clients": most}})
    with pytest.raises(ConfigError, match=r'data.num_clients=96: with .*"ckks" sums are exact for at most 95 parties'):
        RunConfig.from_dict({"privacy": {"secure_aggregation": "ckks"}, "data": {"num_clients": 96}})


@pytest.mark.parametrize(
    "changes",
    [
        {"wire": {"precision": "bf16"}},
        {"wire": {"precision": "int8"}, "data": {"num_clients": 15}},
        {"train": {"sampler": "shared"}},
        {"train": {"sampler": "neighbor"}, "model": {"aggregation_layers": [3]}},
        {"train": {"party_dropout": 0.3}, "data": {"num_clients": 4}},
        {"privacy": {"secure_aggregation": "masks", "allow_two_parties": True}, "data": {"num_clients": 2}},
        {"train": {"method": "standalone"}},
    ],
    ids=str,
)
def test_settings_that_masks_can_protect_are_accepted(changes):
    assert RunConfig.from_dict({**MASKS, **changes}).privacy.secure_aggregation == "masks"


def test_a_large_graph_for_which_auto_means_neighbours_is_refused_with_masks():
    config = RunConfig.from_dict(MASKS)
    resolve(config, num_nodes=1000)
    with pytest.raises(ConfigError, match=r'train.sampler="neighbor".*agreed node sets'):
        resolve(config, num_nodes=1_000_000)


@pytest.mark.parametrize(("key", "value"), [("blind_server", True), ("allow_two_parties", True), ("range", 4.0)])
def test_a_setting_of_hidden_sums_is_refused_without_them(key, value):
    assert_refused("privacy", {key: value}, key, 'no effect without privacy.secure_aggregation = "masks"')
    found = RunConfig.from_dict({"privacy": {"secure_aggregation": "masks", key: value}})
    assert getattr(found.privacy, key) == value
    if key != "blind_server":
        found = RunConfig.from_dict({"privacy": {"secure_aggregation": "ckks", key: value}})
        assert getattr(found.privacy, key) == value


def test_a_blind_server_is_refused_with_encryption_because_the_server_sees_no_sums():
    keys = {"secure_aggregation": "ckks", "blind_server": True}
    assert_refused("privacy", keys, "blind_server", "the server sees no sums; remove it")


@pytest.mark.parametrize(
    ("sections", "settings"),
    [
        (
            {
                "privacy": {"secure_aggregation": "masks", "label_epsilon": 1.0, "release_probabilities": False},
                "train": {"task": "regression", "sampler": "neighbor"},
                "model": {"owner_layers": 1},
                "data": {"num_clients": 2},
                "wire": {"precision": "fp64"},
            },
            [
                "model.owner_layers=1",
                "wire.precision='fp64'",
                'train.sampler="neighbor"',
                "data.num_clients=2",
                "privacy.label_epsilon=1.0",
                "privacy.release_probabilities=false",
            ],
        ),
        (
            {"wire": {"feedback": True}, "train": {"warm_start": 3, "party_dropout": 0.3, "sampler": "shared"}},
            ["wire.feedback=true", "wire.feedback=true"],
        ),
        (
            {"privacy": {"profile": "dp"}, "train": {"labels": "a", "party_dropout": 0.3}, "wire": {"feedback": True}},
            ["train.labels='a'", "train.party_dropout=0.3", "wire.feedback=true"],
        ),
    ],
    ids=["five sections", "feedback", "one release"],
)
def test_one_error_lists_all_faults_of_all_sections(sections, settings):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(sections)
    said = str(caught.value)
    assert re.findall(r"(?:^|\. )([a-z]+\.[a-z_]+=[^:]+): ", said) == settings
    assert "\n" not in said


def test_settings_may_be_numbers_of_numpys():
    model = ModelConfig(hidden=np.int64(8), dropout=np.float32(0.5), aggregation_layers=tuple(np.array([1, 3])))
    assert model == ModelConfig(hidden=8, dropout=0.5, aggregation_layers=(1, 3))
    assert type(model.hidden) is int
    with pytest.raises(ConfigError, match="must be an integer"):
        ModelConfig(hidden=np.bool_(True))


def test_a_degree_that_no_graph_can_have_is_refused():
    with pytest.raises(ConfigError, match=r"data\.average_degree=1000000000000.0: must be less than data"):
        DataConfig(name="synthetic", num_nodes=1000, average_degree=1e12)


def test_all_values_of_a_wrong_type_are_listed_together():
    with pytest.raises(ConfigError, match=r"learning_rate='y': must be a number\. train\.seed='x': must be an integer"):
        TrainConfig(seed="x", learning_rate="y")


def test_all_values_out_of_range_are_listed_together_and_an_item_has_its_path():
    with pytest.raises(ConfigError, match=r"train\.num_rounds=0: .* train\.momentum=1\.5: must lie in \[0, 1\)\."):
        TrainConfig(num_rounds=0, momentum=1.5)
    with pytest.raises(ConfigError, match=r"model\.aggregation_layers\[1\]='3': must be an integer\."):
        ModelConfig(aggregation_layers=[1, "3"])


def test_deeply_nested_settings_are_refused_in_one_line(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nseed = " + "[" * 5000)
    with pytest.raises(ConfigError, match=r"run\.toml: is nested too deeply"):
        RunConfig.from_toml(path)
    path.write_text("")
    with pytest.raises(ConfigError, match=r"--set train\.seed: the value is nested too deeply"):
        RunConfig.from_toml(path, ["train.seed=" + "[" * 5000])
