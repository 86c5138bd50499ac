"""Sessions over loopback with mutual TLS: after any broken stream, every party ends with the same bytes."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from glasu.network.frames import ROOM, WINDOW
from support.roles import Killed, Role
from support.toy_run import Federation, Toy, break_streams_after


@pytest.fixture
def federation(kits):
    return Federation(Toy(), kits)


@pytest.fixture
def small(kits):
    return Federation(Toy(num_rounds=2, chunks=2), kits)


def no_sleep(seconds):
    pass


def test_an_unbroken_run_computes_the_means(federation):
    server = federation.serve()
    federation.finish(server, [federation.join(name) for name in "abc"])
    assert [party.attempts for parties in federation.parties.values() for party in parties] == [1, 1, 1]


@pytest.mark.parametrize("count", range(1, 30))
def test_a_stream_that_breaks_at_any_frame_costs_nothing_but_time(count, small):
    server = small.serve()
    broken = {"connect": break_streams_after([count]), "sleep": no_sleep}
    small.finish(server, [small.join("a"), small.join("b", **broken), small.join("c")])
    assert [party.attempts for parties in small.parties.values() for party in parties] == [1, 1, 1]  # nothing is redone


SLOW = pytest.mark.slow


@pytest.mark.parametrize("count", [2, 5, pytest.param(3, marks=SLOW), pytest.param(8, marks=SLOW)])
def test_streams_that_break_again_and_again_at_every_party_lose_nothing(count, federation):
    server = federation.serve()
    roles = [
        federation.join(name, connect=break_streams_after([count + index] * 40), sleep=no_sleep)
        for index, name in enumerate("abc")
    ]
    federation.finish(server, roles)


def crash_at(moment):
    """Return a hook that crashes a role once, at its n-th call."""
    left = [moment]

    def after(what, round_index, chunk):
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    return after


@pytest.mark.parametrize("moment", range(1, 13))
def test_a_party_that_crashes_at_any_point_resumes_from_the_last_common_checkpoint(moment, small):
    server = small.serve()
    others = [small.join("a"), small.join("c")]
    crashed = small.join("b", after=crash_at(moment))
    crashed.join(30)
    assert isinstance(crashed.error(), Killed)
    small.finish(server, [others[0], small.join("b"), others[1]])


@pytest.mark.parametrize("moment", range(1, 9))
def test_a_server_that_crashes_at_any_point_is_started_again_and_no_party_is(moment, small):
    crashed = small.serve(after=crash_at(moment))
    parties = [small.join(name) for name in "abc"]
    crashed.join(30)
    assert isinstance(crashed.error(), Killed)
    small.finish(small.serve(), parties)
    assert all(len(started) == 1 for started in small.parties.values())


def until_it_ends(start, *moments):
    """Return a role that is started again after each crash, at these moments."""

    def run():
        for moment in moments:
            crashed = start(after=crash_at(moment))
            crashed.join(60)
            if not isinstance(crashed.error(), Killed):
                return crashed.outcome()
        return start().outcome()

    return Role("persistent", run)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=SLOW) for seed in range(2, 12))])
def test_simultaneous_faults_of_all_kinds_change_no_bit(seed, federation):
    random = np.random.default_rng(seed)
    crashes = {name: random.integers(1, 25, size=2).tolist() for name in ("server", "a", "b")}
    server = until_it_ends(federation.serve, *crashes["server"])
    while not federation.servers:
        time.sleep(0.01)

    def join(name):
        breaks = random.integers(1, 12, size=3).tolist()

        def start(**options):
            return federation.join(name, connect=break_streams_after(breaks), sleep=no_sleep, **options)

        return until_it_ends(start, *crashes.get(name, ()))

    federation.finish(server, [join(name) for name in "abc"])


def test_a_tensor_of_many_windows_passes_without_deadlock_in_bounded_memory(kits):
    # Every party sends all its chunks before it receives, as scripts do, and one of them reads slowly.
    toy = Toy(num_rounds=1, chunks=13, rows=4096, columns=256)
    federation = Federation(toy, kits)
    most = {"waiting": 0, "held": 0}

    def watch(what, round_index, chunk):
        for peer in federation.servers[0].session.roster.peers.values():
            channel = peer.channel
            most["waiting"] = max(most["waiting"], channel.waiting)
            most["held"] = max(most["held"], channel.outbox.held)

    server = federation.serve(after=watch)
    pause = threading.Event()
    parties = [
        federation.join("a"),
        federation.join("b", after=lambda what, index, chunk: what == "receive" and pause.wait(0.02)),
        federation.join("c"),
    ]
    federation.finish(server, parties)
    message = toy.max_bytes
    assert toy.chunks * message > 2 * (ROOM + WINDOW)
    assert most["waiting"] <= ROOM + WINDOW + message
    assert most["held"] <= WINDOW + message + 100_000
