"""One release over gRPC: the bits of one process, resume in both stages, and predictions."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from glasu.config import describe_profile
from glasu.errors import ConfigError
from glasu.network.training_party import TrainingParty
from glasu.pki.secret_file import SECRET
from glasu.protocol.requests import RoundDone
from glasu.runtime.ledger_file import LEDGER
from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster, list_weights
from support.kits import secrets_of, simulate_with_secrets, write_secret
from support.roles import Killed
from support.tiny import simulate, tiny

ONCE = {"release": "once", "aggregation_layers": (1,)}
RUNS = [ONCE, {**ONCE, "aggregation": "concat", "dp_noise_multiplier": 1.0, "label_epsilon": 2.0}]
ROUNDS = {"aggregation_layers": (3,), "dp_noise_multiplier": 1.0, "sampler": "shared"}


def assert_same(served, reports, simulated):
    """Compare a served run with the simulation; only the parties hold scores."""
    assert list_weights(reports) == simulated.weights_sha256
    no_digests = ("", "", "")  # with noise, the server gets none
    assert served.weights_sha256 == (no_digests if served.config.privacy.adds_noise else simulated.weights_sha256)
    assert served.test.metrics == {}
    for report in reports.values():
        assert report["test"]["accuracy"] == simulated.test.accuracy


@pytest.mark.parametrize("keys", [*RUNS, ROUNDS], ids=str)
def test_the_run_over_the_network_is_the_run_in_one_process(keys, kits, tmp_path):
    config, parties = tiny(**keys)
    served, reports = Cluster(config, parties, kits, tmp_path).run()
    simulated = simulate_with_secrets(parties, config).report
    assert_same(served, reports, simulated)
    assert served.traffic == simulated.traffic
    assert "the parties have the scores" in served.summary()
    if "dp_noise_multiplier" in keys:
        worst = simulated.privacy.differential_privacy.spent.epsilon_zeroed
        found = [report["privacy"]["differential_privacy"] for report in reports.values()]
        assert max(each["epsilon_zeroed"] for each in found) == worst
        assert all(each["holds"] for each in found)


def test_server_and_parties_log_the_settings_of_the_profile_in_full(pinned_kits, tmp_path):
    config, parties = tiny(profile="dp", aggregation_layers=(1,), target_epsilon=16.0)
    cluster = Cluster(config, parties, pinned_kits, tmp_path)
    cluster.run()
    line = f"{describe_profile(config)}."
    assert "privacy.dp_noise_multiplier = 1.0" in line
    assert [lines.count(line) for lines in cluster.lines.values()] == [1, 1, 1, 1]


def test_an_epsilon_of_noise_from_the_public_seed_does_not_hold():
    config, parties = tiny(**RUNS[1])
    found = simulate(parties, config).report.privacy.differential_privacy
    assert not found.holds
    assert "It does not hold in this run: the noise is derived from train.seed." in str(found)


@pytest.mark.parametrize("keys", RUNS, ids=str)
def test_prediction_is_that_of_one_process(keys, kits, tmp_path):
    config, parties = tiny(**keys)
    cluster = Cluster(config, parties, kits, tmp_path)
    cluster.run()
    cluster.port = 0
    nodes = np.array([3, 11, 20])
    _, found = cluster.predict(b=nodes)
    assert found["b"].scores.shape == (3, 3)
    if "dp_noise_multiplier" not in keys:  # a model in one process has no secrets, so its noise is another
        model = TrainedModel.of(simulate_with_secrets(parties, config).clients)
        assert np.array_equal(found["b"].scores, model.predict_proba(parties, nodes))


@pytest.mark.parametrize("keys", [*RUNS, {}], ids=str)
@pytest.mark.parametrize("state", ["missing", "changed"])
def test_a_missing_or_changed_secret_is_refused_in_a_prediction(keys, state, train_once, tmp_path):
    cluster, _ = train_once(**keys)
    cluster.kits = Path(shutil.copytree(cluster.kits, tmp_path / "kits"))
    ledger = (tmp_path / "b" / LEDGER).read_bytes()
    file = cluster.kits / "b" / SECRET
    if state == "missing":
        file.unlink()
    else:
        write_secret(cluster.kits / "b", bytes(32))
    error = cluster.predict_with("b", [3]).error()
    said = {"missing": "is missing", "changed": "has changed since the training"}[state]
    assert isinstance(error, ConfigError)  # exit code 2
    assert str(error) == f"{file}: {said}; restore the file that this training used, or train again."
    assert str(tmp_path) not in error.public_message
    assert file.exists() == (state == "changed")  # it is not made again
    assert (tmp_path / "b" / LEDGER).read_bytes() == ledger

    write_secret(cluster.kits / "b", secrets_of("b")["b"])
    _, found = cluster.predict(b=np.array([3, 11]))
    assert found["b"].scores.shape == (2, 3)


@pytest.mark.parametrize("keys", RUNS, ids=str)
@pytest.mark.parametrize("stage", ["lower", "upper"])
def test_a_party_killed_in_either_stage_resumes_and_the_result_is_the_same(keys, stage, kits, tmp_path):
    config, parties = tiny(num_rounds=4, evaluate_every=1, **keys)

    class Dying(TrainingParty):
        def observe(self, event):
            super().observe(event)
            is_upper = bool(self.client.progress.lower)
            if isinstance(event, RoundDone) and event.round == 2 and is_upper == (stage == "upper"):
                raise Killed

    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    others = {name: cluster.join(name) for name in "ac"}
    assert isinstance(cluster.join("b", role=Dying).error(), Killed)
    rounds: list[int] = []
    again = cluster.join("b", observer=lambda event: isinstance(event, RoundDone) and rounds.append(event.round))
    reports = {name: role.outcome() for name, role in {**others, "b": again}.items()}
    assert_same(server.outcome(), reports, simulate_with_secrets(parties, config).report)
    assert rounds == ([3] if stage == "upper" else [3, 0, 1, 2, 3])  # the rounds before were not repeated
