"""Every finding of the doctor, good and bad."""

from __future__ import annotations

import shutil
import socket
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from glasu.data.party import Graph, Splits
from glasu.errors import ProtocolError
from glasu.network.compatibility import protocol_facts
from glasu.network.doctor import machine
from glasu.network.doctor.data import SPARE, data_findings, settings_findings
from glasu.network.doctor.examination import Examination
from glasu.network.doctor.findings import EVERYBODY, Finding, Verdict, from_plain, read_facts, to_plain
from glasu.network.doctor.together import compare
from glasu.network.party_setup import id_facts
from glasu.network.transport import listening
from glasu.pki.kit import open_kit
from glasu.pki.provision import provision
from glasu.report import versions
from support.monolith import settings, tiny_parties


def now():
    """Return the time when it is asked for: kits are made later than this module is read."""
    return datetime.now(UTC)


def levels(findings):
    return {finding.check: finding.level for finding in findings}


# --- the machine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("later", "level", "words"),
    [(0, "good", "valid until"), (349.9, "warning", "in 15 days; ask for a renewed"), (400, "bad", "cannot be used")],
)
def test_a_kit_is_good_until_it_nears_its_end(kits, later, level, words):
    kit, (finding,) = machine.kit_findings(kits / "a", "party", now() + timedelta(days=later))
    assert (finding.check, finding.level) == ("certificate", level)
    assert words in finding.said
    assert (kit is None) == (level == "bad")


def test_why_a_kit_cannot_be_used_is_said_there_only(kits):
    kit, (finding,) = machine.kit_findings(kits / "server", "party", now())
    assert kit is None
    assert "is the kit of the server" in finding.detail
    assert "kit of the server" not in str(finding.to_dict())


