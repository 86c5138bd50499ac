"""A race over gRPC is the race in one process, and its model predicts afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.races import CASES, race
from support.tiny import assert_same_run


@pytest.mark.parametrize("name", [*CASES, "the preferred one diverges", "another one diverges"])
@pytest.mark.parametrize("keys", [{}, {"sampler": "neighbor", "fanout": 2, "batch_size": 6, "labels": "b"}], ids=str)
def test_a_race_over_the_network_is_the_race_in_one_process(name, keys, kits, tmp_path):
    config, parties = race(name, **keys)
    served, reports = Cluster(config, parties, kits, tmp_path).run()
    simulated = simulate_with_secrets(parties, config).report
    assert_same_run(served, simulated)
    assert served.race == simulated.race
    chosen = {report["config"]["train"]["learning_rate"] for report in reports.values()}
    assert chosen == {simulated.config.train.learning_rate}


def test_a_race_in_which_all_candidates_diverge_ends_the_run_for_all_roles(kits, tmp_path):
    config, parties = race("all diverge")
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    roles = [server, *(cluster.join(party.name) for party in parties)]
    for role in roles:
        error = role.error()
        assert "all candidates of train.preset" in str(error)
        assert error.exit_code == 1


def test_a_model_that_a_race_chose_predicts_between_machines(kits, tmp_path):
    config, parties = race("another one wins")
    cluster = Cluster(config, parties, kits, tmp_path)
    cluster.run()
    nodes = np.array([3, 1, 40])
    _, predicted = cluster.predict(b=nodes)
    expected = TrainedModel.of(simulate_with_secrets(parties, config).clients).predict_proba(parties, nodes)
    np.testing.assert_array_equal(predicted["b"].scores, expected)
