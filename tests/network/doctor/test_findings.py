"""Every check of the doctor, good and bad."""

from __future__ import annotations

import logging
import shutil
import socket
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from glasu.data.graph import Graph
from glasu.data.party import Splits
from glasu.network.admission import Admission
from glasu.network.admission_policy import Collect, ServedRun
from glasu.network.doctor import machine
from glasu.network.doctor.data import check_data, check_settings
from glasu.network.facts import collect_server_facts
from glasu.network.handshake import WelcomePayload
from glasu.network.options import JoinOptions
from glasu.network.purposes import DRY_RUN
from glasu.network.server_session import ServerSession
from glasu.network.transport import Listener
from glasu.pki.kit import open_kit
from glasu.pki.provision import provision
from support.tiny import settings, tiny_parties

LOG = logging.getLogger("glasu.test")


def now():
    """Return the present time; the kits are made after this module is imported."""
    return datetime.now(UTC)


def levels(findings):
    return {finding.check: finding.level for finding in findings}


# --- the machine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("later", "level", "words"),
    [(0, "good", "valid until"), (349.9, "warning", "in 15 days; ask for a renewed"), (400, "bad", "cannot be used")],
)
def test_a_kit_is_good_until_it_nears_its_end(kits, later, level, words):
    kit, finding = machine.check_kit(kits / "a", "party", LOG, now() + timedelta(days=later))
    assert (finding.check, finding.level) == ("certificate", level)
    assert words in finding.text
    assert (kit is None) == (level == "bad")


def test_the_reason_why_a_kit_cannot_be_used_stays_in_the_log(kits, caplog):
    caplog.set_level(logging.INFO)
    kit, finding = machine.check_kit(kits / "server", "party", LOG)
    assert kit is None
    assert "is the kit of the server" in caplog.text
    assert "kit of the server" not in finding.text


