"""The reason for the end of a run overtakes queued data on a slow connection."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from glasu.errors import TrainingError
from glasu.network.client_session import ClientSession
from glasu.network.connection import ConnectOptions
from glasu.network.roster import Attempt
from glasu.network.transport import Listener
from glasu.pki.kit import open_kit
from glasu.protocol.messages import Joint, Partial
from glasu.protocol.requests import Receive
from support.raw_party import ServerHarness, wait_for
from support.roles import Role
from support.toy_run import ToyClientHandshake, digest, key, logger

RATE = 1e6  # bytes per second
LONG = np.zeros((4096, 1024), np.float32)  # at this rate it takes 17 s
SOON = 12.0  # seconds: gRPC and the sockets hold a few MB


def forward_slowly(target):
    """Forward bytes to a port and back, limited to the rate; return the port to connect to."""
    listener = socket.create_server(("localhost", 0))

    def pump(source, sink):
        with suppress(OSError):
            while data := source.recv(2**14):
                sink.sendall(data)
                time.sleep(len(data) / RATE)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept():
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("localhost", target))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


@pytest.fixture
def running_sessions(kits):
    """Return a server session and a party's session over a slow connection, in a running attempt without deadlines."""
    harness = ServerHarness("a")
    with Listener(harness.session.host, open_kit(kits / "server"), "localhost:0") as listener:
        listener.start()
        start = np.zeros(1)
        port = forward_slowly(listener.port)
        options = ConnectOptions(open_kit(kits / "a"), f"localhost:{port}", 20.0, logger([]))
        party = ClientSession(options, ToyClientHandshake("a", {0: start}))
        party.open()
        party.prepare(lambda head, size: None)
        harness.session.gather()
        beginning = Role(
            "beginning",
            lambda: harness.session.begin_attempt(Attempt(1, 0, {"a": digest(start)}, lambda head, size: None)),
        )
        party.confirm(party.await_attempt())
        beginning.outcome(20)
        yield harness, party
        party.close()


def test_a_party_with_a_slow_connection_soon_receives_the_reason_why_the_run_ends(running_sessions):
    harness, party = running_sessions
    harness.session.broadcast(Joint(key(0, 0), LONG))
    time.sleep(1.0)  # pieces of it are on their way
    began = time.monotonic()
    ending = Role("ending", lambda: harness.session.announce_failure(TrainingError("enough"), 20.0))
    with pytest.raises(TrainingError, match="the run was stopped: enough"):
        party.receive(Receive((Joint,), key(0, 0)))
    assert time.monotonic() - began < SOON
    party.close()
    ending.outcome(20)


def test_a_server_soon_receives_the_reason_why_a_party_with_a_slow_connection_fails(running_sessions):
    harness, party = running_sessions
    waiting = Role("waiting", lambda: harness.session.receive(Receive((Partial,), key(0, 0))))
    party.send([Partial(key(0, 0, 0, 1), LONG)])
    time.sleep(1.0)
    began = time.monotonic()
    party.fail(TrainingError("enough"))
    waiting.join(60)
    assert str(waiting.error()) == "party 'a' failed: enough"
    assert time.monotonic() - began < SOON


def test_a_message_that_takes_longer_than_every_ping_arrives(running_sessions):
    harness, party = running_sessions
    party.send([Partial(key(0, 0, 0, 1), LONG[:3000])])  # 12 s
    (message,) = harness.session.receive(Receive((Partial,), key(0, 0)))
    assert message.value.shape == (3000, 1024)
    wait_for(lambda: harness.session.list_connected()["a"])
    assert not any("the connection ended" in line for line in harness.log)
