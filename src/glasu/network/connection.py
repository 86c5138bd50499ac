"""A party's connection to the server. It is opened with backoff and reopened when it breaks; unread data is limited.

Threads: gRPC's reader calls `_arrive`, gRPC's writer runs `FrameStream.yield_frames`, and the party's main thread calls
the other methods. `changed` is the only lock.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glasu.errors import AbsenceError, GlasuError, ProtocolError, TrainingError, TransportError
from glasu.network import control
from glasu.network.connection_codes import ADVICE, DEFAULT_ADVICE, ConnectionCode, Disconnection, describe_end
from glasu.network.frames import CONTROL, MAX_FRAME, PIECE, Channel, Frame, make_control_frame, read_frame
from glasu.network.handshake import Payload, RefusalError
from glasu.network.log_lines import LimitedLog
from glasu.network.transport import ClientStream, FrameStream, SessionLock
from glasu.pki.kit import Kit

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # seconds between attempts to connect
ANSWER_WITHIN = 20.0  # seconds that one attempt to connect may take, even if `wait` is shorter
SILENT_AFTER = 10.0  # seconds without any frame after which the party logs that the server is silent
LOGGED_EVERY = 30.0  # seconds between two log lines about the same absence
LONGEST_SILENCE = 300.0  # seconds without content before a party gives up; a waiting server sends a notice every minute
Connect = Callable[[Kit, str, FrameStream, Callable[[ClientStream, bytes | Disconnection], None]], ClientStream]


@dataclass(frozen=True)
class ConnectOptions:
    """The server to connect to, and how to connect. Tests replace the functions, for example to avoid waiting."""

    kit: Kit
    address: str  # address of the server, host:port
    wait: float  # seconds that the server may be unreachable
    log: logging.Logger
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2)  # spreads the parties' attempts
    connect: Connect = ClientStream


class Inbound:
    """The state of the incoming side of one stream. Numbered frames are not part of it: they go to the channel."""

    def __init__(self, now: float) -> None:
        self.welcome: control.Welcome | None = None
        # Why the stream ended. A Disconnection leads to another attempt to connect. A GlasuError ends the session: the
        # server has sent a reason or an invalid frame.
        self.end: Disconnection | GlasuError | None = None
        self.frame_at = self.content_at = now  # times of the last frame, and of the last one that is not an ack


class Connection:
    """Numbered frames to and from the server, over a sequence of streams."""

    def __init__(self, options: ConnectOptions, hello: Callable[[], Payload]) -> None:
        """Prepare a connection; `hello` returns the payload of the first frame of every stream."""
        self._options, self._hello = options, hello
        self.changed = SessionLock()
        self.channel = Channel()  # the numbered frames exchanged with one process of the server
        self._inbound = Inbound(options.clock())
        self._notices = LimitedLog(options.log, options.clock)  # a hostile server must not fill this party's disk
        self._stream: ClientStream | None = None
        self._process = secrets.token_hex(8)  # the random name of this process
        self._run: str | None = None  # set when the run begins; from then on, `connect` ignores servers of other runs
        self._delay = 0.0  # seconds before the next attempt to connect

    # --- called by the thread of the party --------------------------------------------------

    def connect(self, broken: Disconnection | None = None) -> control.Welcome:
        """Open a stream, with repeated attempts if necessary, and return the server's welcome.

        Args:
            broken: why the previous stream ended.
        """
        options, address = self._options, self._options.address
        since, logged, logged_at = options.clock(), broken, -math.inf
        while True:
            self._pause()
            ended = self._try_once()
            if isinstance(ended, control.Welcome):
                if logged_at > -math.inf:
                    options.log.info("connected to the server.")
                return ended
            why = describe_end(ended, address, options.kit.ca_fingerprint)
            if ended.code is ConnectionCode.REFUSED:
                raise TransportError(f"the server at {address} does not accept this party: {why}.")
            if ended.code.is_final:
                raise TransportError(f"this party does not accept the server at {address}: {why}.")
            waited = options.clock() - since
            if ended != logged or options.clock() - logged_at >= LOGGED_EVERY:
                long = f" since {waited:.0f} s" if waited >= LOGGED_EVERY else ""
                left = max(0.0, options.wait - waited)
                options.log.info(
                    "this party is waiting for the server at %s%s: %s. It tries again for %.0f s.",
                    address,
                    long,
                    why,
                    left,
                )
                logged, logged_at = ended, options.clock()
            if ended.code is ConnectionCode.CLOSED:
                self._delay = FIRST_DELAY  # a flood of connections may occupy all places at the server, so retry soon
            if waited + self._delay > options.wait:
                raise AbsenceError(
                    f"waited {options.wait:.0f} s for the server at {address}: {why}; saved work is kept. "
                    f"{ADVICE.get(ended.code, DEFAULT_ADVICE)}"
                )

    def pin_run(self) -> None:
        """Accept only the run of the last welcome. From now on, a server with another run counts as unreachable."""
        with self.changed:
            self._delay = 0.0  # an attempt begins, so a broken stream is reopened immediately
            if self._inbound.welcome is not None:
                self._run = self._inbound.welcome.run

    def take(self, what: str) -> Frame | control.Welcome:
        """Return the next numbered frame, or the welcome of a new server process, which knows no earlier frames."""
        renewed = self.wait_until(lambda: bool(self.channel.inbox), what)
        if renewed is not None:
            return renewed
        with self.changed:
            frame: Frame = self.channel.pop()
            self.changed.notify_all()  # an acknowledgement may be due
            return frame

    def wait_until(self, done: Callable[[], bool], what: str) -> control.Welcome | None:
        """Wait until `done` returns True, and reconnect whenever the stream breaks.

        Returns:
            None if `done` returned True; otherwise the welcome of a new server process, which does not know earlier
            frames.
        """
        patience, log_after = max(self._options.wait, LONGEST_SILENCE), SILENT_AFTER
        while True:
            with self.changed:
                inbound = self._inbound
                if isinstance(inbound.end, GlasuError):
                    raise inbound.end
                if done():
                    return None
                if (ended := inbound.end) is None:
                    log_after = self._log_silence(log_after)
                    if self._options.clock() - inbound.content_at >= patience:
                        raise AbsenceError(
                            f"waited {patience:.0f} s {what}, and received nothing from the server at "
                            f"{self._options.address}; saved work is kept. Start the same command again."
                        )
                    self.changed.wait(1.0)
                    continue
            welcome = self.connect(ended)
            if not welcome.resumed:
                return welcome

    @property
    def is_over(self) -> bool:
        """Whether the server has stopped the run, or has refused this party."""
        return isinstance(self._inbound.end, RefusalError | TrainingError)

    def close(self, *last: bytes, seconds: float = 0.0) -> None:
        """End the connection. Wait up to `seconds` until `last` is sent; queued numbered frames are not sent."""
        if self._stream is not None:
            self._stream.outgoing.close(*last)
            self._stream.close(seconds)

    # --- helpers --------------------------------------------------------------------------------

    def _pause(self) -> None:
        self.close()
        if self._delay:
            self._options.sleep(self._delay * self._options.jitter())
        self._delay = max(FIRST_DELAY, min(2 * self._delay, LONGEST_DELAY))

    def _try_once(self) -> control.Welcome | Disconnection:
        """Open one stream; return the welcome, or the reason for the failure."""
        payload = self._hello()  # computed before the stream opens, because the server waits for the hello only briefly
        options = self._options
        with self.changed:
            inbound = self._inbound = Inbound(options.clock())
            outgoing = FrameStream(self.changed)
            received, server = self.channel.received, self.channel.process or None
            hello = control.Hello(process=self._process, server=server, received=received, payload=payload)
            outgoing.send(make_control_frame(hello))
            self._stream = options.connect(options.kit, options.address, outgoing, self._arrive)
            log_after, deadline = SILENT_AFTER, options.clock() + ANSWER_WITHIN
            while inbound.welcome is None and inbound.end is None:
                if options.clock() >= deadline:
                    return Disconnection(ConnectionCode.NO_ANSWER)
                log_after = self._log_silence(log_after)
                self.changed.wait(0.5)
            if isinstance(inbound.end, GlasuError):
                raise inbound.end
            return inbound.welcome or inbound.end or Disconnection(ConnectionCode.CLOSED)

    def _log_silence(self, log_after: float) -> float:
        """Log that the server is silent; return the length of silence after which to log again."""
        silent = self._options.clock() - self._inbound.frame_at
        if silent < SILENT_AFTER:
            if log_after > SILENT_AFTER:
                self._options.log.info("the server at %s answers again.", self._options.address)
            return SILENT_AFTER
        if silent < log_after:
            return log_after
        self._options.log.info("the server at %s has been silent for %.0f s.", self._options.address, silent)
        return silent + LOGGED_EVERY

    # --- called by the thread that reads the stream -----------------------------------------------

    def _arrive(self, stream: ClientStream, event: bytes | Disconnection) -> None:
        """Process a frame, or the end of this stream. Frames after the end are ignored."""
        try:
            frame = None if isinstance(event, Disconnection) else read_frame(event)
            with self.changed:
                if stream is not self._stream or self._inbound.end is not None:
                    return
                if isinstance(event, Disconnection):
                    self._inbound.end = event
                elif frame is not None:
                    self._take(stream.outgoing, frame)
                self.changed.notify_all()
                while stream is self._stream and stream.outgoing.is_open and self.channel.is_overrun:
                    self.changed.wait(1.0)  # the server has sent more than its window allows
        except Exception as error:  # every exception: this thread must not end without a report
            with self.changed:
                if stream is self._stream and self._inbound.end is None:
                    kind = type(error) if isinstance(error, ProtocolError) else ProtocolError
                    self._inbound.end = kind(f"from the server: {error}")
                    self.changed.notify_all()

    def _take(self, outgoing: FrameStream, frame: Frame) -> None:
        inbound = self._inbound
        inbound.frame_at = self._options.clock()
        if frame.kind == CONTROL and frame.number == 0:
            self._take_unnumbered(outgoing, control.read_control(frame.body, MAX_FRAME))
        elif inbound.welcome is None:
            raise ProtocolError("received a frame before the welcome.")
        elif self.channel.accept(frame):
            self.channel.put(frame, len(frame.body))  # parsed when it is taken, because a server may send many
            inbound.content_at = inbound.frame_at
            if frame.kind == PIECE:  # other frames can also arrive in a handshake that fails
                self._delay = 0.0

    def _take_unnumbered(self, outgoing: FrameStream, message: Any) -> None:
        inbound = self._inbound
        if isinstance(message, control.Welcome | control.Refused) and self._run not in (None, message.run):
            inbound.end = Disconnection(ConnectionCode.ANOTHER_RUN, str(self._run))
            return
        match message:
            case control.Notice(line):
                self._notices.write_counts()
                self._notices.write(line, "the server")
                inbound.content_at, self._delay = inbound.frame_at, 0.0
            case control.Stopped(code, reason):
                inbound.end = TrainingError(f"the run was stopped: {reason}", code=code)  # not this party's fault
            case control.Refused(code, reason, table):
                inbound.end = RefusalError(code, f"the server does not accept this party: {reason}", table)
            case control.Welcome() if inbound.welcome is None:
                self._take_welcome(outgoing, message)
            case _:
                raise control.refuse_control(message)

    def _take_welcome(self, outgoing: FrameStream, welcome: control.Welcome) -> None:
        if not welcome.resumed:
            self.channel = Channel(welcome.server)
        elif welcome.server == self.channel.process:
            self.channel.outbox.rewind(welcome.received)
        else:
            raise ProtocolError("the server resumes a session that this party does not know.")
        outgoing.attach(self.channel)
        self._inbound.welcome = welcome
