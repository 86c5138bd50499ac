"""Idle TCP connections do not displace parties: they are limited and dropped, and the run continues."""

from __future__ import annotations

import resource
import signal
import socket
from contextlib import ExitStack

import pytest

from glasu.files import raise_descriptor_limit
from support.processes import SMALL_RUN, Processes, assert_same_report


def open_idle(stack, port, count):
    """Open connections that send nothing; they close with the stack."""
    return [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(count)]


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
        assert_same_report(roles.finish(), roles)
    assert roles.started == {"server": 1, "a": 1, "b": 2, "c": 1}
