"""What must be equal is compared before a run begins; a difference is shown at both ends."""

from __future__ import annotations

import json
import re
import shutil
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glasu.data.party import Splits
from glasu.errors import AbsenceError, ConfigError
from glasu.network import client_session as sessions
from glasu.network import join as joining
from glasu.network import party_setup as own_part
from glasu.network.compatibility import REMEDIES, differences, remedy, two_columns
from glasu.pki.kit import open_kit
from glasu.pki.provision import add, remove
from glasu.protocol.message_bytes import VERSION
from network.test_runs import tiny
from support import cluster as clusters
from support.cluster import Cluster, SeenHub


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


def test_a_refusal_ends_a_party_at_once_without_another_try(kits, tmp_path, monkeypatch):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    opened, slept = [], []

    class Counted(sessions.Line):
        def __init__(self, kit, *more):
            opened.append(kit.name)
            super().__init__(kit, *more)

    monkeypatch.setattr(sessions, "Line", Counted)
    monkeypatch.setattr(sessions, "time", types.SimpleNamespace(sleep=slept.append))
    assert isinstance(cluster.join("b", party=other_ids(parties[1])).error(), ConfigError)
    assert (opened, slept) == (["b"], [])  # one connection, no back-off
    assert sum("b: not accepted" in line for line in cluster.lines["server"]) == 1
    cluster.end(server, a)


def test_a_party_that_writes_messages_in_another_format_is_refused(kits, tmp_path, monkeypatch):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    true = own_part.protocol_facts
    monkeypatch.setattr(own_part, "protocol_facts", lambda *more: {**true(*more), "message format": 1})
    error = cluster.join("b").error()
    assert isinstance(error, ConfigError)
    assert f"message format: the server {VERSION}, b 1" in str(error)
    for who in ("server", "b"):
        assert any(line.split() == ["message", "format", str(VERSION), "1"] for line in cluster.lines[who])
    cluster.end(server)


TOLD = {  # what a party is told of the run, and differs from what the others are told
    "a shorter roster": lambda welcome: {"roster": welcome["roster"][:2]},
    "a longer roster": lambda welcome: {"roster": [*welcome["roster"], "d"]},
    "another M": lambda welcome: {
        "config": {**welcome["config"], "data": {**welcome["config"]["data"], "num_clients": 2}}
    },
    "another roster and M": lambda welcome: {
        "roster": welcome["roster"][:2],
        "config": {**welcome["config"], "data": {**welcome["config"]["data"], "num_clients": 2}},
    },
    "another place": lambda welcome: {"index": 0},
    "no place": lambda welcome: {"index": 3},
}