@pytest.mark.parametrize(("free", "level"), [(2_000_000, "good"), (999_999, "bad")])
def test_a_disk_must_have_room_for_checkpoints(free, level, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    finding = machine.disk_finding(tmp_path, 1_000_000)
    assert finding.level == level
    assert "need 1.0 MB" in finding.said
    assert finding.said.endswith("or choose another --out") == (level == "bad")
    (tmp_path / "joining.json").write_text("{}")  # a run that goes on here cannot go on elsewhere
    assert machine.disk_finding(tmp_path, 1_000_000).said.endswith("; make room") == (level == "bad")


@pytest.mark.parametrize(
    ("difference", "uncertainty", "level", "words"),
    [
        (0.2, 0.1, "good", "0.2 s ahead of the server's"),
        (-60.0, 0.1, "warning", "60.0 s behind the server's"),
        (400.0, 0.1, "bad", "set both by NTP"),
        (-20.0, 15.0, "good", ""),  # a slow line is not a wrong clock
    ],
)
def test_clocks_may_differ_a_little(difference, uncertainty, level, words):
    finding = machine.clock_finding(difference, uncertainty)
    assert finding.level == level
    assert words in finding.said


@contextmanager
def doctor_at(kits):
    with listening(
        Examination(("a", "b", "c"), {}, print, lambda: 0.0), open_kit(kits / "server"), "127.0.0.1:0"
    ) as port:
        yield port


def test_a_server_with_the_right_name_is_reached(kits):
    with doctor_at(kits) as port:
        finding, may_come = machine.road_finding(open_kit(kits / "a"), f"localhost:{port}", now())
    assert (finding.check, finding.level, may_come) == ("server", "good", False)
    assert "its certificate is of localhost, valid until" in finding.said


def test_a_certificate_of_the_server_that_will_soon_expire_is_a_warning(kits):
    with doctor_at(kits) as port:
        soon = now() + timedelta(days=350)
        assert machine.road_finding(open_kit(kits / "a"), f"localhost:{port}", soon)[0].level == "warning"


def test_a_server_by_a_name_that_its_certificate_does_not_have_is_bad(kits):
    with doctor_at(kits) as port:
        finding, may_come = machine.road_finding(open_kit(kits / "a"), f"127.0.0.1:{port}", now())
    assert (finding.level, may_come) == ("bad", False)
    assert "--host 127.0.0.1" in finding.said


def test_a_server_of_another_ca_is_bad_on_either_side(kits, tmp_path):
    provision(tmp_path / "other", ["a"], ["localhost"])
    other = open_kit(tmp_path / "other" / "a")
    with doctor_at(kits) as port:
        finding, may_come = machine.road_finding(other, f"localhost:{port}", now())
        assert (finding.level, may_come) == ("bad", False)
        assert "CA of this kit" in finding.said
        posing = replace(other, ca_pem=open_kit(kits / "a").ca_pem)  # it trusts the server, which does not trust it
        finding, _ = machine.road_finding(posing, f"localhost:{port}", now())
        assert finding.level == "bad"
        assert "the server's log says why" in finding.said


def test_where_nothing_listens_the_server_may_still_come(kits):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    finding, may_come = machine.road_finding(open_kit(kits / "a"), f"localhost:{port}", now())
    assert (finding.level, may_come) == ("bad", True)
    assert "is the server started" in finding.said


def test_a_name_that_nobody_knows_is_bad(kits, monkeypatch):
    def unknown(address, timeout):
        raise socket.gaierror

    monkeypatch.setattr(socket, "create_connection", unknown)
    finding, may_come = machine.road_finding(open_kit(kits / "a"), "typo.example:9443", now())
    assert (finding.level, may_come) == ("bad", False)
    assert "typo.example is not known here" in finding.said


# --- the data ----------------------------------------------------------------------------------------------------


def test_good_data_is_good_and_its_sizes_stay_here():
    party = tiny_parties()[0]
    found = data_findings(party)
    assert levels(found) == {"dimensions": "good", "edges": "good"}
    assert f"{party.graph.num_edges} edges" in found[0].detail
    assert str(party.graph.num_edges) not in found[0].said


def opened(party, graph):
    """Return a party with a graph that nobody has checked, as one that was stored."""
    changed = replace(party)
    object.__setattr__(changed, "graph", graph)
    return changed


def test_edges_that_name_nodes_out_of_range_are_bad():
    party = tiny_parties()[0]
    indices = party.graph.indices.copy()
    indices[:2] = (24, -1)
    found = data_findings(opened(party, Graph.without_checks(party.graph.indptr, indices)))
    assert levels(found)["edges"] == "bad"
    assert "2 of them name nodes" in found[-1].said


def test_no_edge_at_all_is_a_warning():
    party = tiny_parties()[0]
    none = Graph.from_edges(np.empty(0, np.int64), np.empty(0, np.int64), 24)
    assert levels(data_findings(opened(party, none)))["edges"] == "warning"


def test_files_that_do_not_fit_each_other_are_bad():
    party = tiny_parties()[0]
    smaller = Graph.from_edges(np.array([0]), np.array([1]), 23)
    (finding,) = data_findings(opened(party, smaller))
    assert (finding.check, finding.level) == ("dimensions", "bad")
    assert "24 ids, 24 rows of features, 23 nodes of the graph" in finding.said


def test_features_that_are_no_numbers_are_bad():
    party = tiny_parties()[0]
    party.features[3, 1] = np.nan
    assert levels(data_findings(party))["features"] == "bad"


# --- the settings ------------------------------------------------------------------------------------------------


def tried(party, tmp_path, **keys):
    return settings_findings(settings(**keys), party, ["a", "b", "c"], tmp_path)


def test_data_that_fits_the_settings_is_good(tmp_path):
    found, facts = tried(tiny_parties()[0], tmp_path)
    assert levels(found) == {"settings": "good", "labels": "good", "disk": "good"}
    assert facts["classes"] == 3


def test_labels_that_are_not_there_are_bad_and_the_reason_stays_here(tmp_path):
    found, facts = tried(tiny_parties(owner="b")[0], tmp_path)
    assert levels(found) == {"settings": "bad"}
    assert "has no labels" in found[0].detail
    assert facts == {}


def test_a_model_above_the_memory_limit_is_bad(tmp_path):
    found, _ = settings_findings(settings(), tiny_parties()[0], ["a", "b", "c"], tmp_path, max_memory=1000)
    assert levels(found) == {"settings": "bad"}
    assert "model.hidden=" in found[0].detail


def test_a_party_whose_labels_are_not_used_needs_none(tmp_path):
    found, facts = tried(tiny_parties(owner="b")[0], tmp_path, labels="b")
    assert levels(found) == {"settings": "good", "disk": "good"}
    assert facts == {}


def test_a_class_without_a_training_node_is_a_warning(tmp_path):
    party = tiny_parties()[0]
    train = party.splits.train[party.labels[party.splits.train] != 1]
    found, _ = tried(replace(party, splits=Splits(train, party.splits.validation, party.splits.test)), tmp_path)
    assert levels(found)["labels"] == "warning"
    assert "1 of 3 classes have no training node" in found[1].said


def test_nothing_to_validate_with_is_a_warning(tmp_path):
    party = tiny_parties()[0]
    nobody = party.splits.validation[:0]
    found, _ = tried(replace(party, splits=Splits(party.splits.train, nobody, party.splits.test)), tmp_path)
    assert levels(found)["labels"] == "warning"
    assert "none to validate with" in found[1].said


def test_the_room_for_checkpoints_grows_with_the_model(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("glasu.network.doctor.data.disk_finding", lambda out, needed: asked.append(needed - SPARE))
    for hidden in (8, 64):
        tried(tiny_parties()[0], tmp_path, hidden=hidden)
    assert asked[1] > 20 * asked[0]


# --- all together ------------------------------------------------------------------------------------------------


def stated(*parties, **changes):
    """Return what the server and the parties state, with some facts of party b changed."""
    server = protocol_facts(versions(), "training")
    facts = {party.name: {**server, "torch": "2.6.0+cpu", "numpy": "2.0", **id_facts(party)} for party in parties}
    server["numpy"] = "2.0"
    facts["b"].update(changes)
    return server, facts


def test_equal_versions_ids_and_order_are_good():
    found = compare(*stated(*tiny_parties()))
    assert levels(found) == {"versions": "good", "ids": "good"}
    assert "24 common ids, in the same order at a, b, c" in found[1].said
    assert found[0].said == f"equal: glasu {versions()['glasu']}, numpy 2.0, torch 2.6.0+cpu"


@pytest.mark.parametrize("package", ["glasu", "numpy", "torch", "message format"])
def test_another_version_is_bad(package):
    found = compare(*stated(*tiny_parties(), **{package: "0.0.1"}))
    assert levels(found)["versions"] == "bad"
    assert package in found[0].said
    assert "b 0.0.1" in found[0].said


def test_another_build_of_the_same_version_is_a_warning():
    assert levels(compare(*stated(*tiny_parties(), torch="2.6.0+cu126")))["versions"] == "warning"


def test_the_same_ids_in_another_order_are_bad():
    a, b, c = tiny_parties()
    found = compare(*stated(a, replace(b, ids=b.ids[::-1].copy()), c))
    assert levels(found)["ids"] == "bad"
    assert "24 common ids, but not in the same order (a = c differs from b)" in found[1].said


def test_other_ids_are_bad_and_counted():
    a, b, c = tiny_parties()
    found = compare(*stated(a, replace(b, ids=b.ids + 1), c))
    assert levels(found)["ids"] == "bad"
    assert "at most 24 common ids (a 24, b 24, c 24; a = c differs from b)" in found[1].said


def test_ids_of_two_kinds_are_bad():
    a, b, c = tiny_parties()
    found = compare(*stated(a, replace(b, ids=b.ids.astype(str)), c))
    assert "they cannot be compared (a numbers, b strings, c numbers)" in found[1].said


def test_equal_labels_are_good_and_others_bad():
    labels = {"classes": 3, "class names (SHA-256)": "x", "splits (SHA-256)": "y"}
    server, facts = stated(*tiny_parties())
    for party in facts.values():
        party.update(labels)
    assert levels(compare(server, facts))["labels"] == "good"
    facts["c"]["splits (SHA-256)"] = "z"
    found = compare(server, facts)
    assert levels(found)["labels"] == "bad"
    assert "splits: a = b differs from c" in found[-1].said


def test_where_parties_could_not_read_their_data_their_ids_are_said_not_to_be_checked():
    server, facts = stated(*tiny_parties())
    facts["a"] = facts["b"] = dict(server)
    assert [finding.said for finding in compare(server, facts) if finding.check == "ids"] == [
        "not checked at a, b, whose data cannot be read"
    ]


# --- the verdict -------------------------------------------------------------------------------------------------

GOOD, WARNING, BAD = (Finding("disk", level, "words", "secret") for level in ("good", "warning", "bad"))


def test_a_verdict_is_ready_unless_something_is_bad():
    ready = Verdict({"server": [GOOD], "a": [WARNING], "b": [GOOD], EVERYBODY: [GOOD]})
    assert ready.is_ready
    assert ready.in_words() == "ready: the server and a, b can train together. 1 warning, see above."
    bad = Verdict({"server": [GOOD], "a": [BAD], EVERYBODY: [BAD]})
    assert not bad.is_ready
    assert bad.in_words() == "not ready, 2 problems: a: disk: words; server/parties: disk: words."
    assert bad.lines()[1].split() == ["a", "bad", "disk:", "words"]


def test_a_question_ends_a_verdict_without_a_full_stop():
    asked = Verdict({"server": [Finding("presence", "bad", "did not come; is it started?")]})
    assert asked.in_words() == "not ready, 1 problem: server: presence: did not come; is it started?"


def test_findings_travel_without_their_details():
    sent = to_plain({"a": [BAD]})
    assert "secret" not in str(sent)
    assert from_plain(sent["a"]) == [Finding("disk", "bad", "words")]


@pytest.mark.parametrize(
    "strange", [None, 7, [1], [{"check": "x"}], [{"check": "x", "level": "!", "said": ""}], [{}] * 99]
)
def test_findings_that_cannot_be_are_refused(strange):
    with pytest.raises(ProtocolError):
        from_plain(strange)


def test_what_others_say_cannot_steer_a_terminal():
    (finding,) = from_plain([{"check": "\x1b[2J", "level": "good", "said": "x" * 9999}])
    assert "\x1b" not in finding.check
    assert len(finding.said) == 300
    assert read_facts({"nodes": 3, "torch": "\n"}) == {"nodes": 3, "torch": "?"}
    with pytest.raises(ProtocolError):
        read_facts([])
