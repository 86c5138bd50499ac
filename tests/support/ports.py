"""Ports for servers that a test stops and starts again at the same port.

The system gives other tests ports of its ephemeral range, which begins at 32768 on Linux. It may give one of them away
while a server is down. So these ports are below that range, and every worker of pytest-xdist has its own.
"""

from __future__ import annotations

import itertools
import os
import socket

FIRST, PORTS_PER_WORKER, WORKERS = 10_000, 2_000, 11
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
_ports = itertools.cycle(range(FIRST + _WORKER * PORTS_PER_WORKER, FIRST + (_WORKER + 1) * PORTS_PER_WORKER))


def choose_port() -> int:
    """Return a free port of the loopback interface; the same one is returned again after 2,000 calls."""
    while True:
        port = next(_ports)
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