ESCAPES = "\x1b[2J\nglasu join: all is well" + "x" * 10_000
HOSTILE = {
    "roster": lambda welcome: {"roster": [ESCAPES, *welcome["roster"][1:]]},
    "roster of no names": lambda welcome: {"roster": [1, 2, 3]},
    "section": lambda welcome: {"config": {**welcome["config"], ESCAPES: {}}},
    "key": lambda welcome: {"config": {**welcome["config"], "train": {**welcome["config"]["train"], ESCAPES: 1}}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_server_says_of_the_run_is_one_short_printable_line_at_a_party(name, kits, tmp_path, monkeypatch):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, opened = cluster.serve(), sessions.Session.open
    monkeypatch.setattr(sessions.Session, "open", lambda self: (told := opened(self)) | HOSTILE[name](told))
    error = cluster.join("a").error()
    assert isinstance(error, ConfigError)
    for line in (str(error), *cluster.lines["a"]):
        assert line.isprintable()
        assert len(line) < 2000
    cluster.end(server)


@pytest.mark.parametrize("name", TOLD)
def test_a_party_for_which_there_are_more_or_fewer_parties_does_not_take_part(name, kits, tmp_path, monkeypatch):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    opened = sessions.Session.open
    monkeypatch.setattr(
        sessions.Session,
        "open",
        lambda self: (told := opened(self)) | (TOLD[name](told) if self.kit.name == "b" else {}),
    )
    error = cluster.join("b").error()
    assert isinstance(error, ConfigError)
    if name == "another roster and M":  # all that it is told fits together, and not with what the server knows
        assert "parties: the server 3, b 2" in str(error)
        for who in ("server", "b"):
            assert any(line.split() == ["parties", "3", "2"] for line in cluster.lines[who])
    else:
        assert "the server's roster" in str(error)
        cluster.until("server", "b: declines to take part")
    cluster.end(server, a)  # nobody else was stopped by it


def test_a_run_that_has_begun_keeps_its_roster_and_says_who_was_added_or_removed(kits, tmp_path):
    config, parties = tiny()
    own = Path(shutil.copytree(kits, tmp_path / "kits"))
    cluster = Cluster(config, parties, own, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")  # it has begun
    cluster.end(server, a)
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
    true = own_part.versions()
    monkeypatch.setattr(own_part, "versions", lambda: {**true, package: "0.0.1"})
    error = cluster.join("b").error()
    assert isinstance(error, ConfigError)
    assert package in str(error)
    assert "0.0.1" in str(error)
    cluster.end(server, a)


def test_another_build_of_the_same_version_is_accepted(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=1)
    true = own_part.versions()
    monkeypatch.setattr(own_part, "versions", lambda: {**true, "torch": true["torch"].partition("+")[0] + "+cu999"})
    Cluster(config, parties, kits, tmp_path).run()


def test_another_build_of_the_same_version_is_told_to_everyone(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    true = own_part.versions()
    other = {"torch": true["torch"].partition("+")[0] + "+other", "numpy": true["numpy"] + "+other"}
    with monkeypatch.context() as patch:
        patch.setattr(own_part, "versions", lambda: {**true, **other})
        b = cluster.join("b")
        cluster.until("server", "b: prepared")
    for role in (a, b, cluster.join("c")):
        role.outcome()
    server.outcome()
    for who in ("server", *"ab"):
        told = [line for line in cluster.lines[who] if "another build than at a" in line]
        assert len([line for line in told if line.startswith("b:")]) == 1  # once, however many attempts
        assert f"torch: a {true['torch']}, b {other['torch']}" in told[0]
        assert f"numpy: a {true['numpy']}, b {other['numpy']}" in told[0]
        assert any("b: another build than at the server" in line for line in cluster.lines[who])


def test_a_party_that_would_run_other_settings_is_refused_alone_and_at_once_with_a_diff_at_both_ends(
    kits, tmp_path, monkeypatch
):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    fitted = joining.fitted

    def other(config, party):
        config, party = fitted(config, party)
        return (config.replace(train={"learning_rate": 0.125}) if party.name == "b" else config), party

    server, rate = cluster.serve(), config.train.learning_rate
    with monkeypatch.context() as patch:
        patch.setattr(joining, "fitted", other)
        error = cluster.join("b").error()  # nobody else has come yet
    assert isinstance(error, ConfigError)
    assert f"it would run other settings: train.learning_rate: the server {rate}, b 0.125" in str(error)
    for who in ("server", "b"):
        heading = next(line for line in cluster.lines[who] if line.split() == ["the", "server", "b"])
        row = cluster.lines[who][cluster.lines[who].index(heading) + 1]
        assert row.split() == ["train.learning_rate", str(rate), "0.125"]
    for role in [cluster.join(name) for name in "abc"]:  # b is back with what is right
        role.outcome()
    server.outcome()


def test_settings_that_a_party_does_not_expect_are_declined_with_a_diff_at_both_ends(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    error = cluster.join("b", expect=config.replace(train={"learning_rate": 0.25})).error()
    assert isinstance(error, ConfigError)
    assert "train.learning_rate: expected 0.25" in str(error)
    assert "agree with the server's operator on one run file" in str(error)
    cluster.until("server", "b: declines to take part")
    for who in ("server", "b"):
        heading = next(line for line in cluster.lines[who] if line.split() == ["b", "expects", "the", "server"])
        row = cluster.lines[who][cluster.lines[who].index(heading) + 1]
        assert row.split() == ["train.learning_rate", "0.25", str(config.train.learning_rate)]
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
    assert cluster.join("a", expect=config).outcome()["party"] == "a"  # it is finished, with these
    with pytest.raises(ConfigError, match=r"holds a finished run with other settings .* expected 0.25, there"):
        cluster.join("a", expect=config.replace(train={"learning_rate": 0.25})).outcome()


def test_a_party_that_came_for_another_run_is_refused_and_takes_nobodys_place(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    with pytest.raises(ConfigError, match=r"started for run 0a1b \(--run\), and this is run [0-9a-f]{24}"):
        cluster.join("a", run="0a1b", out="late").outcome()
    run = json.loads((tmp_path / "server" / "serving.json").read_text())["run"]
    roles = [cluster.join(party.name, run=run) for party in parties]
    assert [role.outcome()["run"] for role in roles] == [run] * len(parties)
    server.outcome()
    with pytest.raises(ConfigError, match=f"holds a party's part of run {run}, not of 0a1b"):
        cluster.join("a", run="0a1b").outcome()


def test_who_a_party_is_its_certificate_says_whatever_it_calls_itself(kits, tmp_path, monkeypatch):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    own, other = (open_kit(kits / name) for name in "ab")
    disguised = replace(own, certificate_pem=other.certificate_pem, key_pem=other.key_pem)  # calls itself a
    monkeypatch.setattr(clusters, "open_kit", lambda path, role: disguised)
    error = cluster.join("a").error()
    assert isinstance(error, ConfigError)
    assert "takes this party for 'b'" in str(error)
    cluster.until("server", "b: declines to take part")
    assert SeenHub.last.links["a"].hello is None  # its place is free for whoever has its certificate
    cluster.end(server)


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


def test_another_number_of_clients_than_the_roster_has_is_refused(kits, tmp_path):
    config, parties = tiny()
    error = Cluster(config.replace(data={"num_clients": 2}), parties, kits, tmp_path).serve().error()
    assert isinstance(error, ConfigError)
    assert "data.num_clients=2" in str(error)
    assert "set it to 3" in str(error)


def test_only_what_both_state_is_compared():
    assert differences({"x": 1, "y": 2}, {"x": 1, "z": 3}) == []
    assert differences({"x": 1, "y": 2}, {"x": 2, "y": 2}) == [("x", 1, 2)]


@pytest.mark.parametrize(
    "name", ["message format", "glasu", "numpy", "parties", "torch", "ids (SHA-256)", "kind of ids"]
)
def test_a_party_that_leaves_out_what_must_be_compared_is_refused_with_a_diff_at_both_ends(
    name, kits, tmp_path, monkeypatch
):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    said = sessions.Session.send

    def send(self, kind, **fields):
        if kind == "prepared":
            fields["facts"] = {fact: value for fact, value in fields["facts"].items() if fact != name}
        said(self, kind, **fields)

    hello = joining._Joining._hello
    monkeypatch.setattr(joining._Joining, "_hello", lambda self: without(hello(self), name))
    monkeypatch.setattr(sessions.Session, "send", send)
    error = cluster.join("b").error()
    assert isinstance(error, ConfigError)
    assert re.search(rf"it differs from the server: {re.escape(name)}: the server .*, b \(nothing\)", str(error))
    for who in ("server", "b"):
        assert any(line.startswith(name) and line.endswith("(nothing)") for line in cluster.lines[who])
    cluster.end(server)


def without(said, name):
    return {**said, "facts": {fact: value for fact, value in said["facts"].items() if fact != name}}


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
