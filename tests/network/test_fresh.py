"""--fresh removes the old run only when the new one can begin."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

import pytest

from glasu.errors import AbsenceError, ConfigError
from glasu.network.training_server import TrainingServer
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.roles import Killed
from support.tiny import assert_same_end, tiny


def read_kept_files(cluster, name=""):
    """Return the content of the folders, or of one, without the number of starts."""
    files = {path: path.read_bytes() for path in (cluster.folder / name).rglob("*") if path.is_file()}
    for path in files:
        if path.name == "joining.json":
            told = json.loads(files[path])
            files[path] = {name: told[name] for name in told if name not in ("incarnation", "starts", "admitted")}
    return files


@pytest.fixture
def occupied_port():
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        yield occupied.getsockname()[1]


def test_a_server_that_cannot_listen_removes_nothing(stopped_cluster, occupied_port):
    before, stopped_cluster.port = read_kept_files(stopped_cluster), occupied_port
    error = stopped_cluster.serve(fresh=True).error()
    assert isinstance(error, ConfigError)
    assert "cannot be used" in str(error)
    assert read_kept_files(stopped_cluster) == before
    stopped_cluster.port = 0
    report, _ = stopped_cluster.run()
    assert_same_end(report, simulate_with_secrets(stopped_cluster.parties, stopped_cluster.config).report)
    for name in ("server", *"abc"):  # a restarted role logs the round from which it continues too
        lines = stopped_cluster.lines[name]
        assert any("all parties are connected; continuing after round 3." in line for line in lines), name


def test_a_server_that_starts_over_without_all_parties_removes_nothing(stopped_cluster):
    before = read_kept_files(stopped_cluster)
    server, a = stopped_cluster.serve(fresh=True, wait=3.0), stopped_cluster.join("a", fresh=True)
    assert isinstance(server.error(), AbsenceError)
    assert "waited 3 s for" in str(a.error())
    assert read_kept_files(stopped_cluster) == before
    report, _ = stopped_cluster.run()
    assert_same_end(report, simulate_with_secrets(stopped_cluster.parties, stopped_cluster.config).report)


def test_parties_that_start_over_stay_if_their_server_starts_over_again(stopped_cluster):
    class Dying(TrainingServer):
        def plan(self, present):
            raise Killed

    server, roles = stopped_cluster.serve(Dying, fresh=True), [stopped_cluster.join(name, fresh=True) for name in "abc"]
    assert isinstance(server.error(), Killed)
    server = stopped_cluster.serve(fresh=True)
    for role in roles:
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(stopped_cluster.parties, stopped_cluster.config).report)


def test_a_party_that_reaches_no_server_removes_nothing(stopped_cluster):
    before, stopped_cluster.port = read_kept_files(stopped_cluster), 1
    error = stopped_cluster.join("a", fresh=True, wait=0.5).error()
    assert isinstance(error, AbsenceError)
    assert read_kept_files(stopped_cluster) == before


def test_a_party_that_wants_to_start_over_alone_is_refused_and_keeps_everything(stopped_cluster):
    server = stopped_cluster.serve()
    before = read_kept_files(stopped_cluster)
    error = stopped_cluster.join("a", fresh=True).error()
    assert isinstance(error, ConfigError)
    assert "start the server with --fresh as well" in str(error)
    assert read_kept_files(stopped_cluster) == before
    for role in [stopped_cluster.join(name) for name in "abc"]:
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(stopped_cluster.parties, stopped_cluster.config).report)


def test_a_party_whose_data_does_not_fit_removes_nothing_when_all_start_over(stopped_cluster):
    stopped_cluster.lines.clear()
    server, b = stopped_cluster.serve(fresh=True), stopped_cluster.join("b", fresh=True)
    stopped_cluster.until("server", "b: prepared")
    before = read_kept_files(stopped_cluster, "a")
    splits = replace(stopped_cluster.parties[0].splits, test=stopped_cluster.parties[0].splits.test[:-1])
    other = replace(stopped_cluster.parties[0], splits=splits)  # found only during preparation
    error = stopped_cluster.join("a", fresh=True, party=other).error()
    assert isinstance(error, ConfigError)
    assert "splits" in str(error)
    assert read_kept_files(stopped_cluster, "a") == before
    for role in (stopped_cluster.join("a", fresh=True), b, stopped_cluster.join("c", fresh=True)):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(stopped_cluster.parties, stopped_cluster.config).report)
    for name in ("server", *"abc"):
        assert any("starting over: removed" in line for line in stopped_cluster.lines[name]), name


def test_a_model_predicts_after_a_restart_with_fresh_that_no_party_joined(kits, tmp_path):
    config, parties = tiny(num_rounds=2)
    cluster = Cluster(config, parties, kits, tmp_path)
    cluster.run()
    cluster.port = 1
    assert isinstance(cluster.join("b", fresh=True, wait=0.5).error(), AbsenceError)
    cluster.port = 0
    assert isinstance(cluster.serve(fresh=True, wait=0.5).error(), AbsenceError)  # nor any party
    _, found = cluster.predict(b=[20, 3])
    assert len(found["b"].nodes) == 2


def test_a_failed_start_does_not_fix_the_settings_of_any_party(kits, tmp_path, occupied_port):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path, port=occupied_port)
    assert "cannot be used" in str(cluster.serve(config=config.replace(train={"seed": 5})).error())
    cluster.port = 0
    served, _ = cluster.run()
    assert_same_end(served, simulate_with_secrets(parties, config).report)


def test_a_server_to_which_no_party_came_may_have_other_settings(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    assert isinstance(cluster.serve(config=config.replace(train={"seed": 5}), wait=0.2).error(), AbsenceError)
    cluster.port = 0
    served, _ = cluster.run()
    assert_same_end(served, simulate_with_secrets(parties, config).report)


def test_a_party_that_came_holds_the_server_to_its_settings(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    cluster.end(server, a)
    error = cluster.serve(config=config.replace(train={"seed": 5})).error()
    assert isinstance(error, ConfigError)
    assert "train.seed = 0 there, 5 here" in str(error)
