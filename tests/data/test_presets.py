"""Presets fill the keys that the user leaves open, and never change another one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from glasu.config import (
    DataConfig,
    ModelConfig,
    PrivacyConfig,
    RunConfig,
    TrainConfig,
    WireConfig,
    list_candidates,
    resolve,
)
from glasu.data.graph import Graph
from glasu.data.methods import override_settings
from glasu.data.presets import (
    PRESETS,
    Homophily,
    Situation,
    count_race_rounds,
    describe_situation,
    measure_homophily,
    order_candidates,
)
from support.tiny import tiny_parties

EXAMPLE = Path(__file__).parents[2] / "examples" / "paper.toml"
SETTINGS_PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
KEYS = sorted(
    {
        (section, key)
        for candidate in PRESETS["auto"].candidates
        for part in (candidate.structure, candidate.suggestions)
        for section, keys in part.items()
        for key in keys
    }
)
OTHER = {
    "backbone": "gat",
    "num_layers": 3,
    "aggregation_layers": (2, 3),
    "backward": "joint",
    "release": "once",
    "num_local_steps": 3,
    "learning_rate": 0.5,
    "weight_decay": 0.25,
    "num_rounds": 17,
}
RULES_DECIDE = (  # settings with which there is no race
    RunConfig(wire=WireConfig(feedback=True)),
    RunConfig(train=TrainConfig(num_rounds=10, evaluate_every=10)),
    RunConfig(privacy=PrivacyConfig(secure_aggregation="masks")),
)
COMPLETE = Situation(has_edges=True, has_features=True, homophily=Homophily.HIGH)


def set_key(section: str, key: str, value: object) -> RunConfig:
    return RunConfig.from_dict({section: {key: value}})


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_no_candidate_changes_a_key_that_is_set(section, key):
    config = set_key(section, key, 4 if key == "num_layers" else OTHER[key])
    for candidate in list_candidates(config):
        assert getattr(getattr(candidate, section), key) == getattr(getattr(config, section), key)


def test_a_key_that_is_set_to_its_default_is_kept_too():
    candidates = list_candidates(RunConfig(model=ModelConfig(backbone="gcnii")))
    assert {each.model.backbone for each in candidates} == {"gcnii"}


def test_a_candidate_with_another_structure_is_left_out_and_a_suggestion_gives_way():
    sage = list_candidates(RunConfig(model=ModelConfig(backbone="sage"), train=TrainConfig(weight_decay=0.1)))
    assert {(each.model.num_layers, each.train.backward, each.train.weight_decay) for each in sage} == {
        (2, "joint", 0.1)
    }
    shallow = RunConfig(model=ModelConfig(backbone="gat", num_layers=2, aggregation_layers=(1,)))
    assert list_candidates(shallow) == (shallow,)


def test_a_deep_network_without_skip_connections_has_exact_gradients_and_layer_norms():
    model = ModelConfig(backbone="gcn", num_layers=4, aggregation_layers=(0, 1, 2, 3))
    (deep,) = list_candidates(RunConfig(model=model))
    assert (deep.model.normalization, deep.train.backward, deep.train.num_local_steps) == ("layer", "joint", 1)
    for keys in ({"num_local_steps": 4}, {"optimizer": "sgd"}, {"warm_start": 5}):
        (kept,) = list_candidates(RunConfig(model=model, train=TrainConfig(**keys)))
        assert (kept.model.normalization, kept.train.backward) == ("layer", "joint")
        assert {key: getattr(kept.train, key) for key in keys} == keys
    for other in (
        RunConfig(model=model, train=TrainConfig(backward="local")),
        RunConfig(model=ModelConfig(backbone="gcn", num_layers=2, aggregation_layers=(0, 1))),
        RunConfig(model=ModelConfig(backbone="gcn", num_layers=4, aggregation_layers=(3,), residual=True)),
        RunConfig(model=model, train=TrainConfig(preset="none")),
    ):
        assert list_candidates(other) == (other,)


FREE = [
    {"train": {"num_local_steps": 4}},
    {"train": {"warm_start": 100}},
    {"train": {"optimizer": "sgd"}},
    {"wire": {"feedback": True}},
]


@pytest.mark.parametrize("keys", FREE, ids=str)
def test_a_key_that_is_no_structure_keeps_all_candidates(keys):
    config, default = RunConfig.from_dict(keys), RunConfig()
    structures = [(each.model, each.train.backward) for each in list_candidates(config)]
    assert structures == [(each.model, each.train.backward) for each in list_candidates(default)]
    lacking = [COMPLETE, COMPLETE._replace(has_edges=False)]
    assert order_candidates(config, lacking)[0] == order_candidates(default, lacking)[0]
    for candidate in list_candidates(config):
        (section, pair), *_ = keys.items()
        assert {key: getattr(getattr(candidate, section), key) for key in pair} == pair


def test_with_labels_at_one_party_several_local_steps_keep_exact_gradients():
    candidates = list_candidates(RunConfig(train=TrainConfig(labels="a", num_local_steps=4)))
    assert {(each.train.backward, each.train.num_local_steps) for each in candidates} == {("joint", 4)}


@pytest.mark.parametrize("preset", ["auto", "paper"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_suggested_learning_rate_applies_only_to_the_optimizer_that_it_suits(preset, optimizer):
    config = RunConfig(train=TrainConfig(preset=preset, optimizer=optimizer))
    rates = {each.train.learning_rate for each in list_candidates(config)}
    suited = {"auto": "adam", "paper": "sgd"}[preset] == optimizer
    assert (rates == {TrainConfig.learning_rate}) is not suited


def test_error_feedback_lets_the_rules_choose_without_a_race():
    config = RunConfig(wire=WireConfig(feedback=True))
    candidates = list_candidates(config)
    for situation, backward in ((COMPLETE, "local"), (COMPLETE._replace(has_features=False), "joint")):
        (chosen,) = order_candidates(config, [COMPLETE, situation])
        assert candidates[chosen].train.backward == backward
    assert len(order_candidates(RunConfig(), [COMPLETE, COMPLETE])) == 2


def test_without_a_preset_every_key_is_taken_as_written():
    config = RunConfig(train=TrainConfig(preset="none"))
    assert list_candidates(config) == (config,)
    assert config.train == TrainConfig(preset="none", learning_rate=0.005, num_local_steps=4, backward="local")


def test_labels_at_one_party_need_exact_gradients():
    assert {each.train.backward for each in list_candidates(RunConfig(train=TrainConfig(labels="a")))} == {"joint"}


@pytest.mark.parametrize("method", ["standalone", "ensemble", "smooth", "centralized"])
def test_parties_that_train_alone_have_nothing_to_race_for(method):
    config, _ = override_settings(RunConfig(train=TrainConfig(method=method)))
    assert len(list_candidates(config)) == 1


def test_the_papers_preset_is_the_example_with_the_papers_settings():
    example = RunConfig.from_toml(EXAMPLE)
    preset, _ = resolve(RunConfig(data=DataConfig(name="cora"), train=TrainConfig(preset="paper")), 2708)
    differing = {key for key, value in preset.flatten().items() if value != example.flatten()[key]}
    assert differing == {"train.preset"}


def test_the_digest_covers_the_candidates_and_the_keys_that_are_set():
    free, fixed = RunConfig(), RunConfig(model=ModelConfig(backbone="gcnii"))
    assert free == fixed
    assert free.digest() != fixed.digest()
    copy = RunConfig.from_dict(free.to_dict(given=True))
    assert (copy.digest(), len(list_candidates(copy))) == (free.digest(), len(list_candidates(free)))
    written = RunConfig.from_dict(free.to_dict())
    assert list_candidates(written) == (written,)


def test_settings_of_which_only_one_leaves_a_key_open_differ_in_one_entry():
    free, fixed = RunConfig().flatten(), RunConfig(model=ModelConfig(backbone="gcnii")).flatten()
    assert [key for key in free if free[key] != fixed.get(key)] == ["keys that train.preset decides"]


def test_settings_that_are_all_written_leave_nothing_to_choose():
    for candidate in list_candidates(RunConfig()):
        written = RunConfig.from_dict(candidate.to_dict())
        assert list_candidates(written) == (written,)


def test_a_race_that_would_take_most_of_the_rounds_is_left_out():
    for config in (RunConfig(train=TrainConfig(num_rounds=5)), RunConfig(train=TrainConfig(evaluate_every=80))):
        assert len(order_candidates(config, [COMPLETE])) == 1


def test_a_changed_key_counts_as_set_and_the_others_stay_open():
    config = RunConfig().replace(train={"seed": 3})
    assert (config.train.seed, config.train.given) == (3, {"seed"})
    assert len(list_candidates(config)) == len(list_candidates(RunConfig())) > 1


def test_a_party_without_edges_or_features_leaves_exact_gradients():
    candidates = list_candidates(RunConfig())
    for lacking in (COMPLETE._replace(has_edges=False), COMPLETE._replace(has_features=False)):
        order = order_candidates(RunConfig(), [COMPLETE, lacking])
        assert {candidates[each].train.backward for each in order} == {"joint"}
        assert len({candidates[each].model.backbone for each in order}) == len(order) > 1


def test_without_a_race_low_homophily_chooses_the_backbone_that_keeps_a_nodes_own_row_apart():
    def find_first(config, level):
        order = order_candidates(config, [COMPLETE._replace(homophily=level)])
        return list_candidates(config)[order[0]].model.backbone

    for config in RULES_DECIDE:
        chosen = {level: find_first(config, level) for level in Homophily}
        assert chosen == dict.fromkeys(Homophily, "gcnii") | {Homophily.LOW: "sage"}
    assert {find_first(RunConfig(), level) for level in Homophily} == {"gcnii"}  # validation scores decide


def test_a_situation_survives_its_message_and_other_numbers_are_refused():
    for level in Homophily:
        situation = Situation(has_edges=True, has_features=False, homophily=level)
        assert Situation.from_numbers(situation.to_numbers()) == situation
    for numbers in ([], [1.0, 1.0], [1.0, 1.0, 4.0], [1.0, 0.5, 1.0], [1.0, 1.0, float("nan")], [1.0, 1.0, 1.0, 1.0]):
        assert Situation.from_numbers(numbers) is None


def test_adjusted_homophily_is_that_of_the_dense_graph_of_training_nodes():
    party = tiny_parties(num_nodes=200, degree=6)[0]
    train = np.zeros(200, bool)
    train[party.splits.train] = True
    dense = np.zeros((200, 200), bool)
    for node in range(200):
        dense[party.graph.indices[party.graph.indptr[node] : party.graph.indptr[node + 1]], node] = True
    dense &= train[:, None] & train[None, :]
    source, target = np.nonzero(dense)
    ends = np.concatenate([party.labels[source], party.labels[target]])
    chance = sum((ends == each).mean() ** 2 for each in range(3))
    expected = ((party.labels[source] == party.labels[target]).mean() - chance) / (1 - chance)
    assert measure_homophily(party) == pytest.approx(expected, abs=1e-12)


def test_few_edges_or_no_labels_give_no_estimate():
    assert measure_homophily(tiny_parties()[0]) is None
    hidden = tiny_parties(num_nodes=200, degree=6, owner="b")[0]
    assert describe_situation(RULES_DECIDE[0], hidden, labels_nodes=False).homophily is Homophily.UNKNOWN


def test_homophily_is_stated_only_if_there_is_no_race():
    party = tiny_parties(num_nodes=200, degree=6)[0]
    assert measure_homophily(party) is not None
    for config in RULES_DECIDE:
        assert describe_situation(config, party, labels_nodes=True).homophily is not Homophily.UNKNOWN
    assert describe_situation(RunConfig(), party, labels_nodes=True).homophily is Homophily.UNKNOWN


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("num_pairs", [99, 100])
def test_homophily_needs_100_pairs_of_training_nodes_with_an_edge_in_one_or_both_directions(directions, num_pairs):
    party = tiny_parties(num_nodes=200)[0]
    train = party.splits.train
    source, target = (train[each] for each in np.triu_indices(len(train), 1))
    source, target = source[:num_pairs], target[:num_pairs]
    back = (target, source) if directions == 2 else (source[:0], target[:0])
    graph = Graph.from_edges(np.concatenate([source, back[0]]), np.concatenate([target, back[1]]), 200)
    found = measure_homophily(replace(party, graph=graph))
    assert (found is None) is (num_pairs < 100)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_a_party_with_constant_columns_only_has_no_features(form):
    party = tiny_parties()[0]
    varying, constant = np.zeros((24, 3)), np.tile([0.0, 2.0, 1.0], (24, 1))
    varying[5, 1] = 1.0
    found = [
        describe_situation(
            RunConfig(), replace(party, features=form(each), feature_names=()), labels_nodes=True
        ).has_features
        for each in (varying, constant)
    ]
    assert found == [True, False]


@pytest.mark.parametrize(
    ("num_rounds", "every", "expected"),
    [(1, 10, 1), (8, 2, 2), (100, 10, 30), (100, 7, 28), (1024, 64, 64), (40, 50, 40)],
)
def test_a_race_is_short_and_ends_with_an_evaluation(num_rounds, every, expected):
    assert count_race_rounds(TrainConfig(num_rounds=num_rounds, evaluate_every=every)) == expected


def test_the_tables_of_settings_mark_the_keys_that_the_default_preset_may_change():
    auto, defaults = PRESETS["auto"], RunConfig()
    candidates = [*auto.candidates, *([] if auto.deep is None else [auto.deep])]
    changed = {
        key
        for candidate in candidates
        for part in (candidate.structure, candidate.suggestions)
        for section, keys in part.items()
        for key, value in keys.items()
        if value != getattr(getattr(defaults, section), key)
    }
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \\\* \|", SETTINGS_PAGE.read_text(), re.MULTILINE)
    assert {key for row in rows for key in re.findall(r"\w+", row)} == changed


def test_with_one_label_owner_decay_is_smaller_because_there_is_one_loss_instead_of_all():
    for labels, decay in (("all", 0.002), ("a", 0.0005)):
        found = PRESETS["auto"].fit(RunConfig(train=TrainConfig(labels=labels)))
        exact = [config.train.weight_decay for each, config in found if each.for_complete is False]
        assert exact == [decay, decay]
