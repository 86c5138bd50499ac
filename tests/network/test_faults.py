"""A role is killed at any moment and restarted: the run ends with the same result, and no other role restarts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from glasu.errors import AbsenceError, ConfigError, DataError, ProtocolError, TrainingError, TransportError
from glasu.network.training_party import TrainingParty
from glasu.network.training_server import TrainingServer
from glasu.protocol.requests import Evaluated, RoundDone
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.roles import Killed
from support.tiny import assert_same_end, assert_same_run, tiny
from support.toy_run import break_streams_after

CASES = {
    "full": {},
    "neighbor, labels at one party": {"sampler": "neighbor", "labels": "b"},
    "shared, labels at one party": {"sampler": "shared", "labels": "b"},
    "every second round": {"checkpoint_every": 2, "num_rounds": 5},
}


def kill_at(kind, round_index):
    """Return an observer that ends its role at one event of a certain round, once."""
    left = [1]

    def observe(event):
        if left and isinstance(event, kind) and event.round == round_index:
            left.clear()
            raise Killed

    return observe


def fail_after(error, round_index=0):
    """Return an observer that raises an error when a round is done."""

    def observe(event):
        if isinstance(event, RoundDone) and event.round == round_index:
            raise error

    return observe


def fill_disk(monkeypatch, folder, words=""):
    """Make fsync fail for every file below a folder whose name contains one of the words."""

    def fsync(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.is_relative_to(folder) and words in path.name:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.fsync", fsync)


@pytest.mark.parametrize(
    ("name", "round_index"),
    [("full", 0), ("neighbor, labels at one party", 1), ("shared, labels at one party", 0), ("every second round", 1)],
)
def test_a_party_that_dies_and_returns_changes_nothing(name, round_index, kits, tmp_path):
    config, parties = tiny(**CASES[name])
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a, c = cluster.serve(), cluster.join("a"), cluster.join("c")
    assert isinstance(cluster.join("b", observer=kill_at(RoundDone, round_index)).error(), Killed)
    b = cluster.join("b")
    reports = [role.outcome() for role in (a, b, c)]
    served, simulated = server.outcome(), simulate_with_secrets(parties, config).report
    assert_same_end(served, simulated)
    assert tuple(report["weights_sha256"][0] for report in reports) == served.weights_sha256
    assert served.traffic["bytes_to_server"] >= simulated.traffic["bytes_to_server"]
    assert any("attempt 2: all parties are connected; " in line for line in cluster.lines["a"])


@pytest.mark.parametrize(("kind", "round_index"), [(RoundDone, 0), (RoundDone, 1), (Evaluated, 2), (RoundDone, 2)])
def test_a_server_that_dies_and_returns_changes_nothing(kind, round_index, kits, tmp_path):
    config, parties = tiny(sampler="neighbor")
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(observer=kill_at(kind, round_index))
    roles = [cluster.join(name) for name in "abc"]
    assert isinstance(server.error(), Killed)
    again = cluster.serve()
    for role in roles:
        role.outcome()
    assert_same_end(again.outcome(), simulate_with_secrets(parties, config).report)


def test_parties_wait_for_their_server_while_one_of_another_run_answers(kits, tmp_path):
    """The operator started the server with another --out."""
    config, parties = tiny(num_rounds=4)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = cluster.serve(observer=kill_at(RoundDone, 1)), [cluster.join(name) for name in "abc"]
    assert isinstance(server.error(), Killed)
    elsewhere = Cluster(config, parties, kits, tmp_path / "elsewhere", cluster.port)
    wrong = elsewhere.serve(wait=5.0)
    for name in "abc":
        cluster.until(name, "it does not serve run")
    assert "Check the server's --out" in str(wrong.error())
    again = cluster.serve()
    for role in roles:
        role.outcome()
    assert_same_end(again.outcome(), simulate_with_secrets(parties, config).report)


def test_all_roles_may_die(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(observer=kill_at(RoundDone, 1))
    roles = [cluster.join(name, observer=kill_at(RoundDone, 0)) for name in "ac"]
    b = cluster.join("b")
    for role in roles:
        assert isinstance(role.error(), Killed)
    roles = [cluster.join(name) for name in "ac"]
    assert isinstance(server.error(), Killed)
    server = cluster.serve()
    for role in (*roles, b):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)


def test_streams_that_break_again_and_again_cost_no_round_and_no_message(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    broken = {name: break_streams_after([3 + index] * 4) for index, name in enumerate("abc")}
    for role in [cluster.join(name, connect=broken[name]) for name in "abc"]:
        role.outcome()
    assert_same_run(server.outcome(), simulate_with_secrets(parties, config).report)
    assert json.loads((tmp_path / "server" / "serving.json").read_text())["attempt"] == 1


def test_a_process_that_restarts_while_an_attempt_is_planned_does_not_stop_others(kits, tmp_path):
    config, parties = tiny()
    cluster, again = Cluster(config, parties, kits, tmp_path), []

    class Meanwhile(TrainingServer):
        def plan(self, present):
            if not again:
                again.append(cluster.join("b"))
                while sum("b: connected." in line for line in cluster.lines["server"]) < 2:
                    time.sleep(0.01)
            return super().plan(present)

    class Dying(TrainingParty):
        def begin(self, attempt):
            raise Killed

    server = cluster.serve(Meanwhile)
    a, b, c = cluster.join("a"), cluster.join("b", Dying), cluster.join("c")
    assert isinstance(b.error(), (Killed, ConfigError))  # replaced, or proposed an attempt first
    for role in (a, c):
        role.outcome()
    again[0].outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)


def test_a_failure_at_one_party_appears_at_every_role(kits, tmp_path):
    config, parties = tiny(num_rounds=50)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    observers = {"b": fail_after(TrainingError("the loss is inf"), 1)}
    roles = {name: cluster.join(name, observer=observers.get(name)) for name in "abc"}
    errors = {name: role.error() for name, role in roles.items()}
    assert str(errors["b"]) == "the loss is inf"
    for error in (errors["a"], errors["c"], server.error()):
        assert isinstance(error, TrainingError)
        assert "party 'b' failed: the loss is inf" in str(error)


def test_a_foreign_error_is_named_by_its_type_only(kits, tmp_path):
    config, parties = tiny(num_rounds=50)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    b, c = cluster.join("b", observer=fail_after(ValueError("salary of node 7: 12345"))), cluster.join("c")
    assert isinstance(b.error(), ValueError)
    for role in (a, c, server):
        assert "ValueError in the program" in str(role.error())
        assert "12345" not in str(role.error())


def test_an_error_in_a_partys_data_is_explained_there_only(kits, tmp_path):
    config, parties = tiny(num_rounds=50)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    error = DataError("/home/ben/nodes.csv, row 7: salary 12345 is not a number")
    b, c = cluster.join("b", observer=fail_after(error)), cluster.join("c")
    assert "12345" in str(b.error())
    assert b.error().exit_code == 2
    for role in (a, c, server):
        error = role.error()
        assert "party 'b' failed: its data or a file in its folder cannot be used" in str(error)
        assert error.exit_code == 1
        assert "12345" not in str(error)
        assert "ben" not in str(error)


def test_a_full_disk_at_a_party_is_reported_to_all_without_its_path(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=50)
    fill_disk(monkeypatch, tmp_path / "b" / "checkpoints")
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = cluster.serve(), {name: cluster.join(name) for name in "abc"}
    assert str(tmp_path) in str(roles["b"].error())
    for role in (roles["a"], roles["c"], server):
        assert "party 'b' failed: the checkpoint of round 1 cannot be written there (No space left" in str(role.error())
        assert str(tmp_path) not in str(role.error())


def test_a_full_disk_at_the_server_is_reported_to_all_without_its_path(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=1)
    fill_disk(monkeypatch, tmp_path / "server", "report.json")
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = cluster.serve(), [cluster.join(name) for name in "abc"]
    assert f"{tmp_path / 'server' / 'report.json'}: cannot be written" in str(server.error())
    for role in roles:  # every party has its results, but the run has none
        error = role.error()
        assert isinstance(error, TrainingError)
        assert "the server failed: report.json cannot be written there (No space left on device)" in str(error)
        assert str(tmp_path) not in str(error)


def test_a_full_disk_at_the_start_is_an_error_that_names_the_file(kits, tmp_path, monkeypatch):
    config, parties = tiny()
    fill_disk(monkeypatch, tmp_path)
    error = Cluster(config, parties, kits, tmp_path).serve().error()
    assert str(error).startswith(f"{tmp_path / 'server' / 'serving.json'}: cannot be written (No space left")
    error = Cluster(config, parties, kits, tmp_path, port=1).join("a").error()
    assert str(error).startswith(f"{tmp_path / 'a' / 'joining.json'}: cannot be written (No space left")


def test_a_checkpoint_that_is_missing_when_it_is_needed_ends_the_run_for_all(kits, tmp_path):
    config, parties = tiny(num_rounds=4)

    class Losing(TrainingParty):
        def begin(self, attempt):
            if attempt.round:
                for path in (tmp_path / "a" / "checkpoints").iterdir():
                    path.unlink()
            return super().begin(attempt)

    cluster = Cluster(config, parties, kits, tmp_path)
    server, a, c = cluster.serve(wait=600.0), cluster.join("a", Losing, wait=600.0), cluster.join("c", wait=600.0)
    assert isinstance(cluster.join("b", observer=kill_at(RoundDone, 1)).error(), Killed)
    b = cluster.join("b", wait=600.0)
    for role in (a, b, c, server):
        error = role.error(60)
        assert error.exit_code == 1
        assert re.search(
            r"party 'a': the checkpoint of round \d is missing.*SHA-256 [0-9a-f]{64}, found none", str(error)
        )
        assert "--fresh" in str(error)


def is_finished(folder, name):
    return json.loads((folder / name / "joining.json").read_text()).get("finished") is not None


def test_a_party_that_repeats_its_last_round_is_not_finished_meanwhile(kits, tmp_path):
    config, parties = tiny()
    states, left = [], [1]

    class Noting(TrainingParty):
        def begin(self, attempt):
            script = super().begin(attempt)
            states.append((self.party.name, self.state.value.finished))
            return script

    class DyingAtTheEnd(Noting):
        def finish(self, result):
            finished = super().finish(result)
            if left:
                left.clear()
                while not all(is_finished(tmp_path, name) for name in "ac"):
                    time.sleep(0.01)
                raise Killed
            return finished

    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    a, b, c = cluster.join("a", Noting), cluster.join("b", DyingAtTheEnd), cluster.join("c", Noting)
    assert isinstance(b.error(), Killed)
    for role in (a, cluster.join("b", DyingAtTheEnd), c):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)
    assert sorted(name for name, _ in states) == ["a", "a", "b", "b", "c", "c"]
    assert {finished for _, finished in states} == {None}


def test_an_absent_party_is_named(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(wait=3.0)
    a = cluster.join("a")
    for role in (server, a):
        error = role.error()
        assert isinstance(error, (AbsenceError, TrainingError))
        assert error.exit_code == 1  # the input was good
        assert "waited 3 s for b, c to join" in str(error)


def test_a_party_reports_a_missing_server(kits, tmp_path):
    config, parties = tiny()
    error = Cluster(config, parties, kits, tmp_path, port=1).join("a", wait=1.5).error()
    assert isinstance(error, AbsenceError)
    assert error.exit_code == 1
    assert "waited 2 s for the server at localhost:1" in str(error)
    assert "same command again" in str(error)


def refused_clone(cluster, name, out="clone"):
    error = cluster.join(name, out=out).error()
    assert isinstance(error, ConfigError)
    assert f"another process of party {name!r}" in str(error)


def test_of_two_processes_with_one_kit_one_takes_part_however_often_the_other_is_started(kits, tmp_path):
    config, parties = tiny(num_rounds=6)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: connected")
    for _ in range(3):
        refused_clone(cluster, "a")
    b = cluster.join("b")
    assert isinstance(cluster.join("c", observer=kill_at(RoundDone, 1)).error(), Killed)
    for _ in range(3):
        refused_clone(cluster, "c", "clone of c")  # nor while the party is disconnected
    for role in (a, b, cluster.join("c")):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)


def test_a_second_folder_is_refused_by_a_restarted_server_too(kits, tmp_path):
    config, parties = tiny(num_rounds=6)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(observer=kill_at(RoundDone, 1))
    roles = [cluster.join(name) for name in "abc"]
    assert isinstance(server.error(), Killed)
    server = cluster.serve()
    refused_clone(cluster, "a")
    for role in roles:
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)


def test_a_copied_folder_takes_over_and_the_first_one_does_not_come_back(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    copy = cluster.join("a", out="copy")
    error = a.error()
    assert isinstance(error, ConfigError)
    assert "has replaced it" in str(error)
    for _ in range(3):
        refused_clone(cluster, "a", "a")
    for role in (copy, cluster.join("b"), cluster.join("c")):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)


def test_a_process_that_declined_leaves_its_place_to_any_folder(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    error = cluster.join("a", expect=config.replace(train={"learning_rate": 0.25})).error()
    assert isinstance(error, ConfigError)
    cluster.until("server", "a: declines")
    for role in [cluster.join(name, out=f"other {name}") for name in "abc"]:
        role.outcome()
    server.outcome()


def test_another_run_of_the_server_is_joined_from_any_folder(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    cluster.run()
    server = cluster.serve(fresh=True)
    for role in [cluster.join(name, out=f"other {name}") for name in "abc"]:
        role.outcome()
    server.outcome()


def test_a_party_that_lost_its_folder_does_not_set_the_others_back(kits, tmp_path):
    config, parties = tiny(num_rounds=4)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a, c = cluster.serve(), cluster.join("a"), cluster.join("c")
    assert isinstance(cluster.join("b", observer=kill_at(RoundDone, 2)).error(), Killed)
    for path in (tmp_path / "b" / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    error = cluster.join("b").error()
    assert isinstance(error, ConfigError)
    assert "no intact checkpoint in common" in str(error)
    for path in tmp_path.glob("*.checkpoint"):
        path.rename(tmp_path / "b" / "checkpoints" / path.name)
    for role in (a, cluster.join("b"), c):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)


@pytest.mark.parametrize("role", ["server", "b"])
def test_a_role_whose_only_checkpoint_is_damaged_restarts_from_round_0(role, kits, tmp_path):
    config, parties = tiny(num_rounds=4)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    for ended in [cluster.join(name, observer=kill_at(RoundDone, 1)) for name in "abc"]:
        assert isinstance(ended.error(), Killed)
    cluster.end(server)
    for folder in tmp_path.glob("*/checkpoints"):
        for path in sorted(folder.iterdir())[1:]:
            path.unlink()
    (only,) = (tmp_path / role / "checkpoints").iterdir()
    assert only.name == "round-00000001.checkpoint"
    only.write_bytes(only.read_bytes()[:-1])
    cluster.lines["server"].clear()
    server = cluster.serve()
    for again in [cluster.join(name) for name in "abc"]:
        again.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)
    assert any("not used: " in line for line in cluster.lines[role])
    assert any("all parties are connected; starting with the first round." in line for line in cluster.lines["server"])


def test_fresh_starts_another_run_and_lists_what_it_removes(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(observer=kill_at(RoundDone, 1))
    roles = [cluster.join(name, wait=3.0) for name in "abc"]
    for role in (server, *roles):
        assert isinstance(role.error(), (Killed, TransportError))
    other = config.replace(train={"seed": 5})
    error = cluster.serve(config=other).error()
    assert isinstance(error, ConfigError)
    assert "train.seed = 0 there, 5 here" in str(error)
    server = cluster.serve(config=other, fresh=True)
    assert "Check the server's --out" in str(cluster.join("a").error())
    assert not any("starting over" in line for line in cluster.lines["server"])  # not before all parties are connected
    for role in [cluster.join(name, fresh=True) for name in "abc"]:
        role.outcome()
    assert any("starting over: removed" in line for line in cluster.lines["server"])
    assert_same_end(server.outcome(), simulate_with_secrets(parties, other).report)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the end"])
def test_a_party_that_dies_when_its_results_are_written_is_finished_after_its_return(late, kits, tmp_path):
    config, parties = tiny()
    cluster, left = Cluster(config, parties, kits, tmp_path), [1]

    class DyingAtTheEnd(TrainingParty):
        def close(self, *, finished):
            super().close(finished=finished and not left)
            if left:
                left.clear()
                raise Killed

    class Dying(TrainingParty):
        def finish(self, result):
            finished = super().finish(result)
            if left:
                left.clear()
                raise Killed
            return finished

    server = cluster.serve()
    a, b, c = cluster.join("a"), cluster.join("b", DyingAtTheEnd if late else Dying), cluster.join("c")
    assert isinstance(b.error(), Killed)
    again = cluster.join("b", wait=5.0)
    for role in (a, c):
        role.outcome()
    served = server.outcome()
    assert_same_end(served, simulate_with_secrets(parties, config).report)
    report = again.outcome()  # whether or not the server knew that the party had finished
    assert report["weights_sha256"][0] == served.weights_sha256[1]


def restart(cluster, name):
    """Start another process of a party, and return when the server has admitted it."""
    line, lines = f"{name}: connected.", cluster.lines["server"]
    before = lines.count(line)
    role = cluster.join(name)
    while lines.count(line) == before and role.is_alive():
        time.sleep(0.01)
    return role


@pytest.mark.parametrize("when", ["before the results are collected", "while the report is written", "closed"])
def test_a_party_that_restarts_at_the_end_gets_its_result_and_the_run_is_finished(when, kits, tmp_path):
    config, parties = tiny()
    cluster, again = Cluster(config, parties, kits, tmp_path), []

    class Meanwhile(TrainingServer):
        def plan(self, present):
            attempt, script = super().plan(present)
            return attempt, self.run_script(script)

        def run_script(self, script):
            yield from script
            self.restart("before the results are collected")

        def finish(self, result, finished):
            self.restart("while the report is written")
            report = super().finish(result, finished)
            self.restart("closed")
            return report

        def restart(self, moment):
            if moment == when and not again:
                while not is_finished(tmp_path, "b"):
                    time.sleep(0.01)
                again.append(restart(cluster, "b"))

    server = cluster.serve(Meanwhile)
    a, b, c = (cluster.join(name) for name in "abc")
    assert "has replaced it" in str(b.error())
    served = server.outcome()
    assert_same_end(served, simulate_with_secrets(parties, config).report)
    reports = [role.outcome() for role in (a, again[0], c)]
    assert [report["weights_sha256"][0] for report in reports] == list(served.weights_sha256)
    attempts = json.loads((tmp_path / "server" / "serving.json").read_text())["attempt"]
    assert attempts == (2 if when == "before the results are collected" else 1)


@pytest.mark.parametrize("policy", ["abort", "wait"])
def test_a_malformed_result_is_that_of_its_party(policy, kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)

    class Malformed(TrainingParty):
        def finish(self, result):
            return dataclasses.replace(super().finish(result), weights_sha256=7)

    server = cluster.serve(on_invalid_message=policy)
    a, b, c = cluster.join("a"), cluster.join("b", Malformed), cluster.join("c")
    assert "control message 'PartyResult': payload.weights_sha256=7" in str(b.error())
    if policy == "abort":
        assert isinstance(server.error(), ProtocolError)
        assert server.error().party == "b"
        for role in (a, c):
            assert "control message 'PartyResult': payload.weights_sha256=7" in str(role.error())
        return
    roles = [a, cluster.join("b"), c]
    for role in roles:
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)


def test_commands_given_again_after_the_end_do_nothing(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    served, reports = cluster.run()
    before = {path: path.read_bytes() for path in tmp_path.rglob("report.json")}
    assert len(before) == 4
    assert cluster.join("a").outcome() == reports["a"]

    class Brief(TrainingServer):
        goodbye_seconds = 0.5

    assert cluster.serve(Brief).outcome() is None
    assert {path: path.read_bytes() for path in tmp_path.rglob("report.json")} == before
    assert not list(tmp_path.rglob("*.checkpoint"))
    assert served.to_dict()["weights_sha256"] == [report["weights_sha256"][0] for report in reports.values()]
