"""Encryption over gRPC: the bits of one process, resume, prediction, and parties without TenSEAL."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from glasu.ckks_parameters import CKKS
from glasu.errors import ConfigError, ProtocolError
from glasu.network.join import PartyPerformer
from glasu.network.training_party import TrainingParty
from glasu.protocol.messages import Partial
from glasu.protocol.requests import RoundDone, Send
from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster, list_weights
from support.kits import simulate_with_secrets
from support.masks import use_encryption, use_masks
from support.processes import SMALL_RUN, Processes
from support.roles import Killed
from support.tiny import tiny

ONCE = {"release": "once", "aggregation_layers": (1,), "dp_noise_multiplier": 1.0}


@pytest.mark.parametrize(
    "keys",
    [{"warm_start": 3}, {"labels": "b", "backward": "joint", "precision": "int8", "chunk_rows": 5}, ONCE],
    ids=str,
)
def test_the_run_over_the_network_is_the_run_in_one_process_and_that_of_masks(keys, pinned_kits, tmp_path):
    config, parties = tiny(num_rounds=2, **keys)
    served, reports = Cluster(use_encryption(config), parties, pinned_kits, tmp_path).run()
    simulated = simulate_with_secrets(parties, use_encryption(config)).report
    assert list_weights(reports) == simulated.weights_sha256
    assert list_weights(reports) == simulate_with_secrets(parties, use_masks(config)).report.weights_sha256
    found, expected = (dict(each.traffic.by_kind) for each in (served, simulated))
    assert found.pop("keys") > expected.pop("keys")  # offers with certificates are longer
    assert found == expected
    assert served.test.metrics == {}
    for own in reports.values():
        assert own["privacy"]["secure_aggregation"] == "ckks"
        assert own["privacy"]["masks"]["signatures"] == "signed, by pinned keys"


@pytest.mark.parametrize("keys", [{"labels": "b", "precision": "int8"}, ONCE], ids=str)
def test_a_party_that_is_killed_comes_back_with_new_keys_and_the_bits_are_the_same(keys, pinned_kits, tmp_path):
    config, parties = tiny(num_rounds=4, **keys)

    class Dying(TrainingParty):
        def observe(self, event):
            super().observe(event)
            done = isinstance(event, RoundDone) and event.round == 2
            if done and bool(self.client.progress.lower) == ("release" in keys):  # in the upper stage, if there is one
                raise Killed

    cluster = Cluster(use_encryption(config), parties, pinned_kits, tmp_path)
    server = cluster.serve()
    others = [cluster.join(name) for name in "bc"]
    assert isinstance(cluster.join("a", role=Dying).error(), Killed)  # the party that makes the key
    reports = {
        "a": cluster.join("a").outcome(),
        **{name: role.outcome() for name, role in zip("bc", others, strict=True)},
    }
    simulated = simulate_with_secrets(parties, use_masks(config)).report
    server.outcome()
    assert list_weights(reports) == simulated.weights_sha256


@pytest.mark.slow  # the roles of test_a_party_that_is_killed_comes_back are threads of one process
def test_a_party_and_the_server_are_killed_with_sigkill_and_started_again(pinned_kits, tmp_path):
    settings = SMALL_RUN.format(rounds=40).replace('"neighbor"', '"shared"')
    roles = Processes(tmp_path, pinned_kits, settings + '[privacy]\nsecure_aggregation = "ckks"\n')
    try:
        report = roles.run_with_kills("a")
    finally:
        roles.stop()
    simulated = simulate_with_secrets(roles.parties, roles.config).report
    assert report["weights_sha256"] == list(simulated.weights_sha256)


@pytest.mark.parametrize("keys", [{}, {"labels": "b"}], ids=str)
def test_prediction_agrees_on_a_key_again_and_gives_the_scores_of_one_process(keys, pinned_kits, tmp_path):
    config, parties = tiny(num_rounds=2, **keys)
    cluster = Cluster(use_encryption(config), parties, pinned_kits, tmp_path)
    cluster.run()
    model, nodes = (
        TrainedModel.of(simulate_with_secrets(parties, use_encryption(config)).clients),
        np.array([3, 11, 20]),
    )
    _, found = cluster.predict(b=nodes)
    np.testing.assert_array_equal(found["b"].scores, model.scores(parties, nodes))
    assert found["a"].scores.size == 0


def test_requests_of_different_nodes_are_refused_because_ciphertexts_cannot_be_divided(pinned_kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(use_encryption(config), parties, pinned_kits, tmp_path)
    cluster.run()
    _, found = cluster.predict(a=[1, 2], c=[1, 2])
    np.testing.assert_array_equal(found["a"].scores, found["c"].scores)
    cluster.port = 0
    server = cluster.serve_prediction()
    roles = [cluster.predict_with(name, nodes) for name, nodes in (("a", [1, 2]), ("b", [2, 3]), ("c", []))]
    assert "parties a, b requested different nodes. After training with ckks" in str(server.error())
    for role in roles:
        assert role.error() is not None


class Damaging(PartyPerformer):
    """A party that sends a ciphertext with a coefficient that is too large."""

    def __call__(self, request):
        if isinstance(request, Send) and isinstance(request.message, Partial):
            value = request.message.value.copy()
            value[0, -1] = CKKS.modulus
            request = Send(dataclasses.replace(request.message, value=value))
        return super().__call__(request)


def test_a_malformed_ciphertext_stops_the_run_with_a_line_about_its_sender(pinned_kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(use_encryption(config), parties, pinned_kits, tmp_path)
    server = cluster.serve()
    roles = [cluster.join("a"), cluster.join("b", performer=Damaging), cluster.join("c")]
    error = server.error()
    assert isinstance(error, ProtocolError)
    assert "party 'b'" in str(error)
    assert "a coefficient of a ciphertext is not below the modulus" in str(error)
    for role in roles:
        assert role.error() is not None


def test_trial_kits_are_refused(kits, tmp_path):
    config, parties = tiny()
    error = Cluster(use_encryption(config), parties, kits, tmp_path).serve().error()
    assert isinstance(error, ConfigError)
    assert 'privacy.secure_aggregation="ckks", server: this is a trial kit' in str(error)
