"""The server admits the process that it knows, or a later start from the same folder."""

from __future__ import annotations

import json
import threading
import time

import pytest

from glasu.network.fencing import MAX_STARTS, Fence, count_start, describe_process, note_welcome
from glasu.network.handshake import Code, RefusalError
from glasu.network.run_folder import open_serving
from support.joining import open_joining
from support.roles import Role


@pytest.fixture
def party(tmp_path):
    return open_joining(tmp_path / "a", "a")


@pytest.fixture
def fence(tmp_path):
    return Fence(open_serving(tmp_path / "server"))


def start(party, times=1):
    for _ in range(times):
        count_start(party)


def come(party, fence, *, begun=True):
    """Start again and be admitted; with `begun`, an attempt begins with this process."""
    start(party)
    fence.check("a", describe_process(party.value))
    fence.admit("a", describe_process(party.value))
    note_welcome(party)
    if begun:
        fence.record_attempt()
        note_welcome(party, begun=True)


def test_a_folder_keeps_its_place_however_many_starts_reach_no_server(party, fence):
    come(party, fence)
    start(party, 2 * MAX_STARTS)
    come(party, fence)
    assert len(describe_process(party.value).before) < MAX_STARTS + 2


def test_a_process_that_was_welcomed_but_never_began_keeps_the_place_too(party, fence):
    come(party, fence)
    come(party, fence, begun=False)
    start(party, 2 * MAX_STARTS)
    come(party, fence)


@pytest.mark.parametrize("welcomes", [1, 2])
def test_after_a_withdrawal_the_process_before_counts_again(welcomes, party, fence):
    come(party, fence)
    for _ in range(welcomes):
        come(party, fence, begun=False)
    fence.withdraw("a")
    start(party, 2 * MAX_STARTS)
    come(party, fence)


def test_a_welcome_that_the_party_did_not_receive_counts_too(party, fence):
    come(party, fence)
    start(party)
    fence.admit("a", describe_process(party.value))  # and the party dies
    start(party, MAX_STARTS // 2)
    come(party, fence)


def test_another_folder_is_refused_however_often_it_is_started(party, fence, tmp_path):
    come(party, fence)
    other = open_joining(tmp_path / "other", "a")
    start(other, 5)
    with pytest.raises(RefusalError, match="another process of party 'a'") as refused:
        fence.check("a", describe_process(other.value))
    assert refused.value.code == Code.SECOND_PROCESS


def test_a_restarted_server_still_knows_the_admitted_process(party, fence, tmp_path):
    come(party, fence)
    other = open_joining(tmp_path / "other", "a")
    start(other, 5)
    again = Fence(open_serving(tmp_path / "server"))
    again.check("a", describe_process(party.value))
    with pytest.raises(RefusalError):
        again.check("a", describe_process(other.value))


def test_the_names_of_earlier_starts_stay_out_of_the_servers_file(party, fence, tmp_path):
    come(party, fence)
    start(party, 3)
    come(party, fence)
    kept = json.loads((tmp_path / "server" / "serving.json").read_text())["processes"]["a"]
    assert kept["before"] == []


@pytest.mark.parametrize("first", ["admit", "update"])
def test_a_process_that_is_admitted_while_the_run_updates_the_same_file_is_not_forgotten(
    first, party, tmp_path, monkeypatch
):
    state = open_serving(tmp_path / "server")
    fence, writing = Fence(state), threading.Event()
    start(party)
    process = describe_process(party.value)

    def fsync(handle):
        writing.set()
        time.sleep(0.05)

    monkeypatch.setattr("os.fsync", fsync)
    steps = {"admit": lambda: fence.admit("a", process), "update": lambda: state.update(attempt=5)}
    roles = [Role(first, steps.pop(first))]
    assert writing.wait(20)
    roles.extend(Role(name, step) for name, step in steps.items())
    for role in roles:
        role.outcome(20)
    for record in (state.value, open_serving(tmp_path / "server").value):
        assert record.attempt == 5
        assert record.processes["a"].name == process.name


def test_a_record_that_starts_over_while_it_is_updated_becomes_durable_as_a_whole(tmp_path, monkeypatch):
    state = open_serving(tmp_path / "server")
    state.update(run="old", attempt=3)
    state.start_over()
    state.update(run="new")
    writing = threading.Event()

    def fsync(handle):
        writing.set()
        time.sleep(0.05)

    monkeypatch.setattr("os.fsync", fsync)
    writing_state = Role("write", state.write_pending)
    assert writing.wait(20)
    Role("update", lambda: state.update(attempt=1)).outcome(20)
    writing_state.outcome(20)
    found = open_serving(tmp_path / "server").value
    assert (found.run, found.attempt) == ("new", 1)
