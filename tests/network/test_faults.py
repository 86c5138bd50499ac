"""Whoever dies, whenever: started again, the run ends as if nothing had happened, and nobody else is restarted."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

from glasu.errors import AbsenceError, ConfigError, DataError, TrainingError, TransportError
from glasu.network import client_session as sessions
from glasu.network import join as joining
from glasu.network import serve as serving
from glasu.network import transport as streams
from glasu.pki.kit import open_kit
from glasu.protocol.requests import Evaluated, RoundDone
from glasu.runtime import checkpointing as checkpoints
from glasu.runtime.simulation import simulate
from network.test_runs import tiny
from support.cluster import Cluster, Killed, SeenHub

CASES = {
    "full": {},
    "neighbor, labels at one party": {"sampler": "neighbor", "labels": "b"},
    "shared, labels at one party": {"sampler": "shared", "labels": "b"},
    "every second round": {"checkpoint_every": 2, "num_rounds": 5},
}


def killing(kind, round_index):
    """Return an observer that ends its role at one event of a certain round, once."""
    left = [1]

    def observe(event):
        if left and isinstance(event, kind) and event.round == round_index:
            left.clear()
            raise Killed

    return observe


def same_end(served, simulated):
    assert served.weights_sha256 == simulated.weights_sha256
    assert served.losses == simulated.losses
    assert (served.test, served.validation) == (simulated.test, simulated.validation)
    kept = ("round", "loss", "val_accuracy", "val_macro_f1", "val_loss")
    got, expected = ([{key: entry[key] for key in kept} for entry in run.history] for run in (served, simulated))
    assert got == expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("round_index", [0, 1])
def test_a_party_that_dies_and_returns_changes_nothing(name, round_index, kits, tmp_path):
    config, parties = tiny(**CASES[name])
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a, c = cluster.serve(), cluster.join("a"), cluster.join("c")
    assert isinstance(cluster.join("b", observe=killing(RoundDone, round_index)).error(), Killed)
    b = cluster.join("b")
    reports = [role.outcome() for role in (a, b, c)]
    served, simulated = server.outcome(), simulate(parties, config).report
    same_end(served, simulated)
    assert tuple(report["weights_sha256"][0] for report in reports) == served.weights_sha256
    assert served.traffic["bytes_to_server"] >= simulated.traffic["bytes_to_server"]
    assert any("b: connected (start 2)" in line for line in cluster.lines["server"])
    assert any("going on after round" in line for line in cluster.lines["a"])


@pytest.mark.parametrize(("kind", "round_index"), [(RoundDone, 0), (RoundDone, 1), (Evaluated, 2), (RoundDone, 2)])
def test_a_server_that_dies_and_returns_changes_nothing(kind, round_index, kits, tmp_path):
    config, parties = tiny(sampler="neighbor")
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(observe=killing(kind, round_index))
    roles = [cluster.join(name) for name in "abc"]
    assert isinstance(server.error(), Killed)
    again = cluster.serve()
    for role in roles:
        role.outcome()
    same_end(again.outcome(), simulate(parties, config).report)


def test_parties_wait_for_their_server_where_one_of_another_run_answers(kits, tmp_path):
    """As when the server's command is given with another --out."""
    config, parties = tiny(num_rounds=4)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = cluster.serve(observe=killing(RoundDone, 1)), [cluster.join(name) for name in "abc"]
    assert isinstance(server.error(), Killed)
    elsewhere = Cluster(config, parties, kits, tmp_path / "elsewhere", cluster.port)
    wrong = elsewhere.serve(wait=8.0)
    for name in "abc":
        cluster.until(name, "it serves another run than")
    assert "Is the server's --out the right one?" in str(wrong.error())
    again = cluster.serve()
    for role in roles:
        role.outcome()
    same_end(again.outcome(), simulate(parties, config).report)


