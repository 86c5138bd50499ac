"""How a party comes to the server, and comes back: at least once, and less and less often where that helps nothing."""

from __future__ import annotations

from contextlib import suppress

import pytest

from glasu.errors import AbsenceError
from glasu.network import client_session as sessions
from glasu.network.client_session import FIRST_DELAY, LONGEST_DELAY, Session
from glasu.network.frames import control
from network.test_runs import tiny
from support.cluster import Cluster


def test_who_waits_for_nobody_joins_a_server_that_is_there(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    assert isinstance(cluster.join("a", wait=0.0).error(10), AbsenceError)
    server = cluster.serve()
    for role in [cluster.join(name, wait=0.0) for name in "abc"]:
        role.outcome()
    server.outcome()


class Enough(BaseException):
    """Ends a test's session."""


@pytest.fixture
def pauses(monkeypatch):
    """Return how long a session has paused before it connected again; none of it takes time."""
    found = []
    monkeypatch.setattr(sessions.time, "sleep", found.append)
    monkeypatch.setattr(sessions.random, "uniform", lambda low, high: 1.0)
    return found


def coming(monkeypatch, *visits):
    """Let a session connect so often, and hear these frames each time before the stream ends."""
    left = list(visits)

    class Line:
        def __init__(self, kit, address, arrived):
            if not left:
                raise Enough
            for event in (*left.pop(0), "the server ended the connection"):
                arrived(self, event)

        def send(self, frame):
            pass

        def close(self):
            pass

    monkeypatch.setattr(sessions, "Line", Line)
    session = Session(None, "localhost:1", dict, 600.0, lambda line: None)
    session.report = dict
    with suppress(Enough):
        session.open()
        session.wait_for_goodbye()


WELCOME, REPORT, NOTICE = control("welcome"), control("report"), control("notice", line="b is awaited")


@pytest.mark.parametrize("frames", [(), (WELCOME,), (WELCOME, REPORT)], ids=["none", "welcome", "question"])
def test_a_server_that_lets_parties_in_and_drops_them_is_asked_less_and_less_often(frames, pauses, monkeypatch):
    coming(monkeypatch, *[frames] * 9)
    assert pauses == [min(FIRST_DELAY * 2**count, LONGEST_DELAY) for count in range(9)]


def test_a_stream_that_served_is_opened_again_at_once(pauses, monkeypatch):
    coming(monkeypatch, (WELCOME,), (WELCOME,), (WELCOME, NOTICE), (WELCOME,))
    assert pauses == [FIRST_DELAY, 2 * FIRST_DELAY, FIRST_DELAY]
