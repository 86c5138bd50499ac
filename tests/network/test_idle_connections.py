"""Idle TCP connections do not displace parties: they are limited and dropped, and the run continues."""

from __future__ import annotations

import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from glasu.files import raise_descriptor_limit
from support.flood import flood
from support.processes import SMALL_RUN, Processes, assert_same_report
from support.raw_party import wait_for
from support.toy_run import Federation, Toy


def open_idle(stack, port, count):
    """Open connections that send nothing; they close with the stack."""
    return [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(count)]


def is_open(connection):
    """Return whether a connection is still open."""
    connection.settimeout(0.01)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def test_idle_connections_beyond_the_allowance_are_dropped_and_parties_join(kits):
    federation = Federation(Toy(), kits)
    server, early = federation.serve(listen="127.0.0.1:0", max_connections=8), federation.join("a")
    wait_for(lambda: federation.servers[0].session.list_connected()["a"])
    with ExitStack() as stack:
        idle = open_idle(stack, federation.port, 60)
        time.sleep(0.5)
        assert sum(map(is_open, idle)) <= 7  # one is the party's
        late = [federation.join(name) for name in "bc"]  # they come while all places are taken
        wait_for(lambda: not any(map(is_open, idle)))
        federation.finish(server, [early, *late])


def resident(pid):
    """Return the resident memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's memory")
def test_ten_thousand_connections_grow_the_server_by_at_most_64_mib(kits, tmp_path):
    raise_descriptor_limit()
    roles = Processes(tmp_path, kits, SMALL_RUN.format(rounds=2))
    with ExitStack() as stack:
        stack.callback(roles.stop)
        roles.listen()
        before = resident(roles.running["server"].pid)
        open_idle(stack, roles.port, 10_000)
        assert resident(roles.running["server"].pid) - before <= 64
        for name in "abc":
            roles.start(name)
        assert_same_report(roles.finish(), roles)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the flood needs epoll")
@pytest.mark.parametrize(("descriptors", "seconds"), [(None, 30), (1024, 60)])
def test_a_killed_party_reconnects_during_a_flood_that_is_refilled_immediately(kits, tmp_path, descriptors, seconds):
    roles = Processes(tmp_path, kits, SMALL_RUN.format(rounds=1000) + "patience = 0\n")  # longer than the flood
    roles.descriptors = descriptors
    with ExitStack() as stack:
        stack.callback(roles.stop)
        roles.listen()
        for name in "abc":
            roles.start(name)
        roles.wait(lambda: roles.rounds("server") >= 5)
        before = resident(roles.running["server"].pid)
        with flood(roles.port, 3000):
            time.sleep(4)  # until all places are taken
            attempts = len(roles.attempts())
            roles.running["b"].send_signal(signal.SIGKILL)
            roles.running["b"].wait()
            roles.start("b")
            roles.wait(lambda: len(roles.attempts()) > attempts, seconds)
            assert resident(roles.running["server"].pid) - before <= 64
        assert_same_report(roles.finish(), roles)
    assert roles.started == {"server": 1, "a": 1, "b": 2, "c": 1}
