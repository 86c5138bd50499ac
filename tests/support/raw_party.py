"""A party made of raw frames, without gRPC: tests choose its frames and read the server's answers."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from glasu.network.connection_codes import Disconnection
from glasu.network.frames import CONTROL, MAX_PIECE, PIECE, Frame, pack_frame, read_frame
from glasu.network.roster import Attempt
from glasu.network.server_session import ServerSession
from glasu.network.transport import ClientStream, FrameStream, SessionLock
from glasu.pki.kit import Kit
from support.controls import Control, hello, pack_control, read_control
from support.roles import Role
from support.toy_run import RUN, Toy, ToyServerHandshake, logger

STATEMENT = {"rounds": {"0": "start"}}


class RawParty:
    """One stream of a party to a session's host."""

    def __init__(self, session: ServerSession, name: str) -> None:
        self.stream, self._number = session.host.open_stream(), 0
        self._incoming: SimpleQueue[bytes | None] = SimpleQueue()
        self.heard: list[Frame] = []
        frames: Iterator[bytes] = iter(self._incoming.get, None)
        self.reader = threading.Thread(target=session.host.attach, args=(name, self.stream, frames), daemon=True)
        self.writer = threading.Thread(target=self._listen, daemon=True)
        self.reader.start()
        self.writer.start()

    def _listen(self) -> None:
        self.heard.extend(map(read_frame, self.stream.yield_frames()))

    def send(self, *frames: bytes) -> None:
        """Send unchanged frames."""
        for frame in frames:
            self._incoming.put(frame)

    def send_control(self, kind: str, **fields: object) -> None:
        """Send a control message in the sequence."""
        self._send_numbered(CONTROL, pack_control(kind, **fields))

    def send_message(self, message: bytes, times: int = 1) -> None:
        """Send an encoded message in the sequence, each of its frames so often."""
        for offset in range(0, len(message), MAX_PIECE):
            piece = message[offset : offset + MAX_PIECE]
            self._send_numbered(PIECE, struct.pack("<QQ", len(message), offset) + piece, times)

    def _send_numbered(self, kind: int, body: bytes, times: int = 1) -> None:
        self._number += 1
        self.send(*[pack_frame(kind, body, number=self._number)] * times)

    def end(self) -> None:
        """End the stream, and wait until the server has read everything."""
        self._incoming.put(None)
        self.reader.join(20)
        self.writer.join(20)
        assert not self.reader.is_alive()
        assert not self.writer.is_alive()

    def controls(self) -> list[Control]:
        return [read_control(frame.body) for frame in list(self.heard) if frame.kind == CONTROL]

    def last_word(self) -> Control:
        """Return the server's last message after it has closed the stream."""
        self.writer.join(20)
        assert not self.writer.is_alive()
        return self.controls()[-1]


class ServerHarness:
    """A server session, its log, and raw parties."""

    def __init__(self, names: str = "ab", **options: Any) -> None:
        self.toy, self.log = Toy(parties=names), []
        self.handshake = options.pop("handshake", None) or ToyServerHandshake()
        options = {"wait": 20.0, **options}
        self.session = ServerSession(names, self.handshake, RUN, log=logger(self.log), **options)

    def connect(self, name: str, *frames: bytes) -> RawParty:
        """Open a stream that begins with these frames, by default a hello."""
        party = RawParty(self.session, name)
        party.send(*(frames or (hello(),)))
        return party

    def run(self, attempt: int = 1) -> list[RawParty]:
        """Connect every party and begin an attempt."""
        parties = [self.connect(name) for name in self.toy.parties]
        gathering = Role("gathering", self.session.gather)
        for party in parties:
            party.send_control("Statement", payload=STATEMENT)
        gathering.outcome(20)
        proposed = Attempt(attempt, 0, dict.fromkeys(self.toy.parties, "start"), self.toy.check_limits)
        beginning = Role("beginning", lambda: self.session.begin_attempt(proposed))
        for party in parties:
            wait_for(lambda party=party: any(control.kind == "ProposedAttempt" for control in party.controls()))
            party.send_control("Confirmation", attempt=attempt, digest="start")
        beginning.outcome(20)
        return parties


def wait_for(done: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something holds."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if done():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen in time")


def answer(kit: Kit, port: int, host: str = "localhost") -> bytes | Disconnection:
    """Connect with a kit over gRPC, send a hello, and return the first answer."""
    arrived: SimpleQueue[bytes | Disconnection] = SimpleQueue()
    outgoing = FrameStream(SessionLock())
    outgoing.send(hello())
    stream = ClientStream(kit, f"{host}:{port}", outgoing, lambda stream, event: arrived.put(event))
    try:
        return arrived.get(timeout=60)
    finally:
        stream.close()