def test_all_may_die(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(observe=killing(RoundDone, 1))
    roles = [cluster.join(name, observe=killing(RoundDone, 0)) for name in "ac"]
    b = cluster.join("b")
    for role in roles:
        assert isinstance(role.error(), Killed)
    roles = [cluster.join(name) for name in "ac"]
    assert isinstance(server.error(), Killed)
    server = cluster.serve()
    for role in (*roles, b):
        role.outcome()
    same_end(server.outcome(), simulate(parties, config).report)


def test_a_stream_that_breaks_costs_no_round(kits, tmp_path, monkeypatch):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    sent, answered = sessions.Session._send_message, sessions.Session._answer
    broken = {"after sending": 0, "before an answer": 0}

    def break_after_sending(self, content):
        sent(self, content)
        if self.kit.name == "b" and broken["after sending"] < 3:
            broken["after sending"] += 1
            self._line.close()

    def break_before_an_answer(self, message, together):
        if self.kit.name == "c" and broken["before an answer"] < 3:
            broken["before an answer"] += 1
            self._line.close()  # the answer is lost
        else:
            answered(self, message, together)

    monkeypatch.setattr(sessions.Session, "_send_message", break_after_sending)
    monkeypatch.setattr(sessions.Session, "_answer", break_before_an_answer)
    served, _ = cluster.run()
    assert set(broken.values()) == {3}
    simulated = simulate(parties, config).report
    same_end(served, simulated)
    assert served.traffic == simulated.traffic  # messages that were repeated were not taken twice
    assert not any("went" in line or "go back" in line for line in cluster.lines["server"])


@pytest.mark.parametrize("attempt", [65534, 2**31 - 1])
def test_the_attempts_are_counted_by_the_server_alone(attempt, kits, tmp_path, monkeypatch):
    """What a party says of them changes nothing, not even for a party whose stream breaks later."""
    config, parties = tiny(num_rounds=4)
    cluster, sent, hello = Cluster(config, parties, kits, tmp_path), [], joining._Joining._hello
    send = sessions.Session._send_message

    def lie(self):
        return {**hello(self), **({"attempt": attempt} if self.kit.name == "a" and self.client is None else {})}

    def break_off(self, content):
        send(self, content)
        if self.kit.name == "b":
            sent.append(1)
            if len(sent) in (7, 13):
                self._line.close()

    monkeypatch.setattr(joining._Joining, "_hello", lie)
    monkeypatch.setattr(sessions.Session, "_send_message", break_off)
    served, _ = cluster.run()
    same_end(served, simulate(parties, config).report)
    assert json.loads((tmp_path / "server" / "serving.json").read_text())["attempt"] == 1


def test_a_process_that_is_started_again_just_when_the_last_has_joined_stops_nobody(kits, tmp_path, monkeypatch):
    config, parties = tiny()
    cluster, agreed, again = Cluster(config, parties, kits, tmp_path), serving._Serving._agreed, []

    def meanwhile(self, stated):
        if not again:
            open_lines["b"].close()
            assert isinstance(b.error(), Killed)
            dead.clear()
            again.append(cluster.join("b"))
            cluster.until("server", "b: connected (start 2)")
        return agreed(self, stated)

    open_lines, dead, connect = {}, {"b"}, sessions.Session._connect

    def connected(self):
        if self.kit.name in open_lines and self.kit.name in dead:
            raise Killed
        connect(self)
        open_lines[self.kit.name] = self._line

    monkeypatch.setattr(serving._Serving, "_agreed", meanwhile)
    monkeypatch.setattr(sessions.Session, "_connect", connected)
    server, a, b, c = cluster.serve(), *(cluster.join(name) for name in "abc")
    for role in (a, c):
        role.outcome()
    again[0].outcome()
    same_end(server.outcome(), simulate(parties, config).report)


def test_a_failure_at_one_party_appears_at_every_party(kits, tmp_path):
    config, parties = tiny(num_rounds=50)

    def fail(event):
        if isinstance(event, RoundDone) and event.round == 1:
            raise TrainingError("the loss is inf")

    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    roles = {name: cluster.join(name, observe=fail if name == "b" else lambda event: None) for name in "abc"}
    errors = {name: role.error() for name, role in roles.items()}
    assert str(errors["b"]) == "the loss is inf"
    for error in (errors["a"], errors["c"], server.error()):
        assert isinstance(error, TrainingError)
        assert "party 'b' failed: the loss is inf" in str(error)


def test_an_error_that_is_not_ours_is_named_by_its_type_only(kits, tmp_path):
    config, parties = tiny(num_rounds=50)

    def fail(event):
        raise ValueError("salary of node 7: 12345")

    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    b, c = cluster.join("b", observe=fail), cluster.join("c")
    assert isinstance(b.error(), ValueError)
    for role in (a, c, server):
        assert "ValueError in the program" in str(role.error())
        assert "12345" not in str(role.error())


def test_what_is_wrong_with_a_partys_data_is_said_there_only_and_bad_input_there_only(kits, tmp_path):
    config, parties = tiny(num_rounds=50)

    def fail(event):
        raise DataError("/home/ben/nodes.csv, row 7: salary 12345 is not a number")

    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    b, c = cluster.join("b", observe=fail), cluster.join("c")
    assert "12345" in str(b.error())
    assert b.error().exit_code == 2
    for role in (a, c, server):
        error = role.error()
        assert "party 'b' failed: its data, or a file in its folder, cannot be used" in str(error)
        assert error.exit_code == 1
        assert "12345" not in str(error)
        assert "ben" not in str(error)


def test_a_checkpoint_that_cannot_be_written_is_told_to_all_without_its_place(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=50)
    written = checkpoints.write_atomically

    def full(path, *more, **options):
        if path.parent.parent.name == "b":
            raise OSError(28, "No space left on device")
        written(path, *more, **options)

    monkeypatch.setattr(checkpoints, "write_atomically", full)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = cluster.serve(), {name: cluster.join(name) for name in "abc"}
    assert str(tmp_path) in str(roles["b"].error())
    for role in (roles["a"], roles["c"], server):
        assert "party 'b' failed: the checkpoint of round 1 cannot be written there (No space left" in str(role.error())
        assert str(tmp_path) not in str(role.error())


def test_a_fault_of_the_server_appears_at_every_party(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=1)

    def full(path, *more, **options):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(serving, "write_atomically", full)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = cluster.serve(), [cluster.join(name) for name in "abc"]
    assert isinstance(server.error(), OSError)
    for role in roles:  # though each has its own results: the run has none
        error = role.error()
        assert isinstance(error, TrainingError)
        assert "the server failed: OSError in the program (No space left on device)" in str(error)
        assert str(tmp_path) not in str(error)


def test_a_checkpoint_that_is_gone_when_it_is_needed_is_told_to_all_at_once(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=4)
    go_to = joining._Joining._go_to

    def lose(self, client, first, begin):
        if begin["round"] and self.party.name == "a":
            for path in (tmp_path / "a" / "checkpoints").iterdir():
                path.unlink()
        go_to(self, client, first, begin)

    monkeypatch.setattr(joining._Joining, "_go_to", lose)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a, c = cluster.serve(wait=600.0), cluster.join("a", wait=600.0), cluster.join("c", wait=600.0)
    assert isinstance(cluster.join("b", observe=killing(RoundDone, 1)).error(), Killed)
    b = cluster.join("b", wait=600.0)
    for role in (a, b, c, server):
        error = role.error(60)
        assert error.exit_code == 1
        assert re.search(r"party 'a': the checkpoint of round \d is gone.*SHA-256 [0-9a-f]{64}, found none", str(error))
        assert "--fresh" in str(error)


def test_a_party_that_redoes_its_last_round_does_not_say_that_it_is_finished(kits, tmp_path, monkeypatch):
    config, parties = tiny()
    wait, drive, said, left = sessions.Session.wait_for_goodbye, joining._Joining._drive, [], [1]

    def die_once(self):
        if self.kit.name == "b" and left:
            left.clear()
            while any(SeenHub.last.links[name].finished is None for name in "ac"):
                time.sleep(0.01)
            raise Killed
        wait(self)

    def note(self, session, client):
        said.append((self.party.name, self._hello()["finished"]))
        drive(self, session, client)

    monkeypatch.setattr(sessions.Session, "wait_for_goodbye", die_once)
    monkeypatch.setattr(sessions.Session, "send", unless_finished(sessions.Session.send))
    monkeypatch.setattr(joining._Joining, "_drive", note)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a, b, c = cluster.serve(), *(cluster.join(name) for name in "abc")
    assert isinstance(b.error(), Killed)
    for role in (a, cluster.join("b"), c):
        role.outcome()
    same_end(server.outcome(), simulate(parties, config).report)
    assert sorted(name for name, _ in said) == ["a", "a", "b", "b", "c", "c"]
    assert {finished for _, finished in said} == {None}


def unless_finished(send):
    """Let the first process of party b not say that it is finished, so that the others must go on once more."""
    left = [1]

    def sending(self, kind, **fields):
        if kind == "finished" and self.kit.name == "b" and left:
            left.clear()
        else:
            send(self, kind, **fields)

    return sending


def test_a_party_that_does_not_come_is_named(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(wait=30.0)
    a = cluster.join("a")
    for role in (server, a):
        error = role.error()
        assert isinstance(error, (AbsenceError, TrainingError))
        assert error.exit_code == 1  # nothing was wrong with the input
        assert "waited 30 s for b, c to join" in str(error)
    assert any("waiting for b, c to join since 1" in line for line in cluster.lines["a"])


def test_a_party_whose_server_waits_for_others_stays_however_short_its_own_patience_is(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a", wait=2.0)
    cluster.until("a", "waiting for b, c to join since 1")
    for role in (cluster.join("b"), a, cluster.join("c")):
        role.outcome()
    server.outcome()


def test_a_server_that_is_connected_but_silent_for_too_long_is_left(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=1)
    monkeypatch.setattr(sessions, "SILENCE", 3.0)  # shorter than a server needs to name whom it waits for
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a", wait=1.0)
    error = a.error()
    assert isinstance(error, AbsenceError)
    assert "waited 3 s for the other parties, and heard nothing from the server" in str(error)
    cluster.end(server)


def test_streams_that_say_nothing_shut_nobody_out_and_are_closed(kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=1)
    monkeypatch.setattr(streams, "HELLO_WITHIN", 3.0)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, ended = cluster.serve(), []
    kit = open_kit(kits / "a")
    silent = [
        streams.Line(kit, f"localhost:{cluster.port}", lambda line, event: ended.append(event)) for _ in range(40)
    ]
    cluster.until("server", "party 'a': too many connections at once")
    for role in [cluster.join(name) for name in "bca"]:
        role.outcome()
    server.outcome()
    assert sum("no hello within 3 s" in line for line in cluster.lines["server"]) >= 2
    assert len(ended) == len(silent)  # each heard why
    for line in silent:
        line.close()


def test_without_a_server_a_party_says_so(kits, tmp_path):
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
    assert isinstance(cluster.join("c", observe=killing(RoundDone, 1)).error(), Killed)
    for _ in range(3):
        refused_clone(cluster, "c", "clone of c")  # nor while the party is away
    for role in (a, b, cluster.join("c")):
        role.outcome()
    same_end(server.outcome(), simulate(parties, config).report)


def test_a_second_folder_is_refused_also_by_a_server_that_was_started_again(kits, tmp_path):
    config, parties = tiny(num_rounds=6)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(observe=killing(RoundDone, 1))
    roles = [cluster.join(name) for name in "abc"]
    assert isinstance(server.error(), Killed)
    server = cluster.serve()
    refused_clone(cluster, "a")
    for role in roles:
        role.outcome()
    same_end(server.outcome(), simulate(parties, config).report)


def test_a_copied_folder_takes_over_and_the_first_one_does_not_come_back(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    copy = cluster.join("a", out="copy")
    error = a.error()
    assert isinstance(error, ConfigError)
    assert "(start 2) has taken its place" in str(error)
    for _ in range(3):
        refused_clone(cluster, "a", "a")
    for role in (copy, cluster.join("b"), cluster.join("c")):
        role.outcome()
    same_end(server.outcome(), simulate(parties, config).report)


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
    assert isinstance(cluster.join("b", observe=killing(RoundDone, 2)).error(), Killed)
    for path in (tmp_path / "b" / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    error = cluster.join("b").error()
    assert isinstance(error, ConfigError)
    assert "none in common" in str(error)
    for path in tmp_path.glob("*.checkpoint"):
        path.rename(tmp_path / "b" / "checkpoints" / path.name)
    for role in (a, cluster.join("b"), c):
        role.outcome()
    same_end(server.outcome(), simulate(parties, config).report)


@pytest.mark.parametrize("role", ["server", "b"])
def test_a_role_whose_only_checkpoint_is_damaged_goes_on_from_the_beginning(role, kits, tmp_path):
    config, parties = tiny(num_rounds=4)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    for ended in [cluster.join(name, observe=killing(RoundDone, 1)) for name in "abc"]:
        assert isinstance(ended.error(), Killed)
    cluster.end(server)
    for folder in tmp_path.glob("*/checkpoints"):
        for path in sorted(folder.iterdir())[1:]:
            path.unlink()
    (only,) = (tmp_path / role / "checkpoints").iterdir()
    assert only.name == "round-00000001.checkpoint"
    only.write_bytes(only.read_bytes()[:-1])
    server = cluster.serve()
    for again in [cluster.join(name) for name in "abc"]:
        again.outcome()
    same_end(server.outcome(), simulate(parties, config).report)
    assert any("not used: " in line for line in cluster.lines[role])
    assert any("going on after round 0" in line for line in cluster.lines["server"][5:])


def test_fresh_starts_another_run_and_says_what_it_removes(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(observe=killing(RoundDone, 1))
    roles = [cluster.join(name, wait=15.0) for name in "abc"]
    for role in (server, *roles):
        assert isinstance(role.error(), (Killed, TransportError))
    other = config.replace(train={"seed": 5})
    error = cluster.serve(config=other).error()
    assert isinstance(error, ConfigError)
    assert "train.seed = 0 there, 5 here" in str(error)
    server = cluster.serve(config=other, fresh=True)
    assert "Is the server's --out the right one?" in str(cluster.join("a").error())
    assert not any("starting over" in line for line in cluster.lines["server"])  # not before all are there
    for role in [cluster.join(name, fresh=True) for name in "abc"]:
        role.outcome()
    assert any("starting over: removed" in line for line in cluster.lines["server"])
    same_end(server.outcome(), simulate(parties, other).report)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the others"])
def test_a_party_that_dies_when_its_results_are_written_is_finished_after_its_return(late, kits, tmp_path, monkeypatch):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    wait, left = sessions.Session.wait_for_goodbye, [1]

    def die_once(self):
        if self.kit.name == "b" and left:
            left.clear()
            while late and SeenHub.last.links["b"].finished is None:
                time.sleep(0.01)
            raise Killed
        wait(self)

    monkeypatch.setattr(sessions.Session, "wait_for_goodbye", die_once)
    server = cluster.serve()
    a, b, c = (cluster.join(name) for name in "abc")
    assert isinstance(b.error(), Killed)
    while late and not SeenHub.last.closing and server.is_alive():
        time.sleep(0.01)
    again = cluster.join("b")
    for role in (a, c):
        role.outcome()
    served = server.outcome()
    same_end(served, simulate(parties, config).report)
    report = again.outcome()  # whether the server had heard of its end, or needed it once more
    assert report["weights_sha256"][0] == served.weights_sha256[1]


def test_commands_given_again_after_the_end_do_nothing(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    served, reports = cluster.run()
    before = {path: path.read_bytes() for path in tmp_path.rglob("report.json")}
    assert len(before) == 4
    assert cluster.join("a").outcome() == reports["a"]
    assert cluster.serve().outcome() is None
    assert {path: path.read_bytes() for path in tmp_path.rglob("report.json")} == before
    assert not list(tmp_path.rglob("*.checkpoint"))
    assert served.to_dict()["weights_sha256"] == [report["weights_sha256"][0] for report in reports.values()]
