"""Masks over gRPC: the bits of one process, resume, prediction, signed and pinned keys, and a dishonest server."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from glasu.errors import ConfigError
from glasu.html_report import format_row, render_report
from glasu.network.handshake import RefusalError
from glasu.network.serve import ServerPerformer
from glasu.network.training_party import TrainingParty
from glasu.pki.key_signing import KitSigner, find_kit_error
from glasu.pki.kit import open_kit
from glasu.pki.pins import PINS
from glasu.privacy.masking import join_parts, split_parts
from glasu.protocol.messages import KeyOffers
from glasu.protocol.requests import Broadcast, RoundDone
from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster, list_weights
from support.kits import make_pinned_kits, simulate_with_secrets
from support.masks import tiny_masked, use_masks
from support.processes import SMALL_RUN, Processes
from support.roles import Killed
from support.tiny import tiny

RUNS = [
    {"backbone": "gcnii", "optimizer": "adam", "warm_start": 3, "blind": True},
    {"labels": "b", "backward": "joint", "precision": "int8"},
    {"labels": "b", "chunk_rows": 5},
    {"method": "ensemble"},
]
ONCE = {"release": "once", "aggregation_layers": (1,), "blind": True, "dp_noise_multiplier": 1.0}


@pytest.fixture
def own_kits(pinned_kits, tmp_path) -> Path:
    """Return a copy of the kits, to be changed."""
    return Path(shutil.copytree(pinned_kits, tmp_path / "kits"))


@pytest.mark.parametrize("keys", RUNS, ids=str)
def test_the_run_over_the_network_is_the_run_in_one_process(keys, pinned_kits, tmp_path):
    config, parties = tiny_masked(**keys)
    served, reports = Cluster(config, parties, pinned_kits, tmp_path).run()
    simulated = simulate_with_secrets(parties, config).report
    assert served.weights_sha256 == simulated.weights_sha256
    found, expected = (dict(each.traffic.by_kind) for each in (served, simulated))
    assert found.pop("keys") > expected.pop("keys")  # offers with certificates are longer
    assert found == expected
    assert served.traffic.exchanges == simulated.traffic.exchanges
    owners = "abc" if config.train.labels == "all" else config.train.labels
    for name, own in reports.items():
        assert ("history" in own) == (name in owners)
        if name in owners:
            assert own["test"]["accuracy"] == simulated.test.accuracy
            assert own["validation"]["accuracy"] == simulated.validation.accuracy
            listed = [(entry.round, entry.metrics["accuracy"]) for entry in simulated.history]
            assert [(entry["round"], entry["val_accuracy"]) for entry in own["history"]] == listed
        assert own["privacy"]["masks"]["signatures"] == "signed, by pinned keys"
        assert set(own["privacy"]["masks"]["clamped"]) == {name}


def test_one_release_with_noise_and_masks_is_the_run_in_one_process(pinned_kits, tmp_path):
    config, parties = tiny_masked(**ONCE)
    served, reports = Cluster(config, parties, pinned_kits, tmp_path).run()
    simulated = simulate_with_secrets(parties, config).report
    assert list_weights(reports) == simulated.weights_sha256
    assert (served.test.metrics, served.losses, served.history) == ({}, (), ())
    for own in reports.values():
        assert own["test"]["accuracy"] == simulated.test.accuracy
        assert own["validation"]["accuracy"] == simulated.validation.accuracy
        assert "clamped" not in own["privacy"]["masks"]  # the number depends on data


def test_the_server_reports_no_loss_metric_or_clamped_value(pinned_kits, tmp_path):
    config, parties = tiny_masked()
    events: list[object] = []
    cluster = Cluster(config, parties, pinned_kits, tmp_path)
    server = cluster.serve(observer=events.append)
    for role in [cluster.join(name) for name in "abc"]:
        role.outcome()
    report = server.outcome()
    plain = json.loads((tmp_path / "server" / "report.json").read_text())
    assert (plain["test"], plain["validation"], plain["history"], plain["losses"]) == ({}, {}, [], [])
    assert "clamped" not in plain["privacy"]["masks"]
    assert "the parties have the scores" in report.summary()
    assert format_row(report)[0] == "-"
    assert "Data of each party" in render_report("masks", "One run.", {"served": report})
    assert {event.loss for event in events if isinstance(event, RoundDone)} == {None}
    assert cluster.serving[-1].view().scores == {}


@pytest.mark.parametrize(
    "keys", [{"labels": "b", "precision": "int8", "blind": True}, {"backward": "joint"}, ONCE], ids=str
)
def test_a_party_that_is_killed_comes_back_with_new_keys_and_the_bits_are_the_same(keys, pinned_kits, tmp_path):
    config, parties = tiny_masked(num_rounds=4, **keys)

    class Dying(TrainingParty):
        def observe(self, event):
            super().observe(event)
            done = isinstance(event, RoundDone) and event.round == 2
            if done and bool(self.client.progress.lower) == ("release" in keys):  # in the upper stage, if there is one
                raise Killed

    cluster = Cluster(config, parties, pinned_kits, tmp_path)
    server = cluster.serve()
    others = [cluster.join(name) for name in "ac"]
    assert isinstance(cluster.join("b", role=Dying).error(), Killed)
    again = cluster.join("b").outcome()
    first, last = (role.outcome() for role in others)
    simulated = simulate_with_secrets(parties, config).report
    server.outcome()
    assert list_weights({"a": first, "b": again, "c": last}) == simulated.weights_sha256
    assert [entry["round"] for entry in again["history"]] == [entry.round for entry in simulated.history]
    assert again["losses"] == list(simulated.losses) or config.train.labels == "all"


@pytest.mark.slow  # the roles of test_a_party_that_is_killed_comes_back are threads of one process
@pytest.mark.parametrize("noise", ["", "dp_noise_multiplier = 1.0\n"])
def test_a_party_and_the_server_are_killed_with_sigkill_and_started_again(noise, pinned_kits, tmp_path):
    settings = SMALL_RUN.format(rounds=40).replace('"neighbor"', '"shared"')
    privacy = f'[privacy]\nsecure_aggregation = "masks"\nblind_server = true\n{noise}'
    roles = Processes(tmp_path, pinned_kits, settings + privacy)
    try:
        roles.run_with_kills("b")
    finally:
        roles.stop()
    simulated = simulate_with_secrets(roles.parties, roles.config).report
    reports = {name: json.loads((tmp_path / name / "report.json").read_text()) for name in "abc"}
    assert list_weights(reports) == simulated.weights_sha256
    assert reports["c"]["test"]["accuracy"] == simulated.test.accuracy


@pytest.mark.parametrize("keys", [{}, {"labels": "b", "precision": "int8"}], ids=str)
def test_prediction_agrees_on_keys_again_and_gives_the_scores_of_one_process(keys, pinned_kits, tmp_path):
    config, parties = tiny_masked(blind=True, **keys)
    cluster = Cluster(config, parties, pinned_kits, tmp_path)
    cluster.run()
    model, nodes = TrainedModel.of(simulate_with_secrets(parties, config).clients), np.array([3, 11, 20])
    _, found = cluster.predict(b=nodes)
    np.testing.assert_array_equal(found["b"].scores, model.scores(parties, nodes))


# --- keys and certificates ---------------------------------------------------------------------------------------


def test_trial_kits_are_refused_at_the_server_and_at_a_party(kits, pinned_kits, tmp_path):
    config, parties = tiny_masked()
    error = Cluster(config, parties, kits, tmp_path / "trial").serve().error()
    assert isinstance(error, ConfigError)
    assert "this is a trial kit: the operator of the CA made its private key" in str(error)
    assert find_kit_error(open_kit(kits / "a"), "abc").startswith("this is a trial kit")
    assert find_kit_error(open_kit(pinned_kits / "a"), "abc") == ""


def test_a_party_without_the_pins_of_its_peers_is_refused(own_kits, tmp_path):
    config, parties = tiny_masked()
    (own_kits / "b" / PINS).unlink()
    cluster = Cluster(config, parties, own_kits, tmp_path)
    server = cluster.serve()
    error = cluster.join("b").error()
    assert isinstance(error, RefusalError)
    assert "the keys of a, c are not pinned in this kit" in str(error)
    assert "--peers a=FINGERPRINT c=FINGERPRINT" in str(error)
    cluster.end(server)


class Changing(ServerPerformer):
    """A server that changes the key of party b in the offers."""

    def change(self, parts: list[bytes]) -> list[bytes]:
        raise NotImplementedError

    def __call__(self, request):
        if isinstance(request, Broadcast) and isinstance(request.message, KeyOffers):
            offers = split_parts(request.message.content.tobytes(), 3)
            offers[1] = join_parts(self.change(split_parts(offers[1], 3)))
            content = np.frombuffer(join_parts(offers), np.uint8)
            request = Broadcast(dataclasses.replace(request.message, content=content))
        return super().__call__(request)


class Swapping(Changing):
    def change(self, parts):
        return [X25519PrivateKey.generate().public_key().public_bytes_raw(), *parts[1:]]


class Unsigned(Changing):
    def change(self, parts):
        return [parts[0], b"", b""]


@pytest.mark.parametrize(
    ("performer", "said"),
    [
        (Swapping, "the key of party 'b' has a signature that is not valid for this run, attempt, roster"),
        (Unsigned, "the key of party 'b' is not signed"),
    ],
)
def test_a_key_that_the_server_swapped_or_that_is_unsigned_is_refused(performer, said, pinned_kits, tmp_path):
    config, parties = tiny_masked()
    cluster = Cluster(config, parties, pinned_kits, tmp_path)
    server = cluster.serve(performer=performer)
    roles = {name: cluster.join(name) for name in "abc"}
    errors = {name: str(role.error()) for name, role in roles.items()}
    assert any(said in text for text in errors.values())
    assert server.error() is not None
    assert not list(tmp_path.rglob("report.json"))


CONTENT = b"run, attempt, roster, settings, name and key"


def test_a_signature_counts_only_with_the_certificate_and_the_pinned_key_of_its_party(own_kits):
    own, peer = (KitSigner(open_kit(own_kits / name)) for name in "ab")
    signature = peer.sign(CONTENT)
    assert own.find_error("b", peer.certificate, signature, CONTENT) == ""
    assert "not valid for this run" in own.find_error("b", peer.certificate, signature, CONTENT + b"!")
    assert "is not signed" in own.find_error("b", peer.certificate, b"", CONTENT)
    assert "another role or party" in own.find_error("c", peer.certificate, signature, CONTENT)
    server = open_kit(own_kits / "server").certificate_pem
    assert "another role or party" in own.find_error("b", server, signature, CONTENT)
    assert "has not signed" in own.find_error("b", b"no certificate", signature, CONTENT)
    other = own_kits / "other"
    make_pinned_kits(other, ["a", "b", "c"])
    stranger = KitSigner(open_kit(other / "b"))
    assert "the CA of this kit has not signed" in own.find_error(
        "b", stranger.certificate, stranger.sign(CONTENT), CONTENT
    )
    wrong = dataclasses.replace(open_kit(own_kits / "a"), pins={"b": "0" * 24, "c": "0" * 24})
    assert "for a key that is not the pinned key" in KitSigner(wrong).find_error(
        "b", peer.certificate, signature, CONTENT
    )
    unpinned = dataclasses.replace(open_kit(own_kits / "a"), pins={})
    assert "is not pinned here" in KitSigner(unpinned).find_error("b", peer.certificate, signature, CONTENT)


def test_two_parties_are_refused_by_the_roster_of_the_server(tmp_path):
    kits = tmp_path / "kits"
    make_pinned_kits(kits, ["a", "b"])
    config, parties = tiny()
    error = Cluster(use_masks(config), parties[:2], kits, tmp_path).serve().error()
    assert isinstance(error, ConfigError)
    assert "data.num_clients=2" in str(error)
    assert "allow_two_parties" in str(error)
