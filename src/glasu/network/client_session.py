"""A party's session with the server: a stream that is opened again when it breaks, nothing lost, nothing twice."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import Any

from glasu.errors import (
    AbsenceError,
    ConfigError,
    GlasuError,
    ProtocolError,
    SettingsError,
    TrainingError,
    TransportError,
    public_reason,
)
from glasu.network.connect_errors import ANOTHER_RUN, refusal_told
from glasu.network.frames import (
    ALIVE,
    CONTROL,
    PIECE,
    RECEIPT,
    WINDOW,
    Assembler,
    Limits,
    control,
    pieces,
    read_control,
)
from glasu.network.sanitize import SENTENCES, printable, printable_lines
from glasu.network.transport import INBOUND_FRAMES, Line, drain, unreachable
from glasu.pki.kit import Kit
from glasu.protocol.message_bytes import Head, decode, encode
from glasu.protocol.messages import Message
from glasu.wire.message_key import Key

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
ANSWER_WITHIN = 20.0  # seconds that one attempt to connect may take, however short --wait is
SILENT_AFTER = 10.0  # seconds without a frame, also without a sign of life, after which a party says so
TOLD_EVERY = 30.0  # seconds: whoever waits for the server says so at least every minute
NOT_WORTH_TRYING = ("refused:", "CERTIFICATE_VERIFY_FAILED", "Hostname Verification")  # no waiting mends these
SILENCE = 300.0  # seconds: whoever serves says something every minute while it waits for somebody
About = tuple[int, int, int, int, int]


class NewAttempt(Exception):  # noqa: N818 - not an error: the run goes on from another round
    """The server asks everyone to go on after a certain round."""

    def __init__(self, begin: dict[str, Any]) -> None:
        super().__init__(begin)
        self.begin = begin


class Session:
    """The party's end of the protocol between processes; `exchange` is what a script's messages go through."""

    def __init__(
        self,
        kit: Kit,
        address: str,
        hello: Callable[[], dict[str, Any]],
        wait: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is sent before `open`.

        Args:
            kit: the party's.
            address: of the server.
            hello: returns what the party says of itself, now.
            wait: seconds that the server may be away.
            tell: is told what happens, in lines.
            clock: tells seconds.
        """
        self.kit, self.address, self.wait, self.tell, self.clock = kit, address, wait, tell, clock
        self._limits: Limits | None = None
        self.welcome: dict[str, Any] = {}
        self.report: Callable[[], dict[str, Any]] | None = None
        self._hello = hello
        self._line: Line | None = None
        self._delay = 0.0  # before the next attempt to connect
        self._events: Queue[bytes | str] = Queue(INBOUND_FRAMES)  # of the present line
        self._assembler = Assembler(0)
        self._pending: dict[About, bytes] = {}
        self._keys: dict[About, Key] = {}  # of what was sent together
        self._answers: dict[About, Message] = {}
        self._goodbye = False
        self._over = False  # the server has ended the run, or this party's part in it
        self._begun = False  # the run has begun, with this process
        self.moved: Callable[[dict[str, Any]], None] = lambda welcome: None  # is told of another run's welcome

    def open(self) -> dict[str, Any]:
        """Connect and return what the server says about the run."""
        self._connect()
        return self.welcome

    def close(self) -> None:
        """Let go of the server."""
        if self._line is not None:
            self._line.finish() if self._goodbye else self._line.close()
            drain(self._events)

    def allow(self, limits: Limits) -> None:
        """Accept answers within these limits; before, none is accepted."""
        self._limits = limits
        self._assembler = Assembler(limits.largest)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a control frame."""
        assert self._line is not None
        self._line.send(control(kind, **fields))

    def fail(self, error: BaseException) -> None:
        """Tell the server, and through it everyone, why this party cannot go on, as far as that is for everybody."""
        if self._line is not None and not self._over and not isinstance(error, TransportError):
            self._line.end_with(control("failed", why=printable(public_reason(error), SENTENCES)))

    def decline(self, error: GlasuError) -> None:
        """Tell the server why this party will not take part as things are; the others go on waiting for it.

        Settings that differ are shown at both ends.
        """
        assert self._line is not None
        table = list(error.table) if isinstance(error, SettingsError) else []
        for line in table:
            self.tell(line)
        self.send("declined", why=printable(error.public, SENTENCES), table=table)
        self._over = True
        self._line.finish()

    def begin(self) -> dict[str, Any] | None:
        """Wait until the server says where to go on, when all parties are there; None: everyone is finished."""
        try:
            while not self._goodbye:
                self._step("for the other parties", None)
        except NewAttempt as attempt:
            return attempt.begin
        return None

    def wait_for_goodbye(self) -> None:
        """Wait until everyone is finished: until then, another party may need this one to do its last step again."""
        while not self._goodbye:
            self._step("for the others to finish", None)

    def exchange(self, messages: Sequence[Message], meanwhile: Callable[[], None] = lambda: None) -> list[Message]:
        """Send messages together and return their answers, however often the stream breaks in between.

        No more than WINDOW bytes wait for their answers before more are sent: the server makes room for as much.

        Args:
            messages: to be sent.
            meanwhile: is called once, when they have been sent.
        """
        self._answers, self._pending = {}, {}
        self._keys = {_about(message.key): message.key for message in messages}
        what, together = f"for the answer to {messages[0].key}", len(messages)
        for message in messages:
            while sum(map(len, self._pending.values())) >= WINDOW:
                self._step(what, together)
            content = self._pending[_about(message.key)] = encode(message)
            self._send_message(content)
        meanwhile()
        while self._pending:
            self._step(what, together)
        return [self._answers[about] for about in self._keys]

    def _send_message(self, content: bytes) -> None:
        assert self._line is not None
        for piece in pieces(content):
            self._line.send(piece)

    def _step(self, what: str, together: int | None) -> None:
        """Take the next thing that arrives; connect again where the stream broke."""
        patience = max(self.wait, SILENCE)
        event = self._next(patience)
        if event is None:
            raise AbsenceError(
                f"waited {patience:.0f} s {what}, and heard nothing from the server at {self.address}; nothing that "
                "was saved is lost. Start the same command again."
            )
        if isinstance(event, str):
            self._connect()
            for about in self._answers if together is not None and together > 1 else ():
                self._send_receipt(about)  # that of before may be lost
            for content in self._pending.values():
                self._send_message(content)
            return
        kind = event[0] if event else -1
        fields = read_control(event) if kind == CONTROL else {}
        if fields.get("kind") != "report":  # that comes with every welcome; the rest shows that the stream serves
            self._delay = 0.0
        if kind == CONTROL:
            self._control(fields)
        elif kind == PIECE:
            try:
                whole = self._assembler.add(event, self._admits)
                message = None if whole is None else decode(whole, self._assembler.head)
            except ProtocolError as error:
                raise ProtocolError(f"from the server, while waiting {what}: {error}") from None
            if message is not None:
                self._answer(message, together)
        else:
            raise ProtocolError(f"the server sent a frame of unknown kind {kind}.")

    def _answer(self, message: Message, together: int | None) -> None:
        about = _about(message.key)
        if about not in self._pending:
            return  # it came twice
        del self._pending[about]
        self._answers[about] = message
        if together is not None and together > 1:
            self._send_receipt(about)

    def _admits(self, head: Head, size: int) -> bool:
        """Tell whether an answer is awaited, before anything is allocated for it; refuse one that is too long."""
        if _about(head.key) not in self._pending:
            return False  # it came twice
        assert self._limits is not None
        self._limits.check(head, size)
        return True

    def _send_receipt(self, about: About) -> None:
        """Say that the answer to a message has arrived."""
        assert self._line is not None
        self._line.send(bytes([RECEIPT]) + self._keys[about].pack())

    def _control(self, fields: dict[str, Any]) -> None:
        kind = fields["kind"]
        if kind == "begin":
            self._begun = True
            raise NewAttempt(fields)
        if kind == "report" and self.report is not None:
            self.send("prepared", **self.report())
        elif kind == "notice":
            self.tell(printable(fields.get("line"), SENTENCES))
        elif kind == "goodbye":
            self._goodbye = True
        elif kind in ("stopped", "refused"):
            raise self._ended(fields)

    def _ended(self, fields: dict[str, Any]) -> GlasuError:
        """Return the error with which the server ends the run, or this party's part in it."""
        self._over = True
        why = printable(fields.get("why"), SENTENCES)
        if fields["kind"] == "stopped":
            return TrainingError(f"the run was stopped: {why}")  # whoever was the cause, this party's input was good
        for line in printable_lines(fields.get("table")):
            self.tell(line)
        return ConfigError(f"the server does not accept this party: {why}")

    def _next(self, seconds: float) -> bytes | str | None:
        """Return the next frame, why the stream ended, or None when nothing came in time.

        Signs of life are no frames: they only end a silence. `tell` reports a silence while it lasts.
        """
        deadline, heard, told = self.clock() + seconds, self.clock(), SILENT_AFTER
        while (left := deadline - self.clock()) > 0:
            try:
                event = self._events.get(timeout=min(left, 1.0))
            except Empty:
                if (silent := self.clock() - heard) >= told:
                    self.tell(f"the server at {self.address} has been silent for {silent:.0f} s.")
                    told = silent + TOLD_EVERY
                continue
            if told > SILENT_AFTER and not isinstance(event, str):
                self.tell(f"the server at {self.address} answers again.")
            if event != ALIVE:
                return event
            heard, told = self.clock(), SILENT_AFTER
        return None

    def _connect(self) -> None:
        """Open a stream, again and again if need be, and be accepted; pause where the one before brought nothing."""
        since, said, at = self.clock(), "", -math.inf  # what was said last, and when
        while True:
            if self._line is not None:
                self._line.close()
                drain(self._events)
            if self._delay:
                time.sleep(self._delay * random.uniform(0.8, 1.2))  # so that parties do not all come at once
            self._delay = max(FIRST_DELAY, min(2 * self._delay, LONGEST_DELAY))
            self._assembler = Assembler(0 if self._limits is None else self._limits.largest)
            hello = control("hello", **self._hello())  # before: the server does not wait long for it
            self._open_line().send(hello)
            event = self._next(ANSWER_WITHIN)
            if isinstance(event, bytes) and event[:1] == bytes([CONTROL]):
                fields = read_control(event)
                if fields["kind"] == "welcome":
                    if self._is_of_another_run(fields):
                        self.moved(fields)
                    self.welcome = fields
                    if said:
                        self.tell("connected to the server.")
                    return
                if not (self._begun and self._is_of_another_run(fields)):
                    raise self._ended(fields)
                event = f"{ANOTHER_RUN} than {self.welcome['run']}, of which this is a party"
            why = printable(event, SENTENCES) if isinstance(event, str) else "it does not answer"
            if any(word in why for word in NOT_WORTH_TRYING):
                raise TransportError(refusal_told(self.address, why))
            if why != said or self.clock() - at >= TOLD_EVERY:
                self.tell(f"the server at {self.address} is awaited{_for_long(self.clock() - since)}: {why}.")
                said, at = why, self.clock()
            if self.clock() - since + self._delay > self.wait:
                raise unreachable(self.address, self.wait, why)

    def _open_line(self) -> Line:
        """Open a stream with a new queue, which bounds the frames that this party holds unread."""
        events: Queue[bytes | str] = Queue(INBOUND_FRAMES)
        self._events, self._line = events, Line(self.kit, self.address, lambda line, event: events.put(event))
        return self._line

    def _is_of_another_run(self, fields: dict[str, Any]) -> bool:
        """Tell whether what a server says is about another run than the one that welcomed this party."""
        return bool(self.welcome) and fields.get("run") not in (None, self.welcome.get("run"))


def _for_long(seconds: float) -> str:
    return f" since {seconds:.0f} s" if seconds >= TOLD_EVERY else ""


def _about(key: Key) -> About:
    return key.attempt, int(key.phase), key.round, key.layer, key.chunk
