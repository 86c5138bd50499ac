"""A party's connection to the server: opened with backoff, opened again when it breaks, with a bounded inbound queue.

Threads: gRPC's reader calls `_arrive`, gRPC's writer runs `Stream.outgoing`, the thread of the party calls everything
else. `changed` is the only lock.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from glasu.errors import AbsenceError, GlasuError, ProtocolError, TrainingError, TransportError
from glasu.network.connection_codes import (
    ConnectionCode,
    Disconnection,
    Endpoint,
    describe,
    describe_absence,
    describe_refusal,
)
from glasu.network.frames import (
    ACK,
    CONTROL,
    Channel,
    Control,
    Frame,
    pack_control,
    pack_frame,
    read_control,
    read_frame,
)
from glasu.network.handshake import Payload, RefusalError
from glasu.network.sanitize import SENTENCES, printable, printable_lines
from glasu.network.session_hello import PROTOCOL, Welcome, read_welcome
from glasu.network.transport import Line, Stream
from glasu.pki.kit import Kit

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # seconds between attempts to connect
ANSWER_WITHIN = 20.0  # seconds that one attempt to connect may take, however short `wait` is
SILENT_AFTER = 10.0  # seconds without a frame, also without a sign of life, after which the party says so
TOLD_EVERY = 30.0  # seconds between two lines about the same absence
SILENCE = 300.0  # seconds: a server that waits for a party says so every minute
LAST_WORD = 10.0  # seconds that the reason of a failure may take to leave
LINE = Callable[[Kit, str, Stream, Callable[[Line, bytes | Disconnection], None]], Line]


@dataclass(frozen=True)
class Dialing:
    """The server to call, and how; tests replace the parts that take time."""

    kit: Kit
    address: str  # of the server, host:port
    wait: float  # seconds that the server may be away
    log: logging.Logger
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2)  # spreads the parties
    open_line: LINE = Line

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.address, self.kit.ca_fingerprint)


class Inbound:
    """Frames that arrived and were not used yet. The numbered ones outlive a line; the rest belongs to one line."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.frames: deque[Frame] = deque()  # numbered
        self.welcome: Welcome | None = None
        self.ended: Disconnection | None = None  # the present line
        self.error: GlasuError | None = None  # what the server said at last, or an invalid frame of its
        self.heard = self.served = clock()  # when anything came, and when more than a sign of life came

    def begin_line(self) -> None:
        self.welcome, self.ended = None, None
        self.heard = self.served = self._clock()


