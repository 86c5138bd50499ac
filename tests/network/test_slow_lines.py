"""On a slow line, too, both sides learn why a run ends, ahead of data that waits to be sent."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from glasu.errors import TrainingError
from glasu.network.client_session import ClientSession
from glasu.network.connection import Dialing
from glasu.network.transport import Listener
from glasu.pki.kit import open_kit
from glasu.protocol.messages import Joint, Partial
from glasu.protocol.requests import Receive
from support.raw_party import Desk
from support.toy_run import Role, ToyClientHandshake, digest, key, logger

RATE = 1e6  # bytes per second
LONG = np.zeros((4096, 2048), np.float32)  # 32 MiB, which take more than 30 s at this rate
START = np.zeros(3, np.float32)


def open_slow_line(target):
    """Pass bytes on to a port, and back, no faster than the rate; return the port to connect to."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source, sink):
        with suppress(OSError):
            while data := source.recv(2**14):
                sink.sendall(data)
                time.sleep(len(data) / RATE)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept():
        with listener, listener.accept()[0] as near, socket.create_connection(("127.0.0.1", target)) as far:
            back = threading.Thread(target=pump, args=(far, near), daemon=True)
            back.start()
            pump(near, far)
            back.join()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


@pytest.fixture
def run(kits):
    """Return both ends of a run with one party, in which messages of any size may be sent."""
    desk = Desk("a")
    with Listener(desk.session.host, open_kit(kits / "server"), "127.0.0.1:0") as listener:
        listener.start()
        address = f"localhost:{open_slow_line(listener.port)}"
        dialing = Dialing(open_kit(kits / "a"), address, 20.0, logger([]))
        party = ClientSession(dialing, ToyClientHandshake("a", {0: START}))

        def begin():
            desk.session.gather()
            desk.session.begin_attempt(1, 0, [digest(START)], lambda head, size: None)

        role = Role("server", begin)
        party.open()
        party.prepare(lambda head, size: None)
        party.confirm(party.await_attempt())
        role.outcome(20)
        yield desk.session, party
        party.close()


def test_a_party_hears_why_the_run_ends_though_an_answer_is_under_way(run):
    server, party = run
    role = Role("party", lambda: party.receive(Receive((Joint,), key(0, 0))))
    server.broadcast(Joint(key(0, 0), LONG))
    time.sleep(1.0)  # a part of it is under way
    server.announce_failure(TrainingError("party 'b' failed: its disk is full"), 0.0)
    role.join(20)
    assert isinstance(role.error, TrainingError)
    assert str(role.error) == "the run was stopped: party 'b' failed: its disk is full"


def test_the_server_hears_why_a_party_fails_though_its_message_is_under_way(run):
    server, party = run
    role = Role("server", lambda: server.receive(Receive((Partial,), key(0, 0))))
    party.send(Partial(key(0, 0, client=0, attempt=1), LONG))
    time.sleep(1.0)
    party.fail(TrainingError("its disk is full"))
    role.join(20)
    assert isinstance(role.error, TrainingError)
    assert str(role.error) == "party 'a' failed: its disk is full"
