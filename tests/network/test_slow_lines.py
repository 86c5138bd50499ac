"""Why a run ends is heard on a slow line too, ahead of what was still to be sent."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from network.test_server_session import HELLO, Desk

from glasu.errors import TrainingError
from glasu.network.frames import CONTROL, PIECE, Assembler, control, pieces
from glasu.network.transport import Line, listening
from glasu.pki.kit import open_kit
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Partial
from glasu.wire.message_key import Key, Phase

RATE = 1e6  # bytes per second
KEY = Key(run=bytes(12), phase=Phase.TRAINING, client=0, layer=1, incarnation=1, attempt=1)
LONG = list(pieces(encode(Partial(key=KEY, value=np.zeros((4096, 1024), np.float32)))))  # at this rate it takes 16 s


def slow_line(target):
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


class Party:
    """The party's end of a line: what control frames have come, and that it hangs up after the last one."""

    def __init__(self, kits, port):
        self.came, self.welcomed, self.ended = [], threading.Event(), threading.Event()
        self.assembler = Assembler(2**25)
        self.line = Line(open_kit(kits / "a", "party"), f"localhost:{slow_line(port)}", self._arrived)
        self.line.send(control("hello", **HELLO))
        assert self.welcomed.wait(20)

    def _arrived(self, line, event):
        if isinstance(event, str):
            self.ended.set()
        elif event[0] == PIECE:
            self.assembler.add(event, lambda head, size: True)  # refuses one that does not follow the one before
        elif event[0] == CONTROL:
            self.came.append(json.loads(event[1:]))
            self.welcomed.set()
            if self.came[-1]["kind"] == "stopped":
                threading.Thread(target=line.close, daemon=True).start()


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path, "abc")


def test_a_party_hears_why_the_run_ends_though_an_answer_is_under_way(desk, kits):
    with listening(desk.hub, open_kit(kits / "server", "server"), "127.0.0.1:0") as port:
        party = Party(kits, port)
        for piece in LONG:
            desk.hub.links["a"].send(piece)
        desk.hub.announce_failure(TrainingError("party 'b' failed: its disk is full"), 20.0)
    assert party.ended.wait(20)
    assert party.came[-1] == {"kind": "stopped", "why": "party 'b' failed: its disk is full"}


def test_the_server_hears_why_a_party_fails_though_its_message_is_under_way(desk, kits):
    with listening(desk.hub, open_kit(kits / "server", "server"), "127.0.0.1:0") as port:
        party = Party(kits, port)
        link, desk.hub.begin = desk.hub.links["a"], {"attempt": 1, "round": 0}
        link.ready, link.assembler = 1, Assembler(2**25)
        for piece in LONG:
            party.line.send(piece)
        party.line.end_with(control("failed", why="its disk is full"))
        assert "party 'a' failed: its disk is full" in str(desk.hub.failure)
