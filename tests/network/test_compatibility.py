"""Facts and settings must be equal before a run begins; a difference is shown at both ends."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from glasu.data.party import Splits
from glasu.errors import AbsenceError, ConfigError
from glasu.network.compatibility import (
    RULES,
    THE_SERVER,
    collect_findings,
    compare_facts,
    compare_settings,
    describe_builds,
    format_columns,
    refuse_differences,
)
from glasu.network.facts import LABELS, collect_server_facts
from glasu.network.handshake import Code, RefusalError
from glasu.network.options import JoinOptions
from glasu.network.purposes import DRY_RUN, TRAINING
from glasu.network.training_party import TrainingParty
from glasu.pki.kit import open_kit
from glasu.pki.provision import add, remove
from glasu.protocol.message_bytes import compute_format_number
from glasu.registry import Extension
from glasu.report import list_versions
from support.cluster import Cluster
from support.tiny import tiny

DIGESTS = ("ab" * 32, "cd" * 32)
PARTY = {
    "torch": "2.0",
    "torch_build": "2.0+cpu",
    "nodes": 24,
    "id_rules": "unicode nfc",
    "alignment": "none",
    "id_kind": "numbers",
    "id_set": DIGESTS[0],
    "id_order": DIGESTS[0],
    "classes": 3,
    "class_names": DIGESTS[0],
    "label_scale": DIGESTS[0],
    "splits": DIGESTS[0],
    "validation_nodes": 6,
    "test_nodes": 6,
}


def facts(**changes):
    stated = collect_server_facts(TRAINING, parties=3, **PARTY)
    return replace(stated, **{"glasu": "1.0", "numpy": "2.0", "numpy_build": "2.0", **changes})


OTHERS = {  # another value for every fact
    "purpose": "prediction",
    "message_format": 1,
    "glasu": "1.1",
    "numpy": "2.1",
    "numpy_build": "2.0+other",
    "extensions": (Extension("mine", "1.0", DIGESTS[0]),),
    "torch": "2.1",
    "torch_build": "2.0+cu999",
    "parties": 2,
    "training": "00",
    "selected": "joint",
    "nodes": 23,
    "id_rules": "unicode nfkc",
    "alignment": DIGESTS[1],
    "id_kind": "strings",
    "id_set": DIGESTS[1],
    "id_order": DIGESTS[1],
    "classes": 4,
    "class_names": DIGESTS[1],
    "label_scale": DIGESTS[1],
    "splits": DIGESTS[1],
    "validation_nodes": 7,
    "test_nodes": 7,
}


# --- one comparison, two policies -------------------------------------------------------------------------------------


def test_a_rule_compares_every_fact():
    resolved = {"share", "id_tags"}  # `resolve_tags` turns them into id_set and id_order
    assert {name for rule in RULES for name in rule.facts} == set(LABELS) - resolved == set(OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_another_value_of_any_fact_is_refused_or_warned_about(name):
    server = facts(training="11", selected="ensemble")
    party = replace(server, **{name: OTHERS[name]})
    rule = next(rule for rule in RULES if name in rule.facts)
    if rule.level == "bad":
        with pytest.raises(RefusalError, match=rf"it differs from the server: {re.escape(LABELS[name])}: ") as refused:
            refuse_differences("b", party, {THE_SERVER: server})
        assert rule.remedy in str(refused.value)
        assert refused.value.code == (Code.OTHER_PURPOSE if name == "purpose" else Code.DIFFERENT_FACTS)
    else:
        refuse_differences("b", party, {THE_SERVER: server})
        (line,) = describe_builds("b", party, {THE_SERVER: server})
        assert LABELS[name] in line


def test_only_facts_that_both_roles_state_are_compared():
    assert compare_facts({"a": facts(), "b": facts(classes=None)}) == []
    refuse_differences("b", facts(splits=None), {"a": facts()})


def test_the_remedy_for_versions_comes_before_that_for_data():
    with pytest.raises(RefusalError, match="install the same version everywhere"):
        refuse_differences("b", facts(id_order=DIGESTS[1], numpy="2.1"), {"a": facts()})


def test_extensions_of_other_source_are_refused_and_listed():
    one, other = (facts(extensions=(Extension("mine", "1.0", digest),)) for digest in DIGESTS)
    with pytest.raises(RefusalError, match=r"extensions: a mine 1.0 \(abab.*, b mine 1.0 \(cdcd.*load the same"):
        refuse_differences("b", other, {"a": one})


def test_the_dry_run_collects_all_differences():
    parties = {"a": facts(), "b": facts(numpy="2.1", id_order=DIGESTS[1]), "c": facts(splits=DIGESTS[1])}
    server = facts(**dict.fromkeys(PARTY))
    found = {finding.check: finding for finding in collect_findings(DRY_RUN, server, parties)}
    assert {check: finding.level for check, finding in found.items()} == dict.fromkeys(
        ("versions", "ids", "labels"), "bad"
    )
    assert "a = c differs from b" in found["ids"].text
    assert "splits (SHA-256): a = b differs from c" in found["labels"].text


def test_equal_facts_are_good_findings():
    parties = {"a": facts(), "b": facts(), "c": facts(classes=None, class_names=None, splits=None)}
    assert {finding.level for finding in collect_findings(DRY_RUN, facts(), parties)} == {"good"}


def test_a_party_without_data_is_a_warning_and_the_others_are_compared():
    bare = facts(nodes=None, id_kind=None, id_set=None, id_order=None, classes=None)
    found = collect_findings(DRY_RUN, facts(), {"a": facts(), "b": bare, "c": facts()})
    assert ("ids", "warning") in {(finding.check, finding.level) for finding in found}
    assert any("common ids, in the same order at a, c" in finding.text for finding in found)


def test_a_comparison_has_two_columns():
    differences = compare_settings({"a": {"nodes": 2708, "long": "x" * 200}, "the server": {"nodes": 2707}})
    lines = format_columns(differences)
    assert lines[0].split() == ["a", "the", "server"]
    assert lines[1].split() == ["nodes", "2708", "2707"]
    assert lines[2].endswith("(nothing)")
    assert len({line.index(word) for line, word in zip(lines, ["the", "2707", "(nothing)"], strict=True)}) == 1
    assert all(len(line) < 200 for line in lines)


# --- over the network -------------------------------------------------------------------------------------------------


def other_ids(party):
    return replace(party, ids=party.ids[::-1].copy())


def foreign_ids(party):
    return replace(party, ids=party.ids + 1)


def other_splits(party):
    splits = party.splits
    return replace(party, splits=Splits(splits.train, splits.test, splits.validation))


def other_classes(party):
    return replace(party, classes=tuple(f"{name}!" for name in party.classes))


def make_stating_party(**changes):
    """Return a party that states other facts in its hello and when it is prepared; None: it leaves a fact out."""

    def change(payload):
        stated = {**payload["facts"], **changes}
        return {**payload, "facts": {name: value for name, value in stated.items() if value is not None}}

    class Stating(TrainingParty):
        def hello(self):
            return change(super().hello())

        def statement(self):
            return change(super().statement())

    return Stating


def make_misinformed_party(change):
    """Return a party that receives a changed welcome: `change` returns its fields."""

    class Told(TrainingParty):
        def welcome(self, welcome):
            super().welcome({**welcome, **change(welcome)})

    return Told


@pytest.mark.parametrize(
    ("change", "field", "advice"),
    [
        (other_ids, "ids in their order", "the ids are the same, but in another order: run glasu align"),
        (
            foreign_ids,
            "set of ids",
            "the sets of ids differ: run glasu align at every party, or list only the common ids",
        ),
        (other_splits, "splits (SHA-256)", "make labels and splits equal"),
        (other_classes, "class names (SHA-256)", "name one party in train.labels"),
    ],
)
def test_a_party_with_other_nodes_splits_or_classes_is_refused_with_a_table_at_both_ends(
    change, field, advice, kits, tmp_path
):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    error = cluster.join("b", party=change(parties[1])).error()
    assert isinstance(error, RefusalError)
    assert error.code == Code.DIFFERENT_FACTS
    assert field in str(error)
    assert advice in str(error)
    assert not re.search("[0-9a-f]{17}", str(error))  # digests are shortened
    assert error.table[0].split() == ["a", "b"]
    assert any(line.split() == ["a", "b"] for line in cluster.lines["server"])
    row = next(line for line in cluster.lines["server"] if line.startswith(f"{field} "))
    values = re.split(r"\s{2,}", row.removeprefix(field).strip())
    assert values == ["as at a", "as at b"] or all(re.fullmatch(r"[0-9a-f]{16}\.\.", digest) for digest in values)
    cluster.until("a", "b: not accepted: it differs from a: ")
    cluster.end(server, a)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"message_format": 1}, f"message format: the server {compute_format_number()}, b 1"),
        ({"glasu": "0.0.1"}, f"glasu: the server {list_versions()['glasu']}, b 0.0.1"),
        ({"numpy": "0.0.1"}, ", b 0.0.1"),
        ({"torch": "0.0.1"}, "torch: a "),
        (
            {"extensions": [{"name": "mine", "version": "1", "digest": "ab" * 32}]},
            "extensions: the server (nothing), b",
        ),
    ],
    ids=str,
)
def test_a_party_of_another_version_is_refused(change, words, kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    error = cluster.join("b", make_stating_party(**change)).error()
    assert isinstance(error, ConfigError)
    assert words in str(error)
    assert any(line.startswith(next(iter(change)).replace("_", " ")) for line in cluster.lines["server"])
    cluster.end(server, a)


@pytest.mark.parametrize("name", ["message_format", "glasu", "numpy", "parties", "torch", "share", "id_kind"])
def test_a_party_that_leaves_out_a_fact_is_refused(name, kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    error = cluster.join("b", make_stating_party(**{name: None})).error()
    assert isinstance(error, ConfigError)
    assert re.search(rf"{name}: is missing|does not state {re.escape(LABELS[name])}", str(error))
    cluster.end(server)


def test_another_build_of_the_same_version_is_accepted_and_reported_to_all_once(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster, torch = Cluster(config, parties, kits, tmp_path), list_versions()["torch"].partition("+")[0]
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    b = cluster.join("b", make_stating_party(torch_build=f"{torch}+other", numpy_build="x"))
    cluster.until("server", "b: prepared")
    for role in (a, b, cluster.join("c")):
        role.outcome()
    server.outcome()
    for who in ("server", *"ab"):
        found = [
            line for line in cluster.lines[who] if line.startswith("b: its library builds differ from the builds of a")
        ]
        assert len(found) == 1
        assert f"torch build: a {list_versions()['torch']}, b {torch}+other" in found[0]
        assert any("b: its library builds differ from the builds of the server" in line for line in cluster.lines[who])


def with_clients(welcome, count):
    return {**welcome["config"], "data": {**welcome["config"]["data"], "num_clients": count}}


TOLD = {
    "a shorter roster": lambda welcome: {"roster": welcome["roster"][:2]},
    "a longer roster": lambda welcome: {"roster": [*welcome["roster"], "d"]},
    "another M": lambda welcome: {"config": with_clients(welcome, 2)},
    "another roster and M": lambda welcome: {"roster": welcome["roster"][:2], "config": with_clients(welcome, 2)},
    "another place": lambda welcome: {"index": 0},
    "no place": lambda welcome: {"index": 3},
}


@pytest.mark.parametrize("name", TOLD)
def test_a_party_that_sees_more_or_fewer_parties_does_not_take_part(name, kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    error = cluster.join("b", make_misinformed_party(TOLD[name])).error()
    assert isinstance(error, RefusalError)
    if name == "another roster and M":  # the facts agree with each other, but not with the server's
        assert "parties: the server 3, b 2" in str(error)
        assert any(line.split() == ["parties", "3", "2"] for line in cluster.lines["server"])
    else:
        assert error.code == Code.WRONG_ROSTER
        cluster.until("server", "b: declines to take part")
    cluster.end(server, a)  # no other role was stopped by it


ESCAPES = "\x1b[2J\nglasu join: all is well" + "x" * 10_000
HOSTILE = {
    "roster": lambda welcome: {"roster": [ESCAPES, *welcome["roster"][1:]]},
    "roster of no names": lambda welcome: {"roster": [1, 2, 3]},
    "no roster": lambda welcome: {"roster": None},
    "index of no number": lambda welcome: {"index": "0"},
    "run of no hexadecimal digits": lambda welcome: {"run": "xyz"},
    "config of no sections": lambda welcome: {"config": 7},
    "section": lambda welcome: {"config": {**welcome["config"], ESCAPES: {}}},
    "key": lambda welcome: {"config": {**welcome["config"], "train": {**welcome["config"]["train"], ESCAPES: 1}}},
    "hidden": lambda welcome: {
        "config": {**welcome["config"], "model": {**welcome["config"]["model"], "hidden": 200_000_000}}
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_malformed_or_hostile_welcome_is_one_short_printable_line_with_exit_code_2(name, kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    error = cluster.join("a", make_misinformed_party(HOSTILE[name])).error()
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    for line in (str(error), *cluster.lines["a"]):
        assert line.isprintable()
        assert len(line) < 2000
    cluster.end(server)


MALFORMED = {
    "no facts": {"facts": {}},
    "a count that is none": {"facts": {"nodes": "many"}},
    "rounds that are none": {"rounds": [1]},
    "no process": {"process": None},
    "an unknown field": {"more": 1},
}


def test_a_malformed_hello_is_refused_and_does_not_stop_other_parties(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()

    def make_greeting_party(change):
        class Greeting(TrainingParty):
            def hello(self):
                return {**super().hello(), **change}

        return Greeting

    for change in MALFORMED.values():
        error = cluster.join("b", make_greeting_party(change), out="strange").error()
        assert isinstance(error, RefusalError)
        assert error.code == Code.INVALID_PAYLOAD
        assert "the server does not accept this party" in str(error)
    for role in [cluster.join(name) for name in "abc"]:
        role.outcome()
    server.outcome()


def test_a_run_that_has_begun_keeps_its_roster_and_says_which_parties_were_added_or_removed(kits, tmp_path):
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


def test_a_party_that_was_added_and_removed_again_leaves_a_run_that_can_continue(kits, tmp_path):
    config, parties = tiny()
    own = Path(shutil.copytree(kits, tmp_path / "kits"))
    cluster = Cluster(config, parties, own, tmp_path)
    for change in (lambda: None, lambda: add(own, ["d"]) and remove(own, ["d"])):
        change()
        assert isinstance(cluster.serve(wait=0.1).error(), AbsenceError)


def test_a_party_that_would_run_other_settings_is_refused_alone_with_a_table_at_both_ends(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)

    class Other(TrainingParty):
        def statement(self):
            changed = self.client.config.replace(train={"learning_rate": 0.125})
            return {**super().statement(), "digest": changed.digest(), "settings": changed.flatten()}

    server, rate = cluster.serve(), config.train.learning_rate
    error = cluster.join("b", Other).error()  # no other party has come yet
    assert isinstance(error, RefusalError)
    assert error.code == Code.DIFFERENT_SETTINGS
    assert f"it would run with different settings: train.learning_rate: the server {rate}, b 0.125" in str(error)
    assert error.table[1].split() == ["train.learning_rate", str(rate), "0.125"]
    assert any(line.split() == ["the", "server", "b"] for line in cluster.lines["server"])
    for role in [cluster.join(name) for name in "abc"]:  # b reconnects with the right settings
        role.outcome()
    server.outcome()


def test_settings_that_a_party_does_not_expect_are_declined_with_a_table_at_both_ends(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    error = cluster.join("b", expect=config.replace(train={"learning_rate": 0.25})).error()
    assert isinstance(error, RefusalError)
    assert "train.learning_rate: b expects 0.25, the server " in str(error)
    assert "agree on one run file with the server's operator" in str(error)
    cluster.until("server", "b: declines to take part")
    for who in ("server", "b"):
        heading = next(line for line in cluster.lines[who] if line.split() == ["b", "expects", "the", "server"])
        row = cluster.lines[who][cluster.lines[who].index(heading) + 1]
        assert row.split() == ["train.learning_rate", "0.25", str(config.train.learning_rate)]
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
    with pytest.raises(ConfigError, match=r"holds a finished run whose settings differ .* a expects 0.25, the server"):
        cluster.join("a", expect=config.replace(train={"learning_rate": 0.25})).outcome()


def test_a_party_that_names_another_run_is_refused_and_is_not_admitted(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    with pytest.raises(RefusalError, match=r"started for run 0a1b \(--run\), but this is run [0-9a-f]{24}") as refused:
        cluster.join("a", run="0a1b", out="late").outcome()
    assert refused.value.code == Code.UNWANTED_RUN
    run = json.loads((tmp_path / "server" / "serving.json").read_text())["run"]
    roles = [cluster.join(party.name, run=run) for party in parties]
    assert [role.outcome()["run"] for role in roles] == [run] * len(parties)
    server.outcome()
    with pytest.raises(ConfigError, match=f"holds a party's part of run {run}, not of 0a1b"):
        cluster.join("a", run="0a1b").outcome()


def test_the_certificate_says_which_party_it_is(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    own, other = (open_kit(kits / name) for name in "ab")
    disguised = replace(own, certificate_pem=other.certificate_pem, key_pem=other.key_pem)  # calls itself a

    class Disguised(TrainingParty):
        def __init__(self, options, party):
            super().__init__(replace(options, kit=disguised), party)

    error = cluster.join("a", Disguised).error()
    assert isinstance(error, ConfigError)
    assert "lists this party as 'b'" in str(error)
    cluster.until("server", "b: declines to take part")
    assert not any(line.startswith("a: ") for line in cluster.lines["server"])
    cluster.end(server)


def test_a_kit_of_another_party_is_refused_before_anything_is_sent(kits, tmp_path):
    _, parties = tiny()
    options = JoinOptions(kit=open_kit(kits / "b"), server="localhost:1", out=tmp_path / "a")
    with pytest.raises(ConfigError, match="the data belongs to party 'a' and the kit to party 'b'"):
        TrainingParty(options, parties[0])
    assert not (tmp_path / "a").exists()


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


def test_labels_that_are_not_used_are_not_compared(kits, tmp_path):
    config, _ = tiny(labels="b", num_rounds=1)
    _, parties = tiny()  # all parties have labels
    parties = [other_splits(parties[0]), parties[1], other_classes(parties[2])]
    served, _ = Cluster(config, parties, kits, tmp_path).run()
    assert len(served.weights_sha256) == 3
