"""A party's session with the server. Messages are neither lost nor repeated when the stream breaks.

open -> prepare -> await_attempt -> confirm -> send, receive ... -> finish -> await_attempt. If `receive` raises
NewAttempt, the caller must load the proposed checkpoint and confirm again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glasu.errors import GlasuError, ProtocolError, TransportError, get_code, get_public_message
from glasu.network import control
from glasu.network.connection import Connection, ConnectOptions
from glasu.network.control import ProposedAttempt
from glasu.network.frames import ACK, CONTROL, MAX_FRAME, Assembler, CheckLimits, make_control_frame, pack_frame
from glasu.network.handshake import ClientHandshake, Payload, RefusalError, ResultPayload
from glasu.network.states import PeerEvent, PeerState, make_peer_machine
from glasu.protocol.message_bytes import Head, decode, encode
from glasu.protocol.messages import Message
from glasu.protocol.requests import Receive

CLOSED_WITHIN = 2.0  # seconds to wait until the stream has ended, so that the server receives the last frame
REASON_SENT_WITHIN = 10.0  # seconds to wait until the reason for a failure is sent
ENDED = (PeerState.CLOSED, PeerState.REFUSED, PeerState.FAILED)


class NewAttempt(Exception):  # noqa: N818 - not an error: another attempt follows
    """The server proposes another attempt."""

    def __init__(self, attempt: ProposedAttempt) -> None:
        super().__init__(attempt)
        self.attempt = attempt


class ClientSession:
    """The party's side of a session."""

    def __init__(self, options: ConnectOptions, handshake: ClientHandshake) -> None:
        """Prepare the session. `open` sends the first frame.

        Args:
            options: the server, the kit, and how long to wait.
            handshake: makes the statements and decisions of this party.
        """
        self._handshake, self._log = handshake, options.log
        self.connection = Connection(options, handshake.hello)
        self._machine = make_peer_machine()
        self._check_limits: CheckLimits | None = None  # set by `prepare`
        self.goodbye: Payload = {}  # the payload of the server's goodbye

    # --- the handshake ------------------------------------------------------------------------

    def open(self) -> None:
        """Connect, and pass the server's welcome to the handshake."""
        self._renew(self.connection.connect())

    def prepare(self, check_limits: CheckLimits) -> None:
        """State the settings and checkpoints of this party.

        Args:
            check_limits: refuses a message that is too long for this run, from its header and size.
        """
        self._check_limits = check_limits
        self._state_again()

    def await_attempt(self) -> ProposedAttempt | None:
        """Wait until the server proposes an attempt to all parties; None: the run is complete.

        Even after `finish`, another attempt may follow, for example if another party restarts.
        """
        try:
            while self._machine.state is not PeerState.CLOSED:
                self._take_frame(None, "for the other parties")
        except NewAttempt as proposed:
            return proposed.attempt
        return None

    def confirm(self, attempt: ProposedAttempt) -> None:
        """Confirm that this party's checkpoint is loaded. The exchange of messages begins."""
        self._machine.advance(PeerEvent.CONFIRM)
        self.connection.pin_run()
        self.connection.channel.assembler = Assembler()
        self._send_control(control.Confirmation(attempt.number, attempt.digest))

    # --- messages -----------------------------------------------------------------------------

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages; wait while the outbox is full.

        If the inbox is full as well, `send` does not wait, and the messages stay in the memory of this party. The
        server may be waiting for this party to empty the inbox, which only `receive` does. If `send` waited as well,
        both sides would wait for each other.
        """
        connection, contents = self.connection, [encode(message) for message in messages]
        renewed = connection.wait_until(
            lambda: not connection.channel.outbox.is_full or connection.channel.is_full,
            f"to send {type(messages[-1]).__name__} for {messages[-1].key}",
        )
        if renewed is not None:
            self._renew(renewed)  # a new server process: the attempt is over, and `receive` raises NewAttempt
            return
        with connection.changed:
            connection.channel.outbox.put_bundle(contents)
            connection.changed.notify_all()

    def receive(self, expected: Receive) -> Message:
        """Return the next message from the server. It must match `expected`."""
        what = f"for {expected}"
        while True:
            message = self._take_frame(expected, what)
            if message is not None:
                return message

    # --- the end ------------------------------------------------------------------------------

    def finish(self, attempt: ProposedAttempt, result: ResultPayload) -> None:
        """Report that this party's results are written."""
        self._machine.advance(PeerEvent.FINISH)
        self._send_control(control.PartyResult(attempt.number, result))

    def fail(self, error: BaseException) -> None:
        """Report this party's failure. Only the public part of the message is sent."""
        if self._machine.state in ENDED or self.connection.is_over or isinstance(error, TransportError):
            return
        self._machine.advance(PeerEvent.FAIL)
        message = control.Failed(get_code(error), get_public_message(error))
        self.connection.close(make_control_frame(message), seconds=REASON_SENT_WITHIN)

    def close(self) -> None:
        """End the connection. First acknowledge a goodbye, because the server waits for that."""
        if self._machine.state is PeerState.CLOSED:
            self.connection.close(pack_frame(ACK, acknowledged=self.connection.channel.received), seconds=CLOSED_WITHIN)
        self.connection.close()

    # --- helpers ------------------------------------------------------------------------------

    def _send_control(self, message: object) -> None:
        with self.connection.changed:
            self.connection.channel.outbox.put_control(message)
            self.connection.changed.notify_all()

    def _renew(self, welcome: control.Welcome) -> None:
        """Begin again with a server process that does not know this party's frames."""
        self._machine.advance(PeerEvent.ADMIT)
        try:
            self._handshake.welcome(welcome.payload)
        except GlasuError as error:
            self._decline(error)
            raise
        if self._check_limits is not None:
            self._state_again()

    def _decline(self, error: GlasuError) -> None:
        """Decline the server's offer and send the reason. The run keeps waiting for this party.

        If settings differ, a table of the differences is logged here and at the server.
        """
        table = error.table if isinstance(error, RefusalError) else ()
        message = control.Declined(error.code, error.public_message, table)
        for line in message.table:
            self._log.info("%s", line)
        self._machine.advance(PeerEvent.REFUSE)
        self.connection.close(make_control_frame(message), seconds=REASON_SENT_WITHIN)

    def _state_again(self) -> None:
        self._machine.advance(PeerEvent.PREPARE)
        self._send_control(control.Statement(self._handshake.statement()))

    def _take_frame(self, expected: Receive | None, what: str) -> Message | None:
        """Process the next frame. If it completes a message, return the message, otherwise None."""
        frame = self.connection.take(what)
        if isinstance(frame, control.Welcome):
            self._renew(frame)
            return None
        if frame.kind == CONTROL:
            try:
                message = control.read_control(frame.body, MAX_FRAME)
            except ProtocolError as error:
                raise ProtocolError(f"from the server: {error}") from None
            self._take_control(message)
            return None
        if self._machine.state is not PeerState.RUNNING:
            return None  # the message belongs to an attempt that is over
        assembler = self.connection.channel.assembler
        try:
            whole = assembler.add(frame.body, lambda head, size: self._admit(expected, head, size))
            return None if whole is None else decode(whole.content, whole.head)
        except ProtocolError as error:
            raise ProtocolError(f"from the server, while waiting {what}: {error}") from None

    def _admit(self, expected: Receive | None, head: Head, size: int) -> None:
        """Check the header of a message, and refuse an unexpected one before memory is allocated for it."""
        if expected is None or self._check_limits is None:
            raise ProtocolError(f"expected no message, got {head}.")
        expected.check(head.kind, head.key)
        self._check_limits(head, size)

    def _take_control(self, message: Any) -> None:
        match message:
            case ProposedAttempt():
                self._machine.advance(PeerEvent.PROPOSE)
                raise NewAttempt(message)
            case control.StatementRequest(shares):
                self._machine.advance(PeerEvent.COMPARE if shares else PeerEvent.REGATHER)
                if shares:
                    self._handshake.store_shares(shares)
                if self._check_limits is not None:
                    self._state_again()
            case control.Goodbye(payload):
                self.goodbye = payload
                self._machine.advance(PeerEvent.CLOSE)
            case _:
                raise control.refuse_control(message)
