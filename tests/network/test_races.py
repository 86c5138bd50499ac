"""A race over gRPC is the race in one process, and its model predicts afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from glasu.errors import ConfigError
from glasu.network.compatibility import compare_with_agreed
from glasu.protocol.requests import CandidateStarted, RoundDone
from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.races import CASES, DIVERGING, GOOD, find_candidate, race
from support.tiny import assert_same_end, assert_same_run

OWNER = {"sampler": "neighbor", "fanout": 2, "batch_size": 6, "labels": "b"}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("another one wins", {}),
        ("the preferred one diverges", OWNER),
        ("another one wins", {"feedback": True}),  # the rules choose
        *(
            pytest.param(name, keys, marks=pytest.mark.slow)
            for name, keys in [
                *((name, {}) for name in [*CASES, *DIVERGING] if name not in ("another one wins", "all diverge")),
                ("the second of three wins", OWNER),
            ]
        ),
    ],
    ids=str,
)
def test_a_race_over_the_network_is_the_race_in_one_process(name, keys, kits, tmp_path):
    config, parties = race(name, **keys)
    cluster = Cluster(config, parties, kits, tmp_path)
    served, reports = cluster.run()
    simulated = simulate_with_secrets(parties, config).report
    assert_same_run(served, simulated)
    # Signed keys are longer over the network, and the parties agree on keys before a race with a warm start.
    longer = served.traffic.total_bytes - simulated.traffic.total_bytes
    assert served.race == replace(simulated.race, bytes=simulated.race.bytes + longer, releases=None)
    for party, report in reports.items():
        own = report["race"]
        assert own["releases"] == {party: simulated.race.releases[party]}
        assert 0 < own["bytes"] < served.race.bytes
        assert own["exchanges"] == served.race.exchanges
        assert [each["chosen"] for each in own["candidates"]] == [each.chosen for each in served.race.candidates]
        (line,) = [line for line in cluster.lines[party] if "the preset chose" in line]
        assert f" and {own['releases'][party]} releases so far." in line
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


def test_the_expected_settings_may_leave_the_same_keys_to_the_preset(kits, tmp_path):
    config, parties = race("another one wins")
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    for role in [cluster.join(party.name, expect=config) for party in parties]:
        role.outcome()
    server.outcome()
    assert cluster.join("a", expect=config).outcome()["party"] == "a"  # it is finished, with one of the candidates
    with pytest.raises(ConfigError, match="holds a finished run whose settings differ"):
        cluster.join("a", expect=config.replace(train={"learning_rate": 0.25})).outcome()


def test_a_key_that_one_side_sets_and_the_other_leaves_to_the_preset_is_a_difference():
    config, _ = race("another one wins")
    fixed = config.replace(train={"learning_rate": GOOD})
    assert not compare_with_agreed("a", config, config)
    for agreed, server in ((fixed, config), (config, fixed)):
        names = [each.name for each in compare_with_agreed("a", agreed, server)]
        assert any("train.preset" in name or name == "train.learning_rate" for name in names)
    others = find_candidate(config, GOOD)  # every key as the winner has it, without a preset to decide
    assert compare_with_agreed("a", others, config)


def test_a_run_that_continues_in_a_race_names_the_candidate_in_all_logs(kits, tmp_path):
    config, parties = race("another one wins")
    cluster, started = Cluster(config, parties, kits, tmp_path), []

    def stop(event: object) -> None:
        started.append(isinstance(event, CandidateStarted))
        if sum(started) == 2 and isinstance(event, RoundDone) and event.round == 2:
            cluster.serving[-1].stop("enough")

    for role in (cluster.serve(observer=stop), *(cluster.join(party.name) for party in parties)):
        assert "enough" in str(role.error())
    cluster.lines.clear()
    served, _ = cluster.run()
    assert_same_end(served, simulate_with_secrets(parties, config).report)
    starts = {
        name: [line for line in lines if "are connected; continuing" in line] for name, lines in cluster.lines.items()
    }
    assert starts.keys() == {"server", "a", "b", "c"}
    for name, lines in starts.items():
        assert lines, name
        assert lines[0].endswith(" of candidate 2 of 2 in the race."), lines
    assert any(line.startswith("resuming after round") and "in the race" in line for line in cluster.lines["server"])


def test_a_model_that_a_race_chose_predicts_between_machines(kits, tmp_path):
    config, parties = race("another one wins")
    cluster = Cluster(config, parties, kits, tmp_path)
    cluster.run()
    nodes = np.array([3, 1, 40])
    _, predicted = cluster.predict(b=nodes)
    expected = TrainedModel.of(simulate_with_secrets(parties, config).clients).predict_proba(parties, nodes)
    np.testing.assert_array_equal(predicted["b"].scores, expected)
