"""Which process of a party is served: the one that the server knows, or a later start from its folder."""

from __future__ import annotations

import pytest

from glasu.network.fencing import REMEMBERED, STARTS, Fence, introduction, met, next_start
from glasu.network.peer import read_hello
from glasu.network.state_file import Durable

HELLO = {"kind": "hello", "run": None, "attempt": 0, "finished": None, "facts": {"nodes": 1}, "rounds": {"0": "start"}}


@pytest.fixture
def party(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda handle: None)  # hundreds of starts
    return Durable(tmp_path / "joining.json", dict(STARTS))


@pytest.fixture
def fence(tmp_path):
    return Fence(Durable(tmp_path / "serving.json", {"incarnations": {}}))


def hello(party):
    return read_hello({**HELLO, **introduction(party)})


def start(party, times=1):
    for _ in range(times):
        next_start(party)


def come(party, fence, *, begun=True):
    """Start once more, and be welcomed; with `begun`, the run begins with this process."""
    start(party)
    assert fence.objection("a", hello(party)) == ""
    fence.admit("a", hello(party))
    met(party)
    if begun:
        fence.settle()
        met(party, begun=True)


def test_a_folder_keeps_its_place_however_often_it_was_started_in_vain(party, fence):
    come(party, fence)
    start(party, 2 * REMEMBERED)
    come(party, fence)
    assert len(introduction(party)["before"]) < REMEMBERED + 2


def test_a_process_that_was_welcomed_but_never_began_keeps_the_place_too(party, fence):
    come(party, fence)
    come(party, fence, begun=False)
    start(party, 2 * REMEMBERED)
    come(party, fence)


@pytest.mark.parametrize("welcomes", [1, 2])
def test_where_a_welcome_was_taken_back_the_process_before_counts_again(welcomes, party, fence):
    come(party, fence)
    for _ in range(welcomes):
        come(party, fence, begun=False)
    fence.withdraw("a")
    start(party, 2 * REMEMBERED)
    come(party, fence)


def test_a_welcome_that_was_not_heard_counts_too(party, fence):
    come(party, fence)
    start(party)
    fence.admit("a", hello(party))  # and the party dies
    start(party, REMEMBERED // 2)
    come(party, fence)


def test_another_folder_is_refused_however_often_it_is_started(party, fence, tmp_path):
    come(party, fence)
    other = Durable(tmp_path / "other.json", dict(STARTS))
    start(other, 5)
    assert "another process of party 'a'" in fence.objection("a", hello(other))
