"""Checkpoints over the network: durable before the next round's first message; full disks, damaged files."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from glasu.errors import CheckpointError, ConfigError, GlasuError
from glasu.network.join import PartyPerformer
from glasu.network.serve import ServerPerformer
from glasu.network.training_party import TrainingParty
from glasu.network.training_server import TrainingServer
from glasu.protocol.requests import Broadcast, RoundDone, Scatter
from glasu.wire.message_key import Phase
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.tiny import assert_same_end, tiny

ROLES = ("server", "a", "b", "c")
SLOW = 0.05  # seconds per checkpoint: a role that does not wait for it is detected


def run_noting_order(cluster, monkeypatch, server_role=TrainingServer, party_role=TrainingParty):
    """Run, and return for each role the order of ("durable", round) and ("sends", round)."""
    done = {name: [] for name in ROLES}

    def fsync(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if found := re.match(r"\.round-(\d+)", path.name):
            time.sleep(SLOW)
            done[path.parent.parent.name].append(("durable", int(found[1])))

    def note(who, message):
        if message.key.phase is Phase.TRAINING:
            done[who].append(("sends", message.key.round))  # rounds count from 0: this many were done before

    class NotingServer(ServerPerformer):
        def __call__(self, request):
            reply = super().__call__(request)
            if isinstance(request, Broadcast | Scatter):
                note("server", request.message if isinstance(request, Broadcast) else request.messages[0])
            return reply

    class NotingParty(PartyPerformer):
        def send(self, messages):
            super().send(messages)
            for message in messages:
                if type(message).__name__ != "Losses":  # they end a round
                    note(self.work.party.name, message)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        server = cluster.serve(server_role, NotingServer)
        for role in [cluster.join(name, party_role, NotingParty) for name in "abc"]:
            role.outcome()
        server.outcome()
    return done


def find_early(done, num_rounds):
    """Return the roles that sent a message of a round before their checkpoint of the earlier rounds was durable."""
    return {
        (name, index)
        for name, order in done.items()
        for index in range(1, num_rounds)
        if ("durable", index) not in order[: order.index(("sends", index))]
    }


@pytest.mark.parametrize("keys", [{}, {"sampler": "neighbor", "labels": "b"}], ids=str)
def test_a_checkpoint_is_durable_before_the_first_message_of_the_next_round(keys, kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=4, **keys)
    done = run_noting_order(Cluster(config, parties, kits, tmp_path), monkeypatch)
    for name, order in done.items():
        assert [index for what, index in order if what == "durable"] == [1, 2, 3, 4], name
        assert {index for what, index in order if what == "sends"} == {0, 1, 2, 3}, name
    assert find_early(done, 4) == set()


def test_the_test_before_notices_a_role_that_does_not_wait(kits, tmp_path, monkeypatch):
    class HastyServer(TrainingServer):
        def wait_until_durable(self):
            pass

    class HastyParty(TrainingParty):
        def wait_until_durable(self):
            pass

    config, parties = tiny(num_rounds=4)
    done = run_noting_order(Cluster(config, parties, kits, tmp_path), monkeypatch, HastyServer, HastyParty)
    assert {name for name, _ in find_early(done, 4)} == set(ROLES)


def checkpoints(cluster, name):
    return sorted((cluster.folder / name / "checkpoints").glob("*.checkpoint"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def put_the_older_one(path: Path) -> None:
    shutil.copy(min(path.parent.glob("*.checkpoint")), path)


def put_anothers(path: Path) -> None:
    other = "a" if path.parents[1].name != "a" else "c"
    shutil.copy(path.parents[2] / other / "checkpoints" / path.name, path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("b", damage) for damage in (flip, truncate, empty, put_the_older_one, put_anothers)),
        *(("server", damage) for damage in (flip, put_the_older_one)),  # all roles read checkpoints alike
    ],
)
def test_all_go_back_to_the_older_checkpoint_where_the_last_is_damaged_or_exchanged(damage, name, stopped_cluster):
    damage(checkpoints(stopped_cluster, name)[-1])
    report, _ = stopped_cluster.run()
    assert_same_end(report, simulate_with_secrets(stopped_cluster.parties, stopped_cluster.config).report)
    assert any("not used:" in line and "is damaged or was replaced" in line for line in stopped_cluster.lines[name])
    assert any("continuing after round 2." in line for line in stopped_cluster.lines["server"])
    assert not any("continuing after round 3." in line for line in stopped_cluster.lines["server"])


def test_two_files_that_were_exchanged_for_one_another_are_not_used(stopped_cluster):
    older, last = checkpoints(stopped_cluster, "b")
    content = older.read_bytes()
    older.write_bytes(last.read_bytes())
    last.write_bytes(content)
    server = stopped_cluster.serve()
    error = stopped_cluster.join("b").error()
    assert isinstance(error, GlasuError)  # it has no checkpoint left; the other roles keep theirs
    assert "no intact checkpoint in common" in str(error)
    assert sum("is damaged or was replaced" in line for line in stopped_cluster.lines["b"]) == 2
    last.write_bytes(older.read_bytes())
    older.write_bytes(content)
    roles = [stopped_cluster.join(name) for name in "abc"]
    for role in roles:
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(stopped_cluster.parties, stopped_cluster.config).report)


@pytest.mark.parametrize(("name", "memory"), [("server", "serving.json"), ("b", "joining.json")])
def test_no_run_begins_among_checkpoints_of_which_nothing_says_whose_they_are(name, memory, stopped_cluster):
    folder = stopped_cluster.folder / name
    path, start = folder / memory, stopped_cluster.serve if name == "server" else partial(stopped_cluster.join, name)
    before = path.read_bytes()
    path.unlink()
    error = start().error()
    assert isinstance(error, ConfigError)
    assert f"{folder / 'checkpoints'}: holds checkpoints of another run (round-00000002.checkpoint" in str(error)
    assert f"restore {memory}" in str(error)
    path.write_bytes(before)
    report, _ = stopped_cluster.run()
    assert_same_end(report, simulate_with_secrets(stopped_cluster.parties, stopped_cluster.config).report)
    assert any("continuing after round 3." in line for line in stopped_cluster.lines["server"])


def test_partial_files_of_a_killed_party_are_removed_when_it_resumes(stopped_cluster):
    left = [stopped_cluster.folder / name / "checkpoints" / ".round-00000004.checkpoint.abc" for name in ROLES]
    for path in left:
        path.write_bytes(b"half")
    removed = []

    def observe(event):
        if isinstance(event, RoundDone) and event.round == 3:
            removed.append(not any(path.exists() for path in left))

    server = stopped_cluster.serve(observer=observe)
    for role in [stopped_cluster.join(name) for name in "abc"]:
        role.outcome()
    server.outcome()
    assert removed == [True]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["no space", "a disk that fails"])
@pytest.mark.parametrize("name", ["b", "server"])
def test_a_full_disk_stops_the_run_with_a_clear_error_and_loses_nothing(name, code, kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=4)
    cluster = Cluster(config, parties, kits, tmp_path)
    folder, fired = tmp_path / name / "checkpoints", []

    def fsync(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.parent == folder and ".round-00000003." in path.name:
            fired.append(path)
            raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        roles = {"server": cluster.serve(), **{party: cluster.join(party) for party in "abc"}}
        errors = {who: role.error() for who, role in roles.items()}
    assert len(fired) == 1
    assert isinstance(errors[name], CheckpointError)
    for who, error in errors.items():
        assert isinstance(error, GlasuError), who
        assert error.exit_code == 1
        assert "cannot be written" in str(error), who
        assert f"({os.strerror(code)}); earlier checkpoints are intact" in str(error), who
        assert re.search("start the same commands? again", str(error)), who
        assert name == "server" or who == "b" or "party 'b'" in str(error)
    found = sorted(path.name for path in folder.iterdir())
    assert found == [f"round-{index:08d}.checkpoint" for index in (1, 2)]  # and no temporary file
    report, _ = cluster.run()
    assert_same_end(report, simulate_with_secrets(parties, config).report)
    assert any("continuing after round 2." in line for line in cluster.lines["server"])