class Connection:
    """Numbered frames to and from the server, over as many streams as it takes."""

    def __init__(self, dialing: Dialing, hello: Callable[[], Payload]) -> None:
        """Prepare; `hello` returns the payload of the first frame of every stream."""
        self._dialing, self._hello = dialing, hello
        self.changed = threading.Condition()
        self.channel = Channel()  # shared with one process of the server
        self._inbound = Inbound(dialing.clock)
        self._line: Line | None = None
        self._process, self._server = secrets.token_hex(8), ""  # the names of both processes
        self._run: str | None = None  # once it has begun, no other run will do
        self._delay = 0.0  # before the next attempt to connect

    # --- for the thread of the party --------------------------------------------------------

    def connect(self, broken: Disconnection | None = None) -> Welcome:
        """Open a stream, as often as it takes, and return the server's welcome.

        Args:
            broken: why the stream before ended.
        """
        dialing, end = self._dialing, self._dialing.endpoint
        since, said, at = dialing.clock(), broken, -math.inf
        while True:
            self._pause()
            ended = self._try_once()
            if isinstance(ended, Welcome):
                if at > -math.inf:
                    dialing.log.info("connected to the server.")
                return ended
            if ended.code.is_final:
                raise TransportError(describe_refusal(ended, end))
            waited = dialing.clock() - since
            if ended != said or dialing.clock() - at >= TOLD_EVERY:
                long = f" since {waited:.0f} s" if waited >= TOLD_EVERY else ""
                dialing.log.info("waiting for the server at %s%s: %s.", end.address, long, describe(ended, end))
                said, at = ended, dialing.clock()
            if waited + self._delay > dialing.wait:
                raise AbsenceError(describe_absence(ended, end, dialing.wait))

    def pin(self, run: str) -> None:
        """Hold on to this run: a server that offers another one counts as absent."""
        with self.changed:
            self._run = run

    def take(self, what: str) -> Frame | Welcome:
        """Return the next numbered frame, or the welcome of a server process that knows nothing of earlier frames."""
        inbound = self._inbound
        renewed = self.wait_until(lambda: bool(inbound.frames), what)
        if renewed is not None:
            return renewed
        with self.changed:
            frame = inbound.frames.popleft()
            self.channel.release(len(frame.body))
            self.changed.notify_all()  # an acknowledgement may be due
            return frame

    def wait_until(self, done: Callable[[], bool], what: str) -> Welcome | None:
        """Wait until `done`, and connect again as often as it takes; return a welcome as `take` does."""
        inbound, patience = self._inbound, max(self._dialing.wait, SILENCE)
        told = SILENT_AFTER
        while True:
            with self.changed:
                if inbound.error is not None:
                    raise inbound.error
                if done():
                    return None
                if (ended := inbound.ended) is None:
                    told = self._note_silence(told)
                    if self._dialing.clock() - inbound.served >= patience:
                        raise AbsenceError(
                            f"waited {patience:.0f} s {what}, and heard nothing from the server at "
                            f"{self._dialing.address}; saved work is kept. Start the same command again."
                        )
                    self.changed.wait(1.0)
                    continue
            welcome = self.connect(ended)
            if not welcome.resumed:
                return welcome

    def send_last_word(self, kind: str, **fields: object) -> None:
        """Send a control message ahead of everything that waits, and end the connection."""
        if self._line is not None:
            self._line.stream.close(pack_frame(CONTROL, pack_control(kind, **fields)))
            self._line.close(LAST_WORD)

    def hang_up(self, seconds: float) -> None:
        """Acknowledge everything, and end the connection after up to `seconds`."""
        if self._line is not None:
            self._line.stream.close(pack_frame(ACK, acknowledged=self.channel.received))
            self._line.close(seconds)

    def close(self) -> None:
        """End the connection immediately."""
        if self._line is not None:
            self._line.close()

    # --- helpers --------------------------------------------------------------------------------

    def _pause(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._delay:
            self._dialing.sleep(self._delay * self._dialing.jitter())
        self._delay = max(FIRST_DELAY, min(2 * self._delay, LONGEST_DELAY))

    def _try_once(self) -> Welcome | Disconnection:
        """Open one stream; return the welcome, or why there is none."""
        payload = dict(self._hello())  # before the stream: the server does not wait long for it
        inbound, dialing = self._inbound, self._dialing
        with self.changed:
            inbound.begin_line()
            stream = Stream(self.changed)
            hello = {"protocol": PROTOCOL, "process": self._process, "server": self._server or None}
            hello |= {"received": self.channel.received, "payload": payload}
            stream.send(pack_frame(CONTROL, pack_control("hello", **hello)))
            self._line = dialing.open_line(dialing.kit, dialing.address, stream, self._arrive)
            told, deadline = SILENT_AFTER, dialing.clock() + ANSWER_WITHIN
            while inbound.welcome is None and inbound.ended is None and inbound.error is None:
                if dialing.clock() >= deadline:
                    return Disconnection(ConnectionCode.NO_ANSWER)
                told = self._note_silence(told)
                self.changed.wait(0.5)
            if inbound.error is not None:
                raise inbound.error
            return inbound.welcome or inbound.ended or Disconnection(ConnectionCode.CLOSED)

    def _note_silence(self, told: float) -> float:
        """Report a silence of the server; return at which length of it to report again."""
        silent = self._dialing.clock() - self._inbound.heard
        if silent < SILENT_AFTER:
            if told > SILENT_AFTER:
                self._dialing.log.info("the server at %s answers again.", self._dialing.address)
            return SILENT_AFTER
        if silent < told:
            return told
        self._dialing.log.info("the server at %s has been silent for %.0f s.", self._dialing.address, silent)
        return silent + TOLD_EVERY

    # --- for gRPC's reader ------------------------------------------------------------------------

    def _arrive(self, line: Line, event: bytes | Disconnection) -> None:
        """Take a frame, or the end of a line."""
        try:
            frame = None if isinstance(event, Disconnection) else read_frame(event)
            control = read_control(frame.body) if frame is not None and frame.kind == CONTROL else None
            with self.changed:
                if line is not self._line:
                    return
                if frame is None:
                    assert isinstance(event, Disconnection)
                    self._inbound.ended = self._inbound.ended or event
                else:
                    self._take(line, frame, control)
                self.changed.notify_all()
                while line is self._line and line.stream.is_open and self.channel.is_overrun:
                    self.changed.wait(1.0)  # the server ignores the window
        except Exception as error:  # of any kind: this thread must not end in silence
            with self.changed:
                if line is self._line:
                    kind = type(error) if isinstance(error, ProtocolError) else ProtocolError
                    self._inbound.error = kind(f"from the server: {error}")
                    self.changed.notify_all()

    def _take(self, line: Line, frame: Frame, control: Control | None) -> None:
        inbound = self._inbound
        inbound.heard = self._dialing.clock()
        if control is not None and frame.number == 0:
            self._take_unnumbered(line, control)
        elif inbound.welcome is None:
            raise ProtocolError("a frame came before the welcome.")
        elif self.channel.accept(frame):
            self.channel.hold(len(frame.body))
            inbound.frames.append(frame)
            inbound.served = inbound.heard
            if control is None or control.kind != "report":  # that one comes with every welcome; the rest shows that
                self._delay = 0.0  # the server really serves

    def _take_unnumbered(self, line: Line, control: Control) -> None:
        inbound, run = self._inbound, control.fields.get("run")
        if control.kind in ("welcome", "refused") and self._run is not None and run not in (None, self._run):
            inbound.ended = Disconnection(ConnectionCode.ANOTHER_RUN, self._run)
        elif control.kind == "notice":
            self._dialing.log.info("%s", printable(control.fields.get("line"), SENTENCES))
            inbound.served, self._delay = inbound.heard, 0.0
        elif control.kind in ("stopped", "refused"):
            inbound.error = read_last_word(control)
        elif control.kind == "welcome" and inbound.welcome is None:
            welcome = read_welcome(control)
            if welcome.resumed and welcome.server == self._server:
                self.channel.resume(welcome.received)
            elif welcome.resumed:
                raise ProtocolError("the server continues a conversation that this party does not know.")
            else:
                self.channel, self._server = Channel(), welcome.server
                inbound.frames.clear()
            line.stream.attach(self.channel)
            inbound.welcome = welcome
        else:
            raise ProtocolError(f"control message of unknown kind {printable(control.kind, 60)!r}.")


def read_last_word(control: Control) -> GlasuError:
    """Return the error with which the server ends the run, or this party's part in it."""
    why = printable(control.fields.get("reason"), SENTENCES)
    if control.kind == "stopped":
        return TrainingError(f"the run was stopped: {why}")  # this party's input was good
    code, table = printable(control.fields.get("code"), 60), printable_lines(control.fields.get("table"))
    return RefusalError(code, f"the server does not accept this party: {why}", table)
