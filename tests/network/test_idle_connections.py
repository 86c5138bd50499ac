"""Idle TCP connections take no party's place: they are few, they do not stay, and the run continues meanwhile."""

from __future__ import annotations

import resource
import signal
import socket
import time
from contextlib import ExitStack

import pytest

from glasu.files import raise_descriptor_limit
from glasu.runtime.simulation import simulate
from network.test_faults import same_end
from network.test_processes import SMALL_RUN, Processes
from network.test_processes import same_end as same_report
from network.test_runs import tiny
from support.cluster import Cluster


def open_idle(stack, port, count):
    """Open connections that send nothing; they close with the stack."""
    return [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(count)]


def is_open(connection):
    """Tell whether the peer has not closed a connection."""
    connection.settimeout(0.01)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def test_idle_connections_beyond_the_allowance_are_dropped_and_parties_join(kits, tmp_path):
    config, parties = tiny(num_rounds=2)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, early = cluster.serve(connections=8), cluster.join("a")
    cluster.until("server", "a: prepared")
    with ExitStack() as stack:
        idle = open_idle(stack, cluster.port, 60)
        time.sleep(1.0)
        assert sum(map(is_open, idle)) <= 7  # one is the party's
        late = [cluster.join(name) for name in "bc"]  # they come while all places are taken
        deadline = time.monotonic() + 15
        while any(map(is_open, idle)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for role in (early, *late):
            role.outcome()
    same_end(server.outcome(), simulate(parties, config).report)


@pytest.mark.slow
def test_a_party_reconnects_during_a_flood_of_idle_connections(kits, tmp_path):
    raise_descriptor_limit()  # of this process, for its ends of the connections
    roles = Processes(tmp_path, kits, SMALL_RUN.format(rounds=60))
    with ExitStack() as stack:
        stack.callback(roles.stop)
        roles.listen()
        resource.prlimit(roles.running["server"].pid, resource.RLIMIT_NOFILE, (1024, 1024))
        for name in "abc":
            roles.start(name)
        roles.wait(lambda: roles.rounds("server") >= 5)
        open_idle(stack, roles.port, 1500)
        attempts = len(roles.attempts())
        roles.running["b"].send_signal(signal.SIGKILL)
        roles.running["b"].wait()
        open_idle(stack, roles.port, 1500)
        roles.start("b")
        roles.wait(lambda: len(roles.attempts()) > attempts, 60)
        open_idle(stack, roles.port, 1500)
        same_report(roles.finish(), roles)
    assert roles.started == {"server": 1, "a": 1, "b": 2, "c": 1}
