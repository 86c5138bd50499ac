"""Keep many idle TCP connections to a port, and replace each at once when the server closes it.

    python flood.py PORT COUNT SECONDS

It runs as a process of its own, so that its connections and the party under test do not share an interpreter.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from glasu.files import raise_descriptor_limit

LONGEST = 120.0  # seconds: a flood whose test was killed ends by itself


@contextmanager
def flood(port: int, count: int) -> Iterator[None]:
    """Flood a port of this machine in the background."""
    process = subprocess.Popen([sys.executable, __file__, str(port), str(count), str(LONGEST)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _keep_open(port: int, count: int, seconds: float) -> None:
    raise_descriptor_limit()
    poll, held, deadline = select.epoll(), {}, time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(min(200, count - len(held))):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
            held[connection.fileno()] = connection
            poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        for descriptor, _ in poll.poll(0.01):
            held.pop(descriptor).close()


if __name__ == "__main__":
    _keep_open(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