@pytest.mark.parametrize(("free", "level"), [(2_000_000, "good"), (999_999, "bad")])
def test_a_disk_must_have_room_for_checkpoints(free, level, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    finding = machine.check_disk(tmp_path, 1_000_000)
    assert finding.level == level
    assert "need 1.0 MB" in finding.text
    assert finding.text.endswith("or choose another --out") == (level == "bad")
    (tmp_path / "joining.json").write_text("{}")  # a run in progress in this folder cannot continue in another
    assert machine.check_disk(tmp_path, 1_000_000).text.endswith("; free some space") == (level == "bad")


@pytest.mark.parametrize(
    ("difference", "uncertainty", "level", "words"),
    [
        (0.2, 0.1, "good", "0.2 s ahead of the server's"),
        (-60.0, 0.1, "warning", "60.0 s behind the server's"),
        (400.0, 0.1, "bad", "set both clocks by NTP"),
        (-20.0, 15.0, "good", ""),  # a slow line is not a wrong clock
    ],
)
def test_clocks_may_differ_a_little(difference, uncertainty, level, words):
    finding = machine.judge_clock(difference, uncertainty)
    assert finding.level == level
    assert words in finding.text


@contextmanager
def doctor_at(kits):
    admission = Admission(
        ServedRun(DRY_RUN, collect_server_facts(DRY_RUN), settings(), ("a", "b", "c"), "dry-run", dict), Collect()
    )
    session = ServerSession("abc", admission, "dry-run", wait=60.0, log=LOG)
    with Listener(session.host, open_kit(kits / "server"), "127.0.0.1:0") as listener:
        listener.start()
        yield listener.port


def test_a_server_with_the_right_name_is_reached(kits):
    with doctor_at(kits) as port:
        finding, may_come = machine.check_connection(open_kit(kits / "a"), f"localhost:{port}", now())
    assert (finding.check, finding.level, may_come) == ("server", "good", False)
    assert "its certificate names localhost, valid until" in finding.text


def test_a_certificate_of_the_server_that_will_soon_expire_is_a_warning(kits):
    with doctor_at(kits) as port:
        soon = now() + timedelta(days=350)
        assert machine.check_connection(open_kit(kits / "a"), f"localhost:{port}", soon)[0].level == "warning"


def test_a_server_by_a_name_that_its_certificate_does_not_have_is_bad(kits):
    with doctor_at(kits) as port:
        finding, may_come = machine.check_connection(open_kit(kits / "a"), f"127.0.0.1:{port}", now())
    assert (finding.level, may_come) == ("bad", False)
    assert "does not name 127.0.0.1" in finding.text
    assert "--renew server --host localhost,127.0.0.1" in finding.text


def test_a_server_of_another_ca_is_bad_on_either_side(kits, tmp_path):
    provision(tmp_path / "other", ["a"], ["localhost"])
    other = open_kit(tmp_path / "other" / "a")
    with doctor_at(kits) as port:
        finding, may_come = machine.check_connection(other, f"localhost:{port}", now())
        assert (finding.level, may_come) == ("bad", False)
        assert "CA of this kit" in finding.text
        posing = replace(other, ca_pem=open_kit(kits / "a").ca_pem)  # it trusts the server, which does not trust it
        finding, _ = machine.check_connection(posing, f"localhost:{port}", now())
        assert finding.level == "bad"
        assert "probably rejected this party's certificate" in finding.text


def test_where_nothing_listens_the_server_may_still_come(kits):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    finding, may_come = machine.check_connection(open_kit(kits / "a"), f"localhost:{port}", now())
    assert (finding.level, may_come) == ("bad", True)
    assert "is the server running" in finding.text


def test_a_host_name_that_cannot_be_resolved_is_a_fault(kits, monkeypatch):
    def fail_to_resolve(address, timeout):
        raise socket.gaierror

    monkeypatch.setattr(socket, "create_connection", fail_to_resolve)
    finding, may_come = machine.check_connection(open_kit(kits / "a"), "typo.example:9443", now())
    assert (finding.level, may_come) == ("bad", False)
    assert "the name typo.example cannot be resolved" in finding.text


# --- the data ----------------------------------------------------------------------------------------------------


def test_good_data_is_good_and_its_sizes_stay_in_the_log(caplog):
    caplog.set_level(logging.INFO)
    party = tiny_parties()[0]
    found = check_data(party, LOG)
    assert levels(found) == {"dimensions": "good", "edges": "good"}
    assert f"{party.graph.num_edges} edges" in caplog.text
    assert str(party.graph.num_edges) not in found[0].text


def test_edges_that_name_nodes_out_of_range_are_bad():
    party = tiny_parties()[0]
    indices = party.graph.indices.copy()
    indices[:2] = (24, -1)
    found = check_data(replace(party, graph=Graph.without_checks(party.graph.indptr, indices)), LOG)
    assert levels(found)["edges"] == "bad"
    assert "2 edges name nodes that do not exist" in found[-1].text


def test_no_edge_at_all_is_a_warning():
    party = tiny_parties()[0]
    none = Graph.from_edges(np.empty(0, np.int64), np.empty(0, np.int64), 24)
    assert levels(check_data(replace(party, graph=none), LOG))["edges"] == "warning"


def test_features_that_are_no_numbers_are_bad():
    party = tiny_parties()[0]
    party.features[3, 1] = np.nan
    assert levels(check_data(party, LOG))["features"] == "bad"


# --- the settings ------------------------------------------------------------------------------------------------


@pytest.fixture
def options(kits, tmp_path):
    return JoinOptions(kit=open_kit(kits / "a"), server="localhost:1", out=tmp_path)


def try_settings(party, options, index=0, split="paper", **keys):
    config = settings(**keys).replace(data={"num_clients": 3, "split": split})
    return check_settings(
        config, party, WelcomePayload(config={}, roster=("a", "b", "c"), index=index, run="00"), options
    )


def test_data_that_fits_the_settings_is_good(options):
    found, facts = try_settings(tiny_parties()[0], options)
    assert levels(found) == {"settings": "good", "labels": "good", "disk": "good"}
    assert facts["classes"] == 3


def test_a_roster_with_another_name_in_the_place_of_the_party_is_bad(options, caplog):
    caplog.set_level(logging.INFO)
    found, _ = try_settings(tiny_parties()[0], options, index=1)
    assert levels(found) == {"settings": "bad"}
    assert "lists this party as 'b'" in caplog.text


def test_missing_labels_are_bad_and_the_reason_stays_in_the_log(options, caplog):
    caplog.set_level(logging.INFO)
    found, facts = try_settings(tiny_parties(owner="b")[0], options)
    assert levels(found) == {"settings": "bad"}
    assert "has no labels" in caplog.text
    assert facts == {}


def test_a_model_above_the_memory_limit_is_bad(options, caplog):
    caplog.set_level(logging.INFO)
    found, _ = try_settings(tiny_parties()[0], replace(options, max_memory=1000))
    assert levels(found) == {"settings": "bad"}
    assert "model.hidden=" in caplog.text


def test_a_party_whose_labels_are_not_used_needs_none(options):
    found, facts = try_settings(tiny_parties(owner="b")[0], options, labels="b")
    assert levels(found) == {"settings": "good", "disk": "good"}
    assert facts == {}


def test_a_class_without_a_training_node_is_a_warning(options):
    party = tiny_parties()[0]
    train = party.splits.train[party.labels[party.splits.train] != 1]
    found, _ = try_settings(replace(party, splits=Splits(train, party.splits.validation, party.splits.test)), options)
    assert levels(found)["labels"] == "warning"
    assert "1 of 3 classes have no training node" in found[1].text


def test_no_label_for_validation_is_bad_or_with_the_fraction_zero_a_warning(options, caplog):
    caplog.set_level(logging.INFO)
    party = tiny_parties()[0]
    nobody = party.splits.validation[:0]
    party = replace(party, splits=Splits(party.splits.train, nobody, party.splits.test))
    found, _ = try_settings(party, options)
    assert levels(found) == {"settings": "bad"}
    assert "no validation node has a known label" in caplog.text
    found, _ = try_settings(party, options, split=(0.8, 0.0, 0.2))
    assert levels(found)["labels"] == "warning"
    assert "no label for validation" in found[1].text


def test_the_room_for_checkpoints_grows_with_the_model(options):
    def find_needed_disk(hidden):
        found, _ = try_settings(tiny_parties()[0], options, hidden=hidden)
        disk = next(finding.text for finding in found if finding.check == "disk")
        return float(disk.split("results need ")[1].split(" MB")[0])

    assert find_needed_disk(512) > find_needed_disk(8) + 10
