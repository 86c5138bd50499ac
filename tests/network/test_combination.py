"""Parties that train alone and predict together, over gRPC: the bits and bytes of one process, and resume."""

from __future__ import annotations

import numpy as np
import pytest

from glasu.errors import ConfigError
from glasu.network.training_party import TrainingParty
from glasu.protocol.requests import RoundDone
from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.roles import Killed
from support.tiny import assert_same_end, assert_same_run, tiny

RUNS = [
    {"method": "ensemble"},
    {"method": "ensemble", "sampler": "neighbor", "num_layers": 1, "aggregation_layers": ()},
    {"method": "smooth"},
    {"method": "smooth", "labels": "b"},
    {"method": "smooth", "labels": "b", "num_layers": 1, "aggregation_layers": (), "sampler": "shared"},
]


@pytest.mark.parametrize("keys", RUNS, ids=str)
def test_the_run_over_the_network_is_the_run_in_one_process(keys, kits, tmp_path):
    config, parties = tiny(**keys)
    served, reports = Cluster(config, parties, kits, tmp_path).run()
    simulated = simulate_with_secrets(parties, config).report
    assert_same_run(served, simulated)
    assert set(served.traffic.by_phase) == {"evaluation"}
    for key in ("bytes_to_server", "bytes_to_clients", "messages"):
        assert sum(report["traffic"][key] for report in reports.values()) == served.traffic[key]
    for name, report in reports.items():
        assert report["test"].get("accuracy") == (simulated.test.accuracy if keys.get("labels", name) == name else None)


def test_the_server_applies_what_the_method_prescribes(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    config = config.replace(train={"method": "ensemble"})
    assert config.model.aggregation_layers == (1, 3)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    for role in [cluster.join(name, expect=config) for name in "abc"]:
        role.outcome()
    served = server.outcome()
    assert served.config.model.aggregation_layers == ()
    assert served.overridden["model.aggregation_layers"] == {"requested": (1, 3), "used": ()}


def test_standalone_is_refused_over_the_network(kits, tmp_path):
    config, parties = tiny(method="standalone")
    error = Cluster(config, parties, kits, tmp_path).serve().error()
    assert isinstance(error, ConfigError)
    assert "It cannot run over the network" in str(error)


@pytest.mark.parametrize("keys", RUNS[:4:2] + RUNS[3:4], ids=str)
def test_prediction_is_that_of_one_process(keys, kits, tmp_path):
    config, parties = tiny(**keys)
    cluster = Cluster(config, parties, kits, tmp_path)
    cluster.run()
    cluster.port = 0
    model, nodes = TrainedModel.of(simulate_with_secrets(parties, config).clients), np.array([3, 11, 20])
    _, found = cluster.predict(b=nodes)
    assert np.array_equal(found["b"].scores, model.predict_proba(parties, nodes))
    assert len(found["a"].scores) == len(found["c"].scores) == 0


@pytest.mark.parametrize("keys", [RUNS[0], RUNS[3]], ids=str)
@pytest.mark.parametrize("when", [1, 5])
def test_a_killed_party_resumes_its_own_training_and_the_result_is_the_same(keys, when, kits, tmp_path):
    config, parties = tiny(num_rounds=6, evaluate_every=1, **keys)

    class Dying(TrainingParty):
        def observe(self, event):
            super().observe(event)
            if isinstance(event, RoundDone) and event.round == when:
                raise Killed

    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    others = [cluster.join(name) for name in "ac"]
    assert isinstance(cluster.join("b", role=Dying).error(), Killed)
    assert (tmp_path / "b" / "checkpoints" / "alone").is_dir()
    rounds: list[int] = []
    again = cluster.join("b", observer=lambda event: isinstance(event, RoundDone) and rounds.append(event.round))
    for role in (*others, again):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)
    assert rounds == list(range(when + 1, 6))  # the rounds before were not repeated
    assert not list((tmp_path / "b").rglob("*.checkpoint"))
