"""Attacks on recorded runs: they find what was planted, and the figures that are known of Cora."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from glasu.config import RunConfig
from glasu.data.graph import Graph
from glasu.data.sources.catalog import load_parties
from glasu.errors import ConfigError
from glasu.runtime.attack import attack_run, attack_split_view
from glasu.runtime.observation import Observation
from glasu.runtime.split_view import attack_by_splitting
from glasu.runtime.transcript import RecordedRun
from support.masks import use_encryption, use_masks
from support.races import GOOD, race
from support.tiny import settings, simulate, tiny_parties

SECRETS = {name: name.encode() * 32 for name in "abc"}
KEYS = {"hidden": 16, "aggregation_layers": (1, 3), "backbone": "gcnii", "num_rounds": 6, "evaluate_every": 2}


def attack(folder, parties, config, roles=None, secrets=None, **options):
    """Return {(start of the attack's name, role): finding}."""
    simulate(parties, config, transcript=folder, secrets=secrets)
    transcript = RecordedRun(folder)
    found = attack_run(transcript, parties, roles, **options)
    return {(finding.attack, finding.role): finding for finding in found}


def test_a_classifier_of_the_public_seed_gives_all_labels_and_one_of_a_secret_does_not(tmp_path):
    config, parties = settings(labels="a", dropout=0.5, **KEYS), tiny_parties(num_nodes=60, owner="a")
    name = "labels: classifier of the public seed"
    found = attack(tmp_path / "public", parties, config)
    assert found[name, "server"].score == found[name, "c"].score == 1.0
    found = attack(tmp_path / "secret", parties, config, secrets=SECRETS)
    assert found[name, "server"].score < 0.9
    clustered = found["labels: k-means of G, first round", "server"]
    assert clustered.baseline < 0.7
    assert clustered.score == 1.0  # a secret does not hide the clusters


@pytest.mark.parametrize("keys", [{"labels": "a", "batch_size": 0}, {"labels": "a", "batch_size": 8}], ids=str)
def test_batches_that_are_not_sent_are_drawn_from_the_public_seed(tmp_path, keys):
    config = settings(sampler="shared", **keys, **KEYS)
    simulate(tiny_parties(num_nodes=60, owner="a"), config, transcript=tmp_path)
    seen = Observation(RecordedRun(tmp_path).view("c"), None)
    assert len(seen.list_batches()) == 1  # the training nodes
    assert len(seen.list_gradients(0)) == len(seen.list_joints()) == KEYS["num_rounds"]


def test_rounds_of_one_layer_are_attacked_at_the_training_nodes(tmp_path):
    config, parties = settings(**{**KEYS, "aggregation_layers": (3,), "batch_size": 0}), tiny_parties(num_nodes=80)
    for folder, chosen in (("plain", config), ("masked", use_masks(config.replace(wire={"precision": "fp32"})))):
        found = attack(tmp_path / folder, parties, chosen, ["c"])["features: training rounds", "c"]
        assert found.detail == f"{len(parties[0].splits.train) // 2} of {len(parties[0].splits.train)} rows known"


def test_after_a_race_the_evaluations_of_the_winner_are_attacked(tmp_path):
    config, parties = race("the preferred one wins", evaluate_every=1)
    simulate(parties, config, transcript=tmp_path)
    seen = Observation(RecordedRun(tmp_path).view("server"), parties[0].splits)
    assert seen.config.train.learning_rate == GOOD
    assert [each.round for each in seen.list_evaluations(0)] == [*range(1, 11)]


def test_edges_are_attacked_at_a_party_that_has_some(tmp_path):
    config = settings(sampler="neighbor", fanout=1, **{**KEYS, "batch_size": 3})
    first, *others = tiny_parties(num_nodes=60)
    empty = np.empty(0, np.int64)
    parties = [replace(first, graph=Graph.from_edges(empty, empty, 60), checked=None), *others]
    found = attack(tmp_path, parties, config)
    assert found["edges from index sets", "server"].target == "b"
    assert found["features: one evaluation", "server"].target == "a"


def test_exact_gradients_show_a_party_the_labels_as_well(tmp_path):
    config, parties = settings(labels="a", backward="joint", **KEYS), tiny_parties(num_nodes=60, owner="a")
    found = attack(tmp_path, parties, config, secrets=SECRETS)
    for role in ("server", "c"):
        assert found["labels: k-means of G, first round", role].score == 1.0
        assert found["labels: model completion, 4 known per class", role].score > 0.9
        assert found["training nodes from index sets", role].score == 1.0


def test_features_are_recovered_from_one_evaluation_from_several_and_from_rounds(tmp_path):
    config, parties = settings(**KEYS), tiny_parties(num_nodes=80, degree=0.3)
    found = attack(tmp_path, parties, config, ["server"])
    one, three = found["features: one evaluation", "server"], found["features: 3 evaluations", "server"]
    assert one.measure == "R2 of the columns"
    assert abs(one.baseline) < 0.1
    assert min(one.score, three.score) > 0.3
    assert found["features: training rounds", "server"].score > 0.3
    sums = found["features: aggregates of 3 evaluations", "server"].score
    assert one.baseline < sums < three.score  # what a server learns if parts are masked and sums are not


def test_with_two_parties_the_mean_shows_the_other_part_exactly(tmp_path):
    config = settings(**KEYS)
    for count in (2, 3):
        parties = tiny_parties(count, num_nodes=60)
        role = parties[-1].name
        found = attack(tmp_path / str(count), parties, config.replace(data={"num_clients": count}), [role])
        part = found["representation through the mean", role]
        assert part.detail == f"M = {count}"
        assert (part.score > 0.999999) == (count == 2)
        assert part.score > part.baseline


def test_edges_follow_from_index_sets_and_not_from_a_run_without_them(tmp_path):
    ring = np.arange(60)
    parties = [
        replace(party, graph=Graph.from_edges(ring, (ring + index + 1) % 60, 60), checked=None)
        for index, party in enumerate(tiny_parties(num_nodes=60))
    ]
    keys = {**KEYS, "hidden": 2, "backbone": "gcn", "num_rounds": 150, "evaluate_every": 150, "batch_size": 3}
    config = settings(sampler="neighbor", fanout=1, **keys)
    found = attack(tmp_path / "sets", parties, config)
    name = "edges from index sets"
    assert found[name, "server"].score > 0.5
    assert found[name, "server"].chance == pytest.approx(60 / (60 * 59 / 2))
    assert found[name, "c"].baseline == pytest.approx(found[name, "c"].chance)  # the parties have different edges
    assert found["training nodes from index sets", "server"].score > 0.8
    found = attack(tmp_path / "none", parties, settings(**{**keys, "num_rounds": 2}))
    assert found[name, "server"].score == found[name, "server"].baseline == found[name, "server"].chance
    assert found[name, "server"].detail == "no index set was sent"


def test_certain_predictions_show_training_nodes(tmp_path):
    config, parties = settings(**KEYS), tiny_parties(num_nodes=60)
    probabilities = np.full((60, 3), 1 / 3)
    probabilities[parties[0].splits.train] = [1, 0, 0]
    found = attack(tmp_path, parties, config, ["server"], probabilities=probabilities)
    assert found["training nodes from predictions", "requester"].score == 1.0


def test_the_data_must_be_that_of_the_recorded_parties(tmp_path):
    config, parties = settings(**KEYS), tiny_parties()
    simulate(parties, config, transcript=tmp_path)
    transcript = RecordedRun(tmp_path)
    with pytest.raises(ConfigError, match="the transcript has the parties a, b, c"):
        attack_run(transcript, parties[::-1])


def test_a_server_that_splits_the_view_reads_one_party_from_the_sums():
    config, parties = settings(**{**KEYS, "backbone": "gcn"}), tiny_parties(num_nodes=60)
    found = {each.attack: each.score for each in attack_by_splitting(parties, config, "b", SECRETS)}
    assert found["view of b: its message"] == pytest.approx(1.0)
    assert found["view of b: sums, view split"] > 0.999  # without masks that depend on the broadcasts
    assert found["view of b: sums, honest"] < 0.9


def test_ciphertexts_show_an_attacking_server_neither_features_nor_a_part(tmp_path):
    keys = {**KEYS, "precision": "fp32", "chunk_rows": 20}  # 80 rows, so that an empty chunk follows
    config, parties = use_encryption(settings(**keys)), tiny_parties(num_nodes=80, degree=0.3)
    found = attack(tmp_path, parties, config, ["server"])
    for name, finding in found.items():
        if name[0].startswith("features"):
            assert finding.score < finding.baseline + 0.15, name
    for each in attack_by_splitting(parties, config, "b", SECRETS):
        assert each.score < 0.2, each.attack


def hide_with(name, config):
    """Return the settings with masks that hide sums from the server, or with encryption."""
    return use_masks(config, blind_server=True) if name == "masks" else use_encryption(config)


@pytest.mark.parametrize("name", ["masks", "ckks"])
def test_with_hidden_sums_a_party_learns_what_it_learns_without_them_and_the_server_nothing(tmp_path, name):
    keys = {**KEYS, "precision": "fp32", "chunk_rows": 20}
    config, parties = settings(**keys), tiny_parties(num_nodes=80, degree=0.3)
    plain = attack(tmp_path / "plain", parties, config)
    hidden = attack(tmp_path / "hidden", parties, hide_with(name, config))
    for attacked in ("features: one evaluation", "features: training rounds", "representation through the mean"):
        assert hidden[attacked, "c"].score == pytest.approx(plain[attacked, "c"].score, abs=0.02), attacked
    assert hidden["features: one evaluation", "server"].score < 0.15 < plain["features: one evaluation", "server"].score


def test_with_masks_a_party_reads_the_gradient_of_the_label_owner_and_the_server_does_not(tmp_path):
    config, parties = settings(labels="a", precision="fp32", **KEYS), tiny_parties(num_nodes=60, owner="a")
    found = attack(tmp_path, parties, use_masks(config, blind_server=True), secrets=SECRETS)
    name = "labels: k-means of G, first round"
    assert found[name, "c"].score == 1.0
    assert (name, "server") not in found


def test_a_view_can_be_split_only_between_two_aggregations():
    with pytest.raises(ConfigError, match="at least two layers that aggregate"):
        attack_by_splitting(tiny_parties(), settings(aggregation_layers=(3,)), "a")


def test_the_audit_splits_the_view_of_the_label_owner_and_omits_the_attack_with_one_aggregation():
    config, parties = settings(**{**KEYS, "backbone": "gcn", "labels": "b"}), tiny_parties(num_nodes=60, owner="b")
    found = {each.attack: each.score for each in attack_split_view(config, parties)}
    assert found["view of b: sums, view split"] > 0.999
    assert attack_split_view(settings(**{**KEYS, "aggregation_layers": (3,)}), tiny_parties()) == []
    assert attack_split_view(config, parties[:1]) == []


def cora(**sections):
    config = RunConfig.from_dict({"data": {"name": "cora"}, **sections})
    return config, load_parties(config)


@pytest.mark.slow
def test_on_cora_nine_evaluations_name_most_words_one_fewer_and_rounds_few(tmp_path, data_root):
    train = {"preset": "none", "sampler": "neighbor", "batch_size": 16, "num_rounds": 90, "patience": 0}
    config, parties = cora(train=train)
    found = attack(tmp_path, parties, config, ["server"])
    assert found["features: 9 evaluations", "server"].score == pytest.approx(0.64, abs=0.06)
    assert found["features: one evaluation", "server"].score == pytest.approx(0.40, abs=0.08)
    assert found["features: training rounds", "server"].score == pytest.approx(0.16, abs=0.06)


@pytest.mark.slow
def test_on_cora_a_thousand_rounds_of_index_sets_give_two_fifths_of_the_edges(tmp_path, data_root):
    keys = {"batch_size": 16, "num_rounds": 1000, "num_local_steps": 1, "evaluate_every": 1000, "patience": 0}
    config, parties = cora(model={"hidden": 4}, train={"preset": "none", "sampler": "neighbor", **keys})
    found = attack(tmp_path, parties, config, ["server"])["edges from index sets", "server"]
    assert found.score == pytest.approx(0.43, abs=0.05)
    assert found.chance == pytest.approx(0.001, abs=0.0005)


@pytest.mark.slow
def test_on_cora_all_training_labels_follow_from_one_message_if_the_seed_decides_the_classifier(tmp_path, data_root):
    train = {"preset": "none", "labels": "a", "num_rounds": 1, "evaluate_every": 1}
    config, parties = cora(train=train)
    for folder, secrets in (("public", None), ("secret", SECRETS)):
        found = attack(tmp_path / folder, parties, config, ["server"], secrets)
        solved = found["labels: classifier of the public seed", "server"].score
        assert solved == 1.0 if secrets is None else solved < 0.5
        assert found["labels: k-means of G, first round", "server"].score > 0.99
