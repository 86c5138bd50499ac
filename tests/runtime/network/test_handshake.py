"""What must be equal is compared before a run begins; a difference is shown at both ends."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glasu.data.party import Splits
from glasu.errors import AbsenceError, ConfigError
from glasu.kits.provision import add, remove
from glasu.runtime.network import join as joining
from glasu.runtime.network.handshake import REMEDIES, differences, remedy, two_columns
from runtime.network.cluster import Cluster, SeenHub
from runtime.network.test_runs import tiny


def other_ids(party):
    return replace(party, ids=party.ids[::-1].copy())


def foreign_ids(party):
    return replace(party, ids=party.ids + 1)


def other_splits(party):
    splits = party.splits
    return replace(party, splits=Splits(splits.train, splits.test, splits.validation))


def other_classes(party):
    return replace(party, classes=tuple(f"{name}!" for name in party.classes))


@pytest.mark.parametrize(
    ("change", "field", "advice"),
    [
        (other_ids, "ids (SHA-256)", "the ids are the same, but in another order"),
        (foreign_ids, "ids (SHA-256)", "the sets of ids differ: list the common ones only"),
        (other_splits, "splits (SHA-256)", "make labels and splits equal"),
        (other_classes, "class names (SHA-256)", "name one party in train.labels"),
    ],
)
def test_a_party_with_other_nodes_splits_or_classes_is_refused_with_a_diff_at_both_ends(
    change, field, advice, kits, tmp_path
):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    error = cluster.join("b", party=change(parties[1])).error()
    assert isinstance(error, ConfigError)
    assert field in str(error)
    assert advice in str(error)
    assert not re.search("[0-9a-f]{17}", str(error))  # digests are shortened
    for who in ("server", "b"):
        heading = next(line for line in cluster.lines[who] if line.split() == ["a", "b"])
        row = cluster.lines[who][cluster.lines[who].index(heading) + 1]
        assert row.startswith(field)
        assert all(re.fullmatch(r"[0-9a-f]{16}\.\.", digest) for digest in row.removeprefix(field).split())
    cluster.until("a", f"b: not accepted: it differs from a: {field}")
    assert field in SeenHub.last.links["b"].refused  # who waits for b in vain will hear why
    cluster.end(server, a)


def test_a_run_that_has_begun_keeps_its_roster_and_says_who_was_added_or_removed(kits, tmp_path):
    config, parties = tiny()
    own = Path(shutil.copytree(kits, tmp_path / "kits"))
    cluster = Cluster(config, parties, own, tmp_path)
    assert isinstance(cluster.serve(wait=0.1).error(), AbsenceError)  # it has begun
    add(own, ["d"])
    error = str(cluster.serve(wait=0.1).error())
    assert "it began with a, b, c; since then d added" in error
    assert "provision --remove" in error
    assert "num_clients" not in error
    remove(own, ["b"])
    assert "since then d added and b removed" in str(cluster.serve(wait=0.1).error())
    remove(own, ["d"])
    add(own, ["b"])
    assert "now their order is a, c, b" in str(cluster.serve(wait=0.1).error())


def test_a_party_that_was_added_and_removed_again_leaves_a_run_that_can_go_on(kits, tmp_path):
    config, parties = tiny()
    own = Path(shutil.copytree(kits, tmp_path / "kits"))
    cluster = Cluster(config, parties, own, tmp_path)
    for change in (lambda: None, lambda: add(own, ["d"]) and remove(own, ["d"])):
        change()
        assert isinstance(cluster.serve(wait=0.1).error(), AbsenceError)


@pytest.mark.parametrize("package", ["glasu", "numpy", "torch"])
def test_a_party_with_another_version_is_refused(package, kits, tmp_path, monkeypatch):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    true = joining.versions()
    monkeypatch.setattr(joining, "versions", lambda: {**true, package: "0.0.1"})
    error = cluster.join("b").error()
    assert isinstance(error, ConfigError)
    assert package in str(error)
    assert "0.0.1" in str(error)
    cluster.end(server, a)


def test_another_build_of_the_same_version_is_accepted(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=1)
    true = joining.versions()
    monkeypatch.setattr(joining, "versions", lambda: {**true, "torch": true["torch"].partition("+")[0] + "+cu999"})
    Cluster(config, parties, kits, tmp_path).run()


def test_settings_that_a_party_does_not_expect_are_declined_and_everyone_hears_of_it(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    error = cluster.join("b", expect=config.replace(train={"learning_rate": 0.25})).error()
    assert isinstance(error, ConfigError)
    assert "train.learning_rate: expected 0.25" in str(error)
    assert any(line.split()[:2] == ["train.learning_rate", "0.25"] for line in cluster.lines["b"])
    cluster.until("server", "b: declines to take part")
    assert "train.learning_rate" in SeenHub.last.links["b"].refused
    cluster.until("server", "a: prepared")
    cluster.end(server, a)


def test_the_settings_that_are_expected_are_accepted(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    for role in [cluster.join(name, expect=config) for name in "abc"]:
        role.outcome()
    server.outcome()


def test_a_party_that_came_for_another_run_is_refused_and_takes_nobodys_place(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    with pytest.raises(ConfigError, match="of another run"):
        cluster.join("a", run="0a1b", out="late").outcome()
    run = json.loads((tmp_path / "server" / "serving.json").read_text())["run"]
    roles = [cluster.join(party.name, run=run) for party in parties]
    assert [role.outcome()["run"] for role in roles] == [run] * len(parties)
    server.outcome()
    with pytest.raises(ConfigError, match=f"holds a party's part of run {run}, not of 0a1b"):
        cluster.join("a", run="0a1b").outcome()


def test_a_kit_of_another_party_is_refused_before_anything_is_sent(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    error = cluster.join("a", kit="b").error()
    assert isinstance(error, ConfigError)
    assert "party 'a'" in str(error)
    assert "party 'b'" in str(error)


@pytest.mark.parametrize(
    "change",
    [{"train": {"method": "standalone"}}, {"train": {"method": "simulated", "num_local_steps": 1}}],
)
def test_methods_that_need_all_data_in_one_place_are_refused(change, kits, tmp_path):
    config, parties = tiny()
    error = Cluster(config.replace(**change), parties, kits, tmp_path).serve().error()
    assert isinstance(error, ConfigError)
    assert "glasu train" in str(error)


def test_only_what_both_state_is_compared():
    assert differences({"x": 1, "y": 2}, {"x": 1, "z": 3}) == []
    assert differences({"x": 1, "y": 2}, {"x": 2, "y": 2}) == [("x", 1, 2)]


def test_every_difference_has_its_remedy_and_those_of_versions_come_before_those_of_data():
    for names, advice in REMEDIES.items():
        assert all(remedy([(name, 1, 2)]) == f"; {advice}" for name in names)
    assert "version" in remedy([("ids (SHA-256)", "x", "y"), ("numpy", "1", "2")])
    assert remedy([("something else", 1, 2)]) == ""


def test_a_diff_has_two_columns():
    rows = [("nodes", 2708, 2707), ("a long name", "x" * 200, None)]
    lines = two_columns(rows, "a", "the server")
    assert lines[0].split() == ["a", "the", "server"]
    assert lines[1].split() == ["nodes", "2708", "2707"]
    assert lines[2].endswith("(nothing)")
    assert len({line.index(word) for line, word in zip(lines, ["the", "2707", "(nothing)"], strict=True)}) == 1
    assert np.all([len(line) < 200 for line in lines])


def test_labels_of_a_party_whose_labels_are_not_used_do_not_matter(kits, tmp_path):
    config, _ = tiny(labels="b", num_rounds=1)
    _, parties = tiny()  # everyone has labels
    parties = [other_splits(parties[0]), parties[1], other_classes(parties[2])]
    served, _ = Cluster(config, parties, kits, tmp_path).run()
    assert len(served.weights_sha256) == 3


def test_a_hello_that_cannot_be_read_is_refused_and_stops_nobody(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    hello = joining._Joining._hello
    for change in ({"facts": {"nodes": "many"}}, {"facts": {}}, {"rounds": [1]}, {"incarnation": None}):
        with monkeypatch.context() as patch:
            patch.setattr(joining._Joining, "_hello", lambda self, change=change: {**hello(self), **change})
            if not cluster.port:
                server = cluster.serve()
            error = cluster.join("b", out="strange").error()
            assert isinstance(error, ConfigError)
            assert "the server does not accept this party" in str(error)
    for role in [cluster.join(name) for name in "abc"]:
        role.outcome()
    server.outcome()
