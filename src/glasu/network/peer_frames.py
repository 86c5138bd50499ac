"""Process the frames of all parties at the server: update states, put messages into inboxes, refuse invalid frames.

gRPC's threads run this code. An invalid frame is refused before it changes any state. Depending on
`on_invalid_message`, its sender is dropped or the run is aborted. An error of a process that was never admitted does
not affect the run.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from glasu.errors import (
    CheckpointError,
    EquivocationError,
    GlasuError,
    ProtocolError,
    TrainingError,
    get_public_message,
)
from glasu.files import OUT_OF_DESCRIPTORS
from glasu.network import control
from glasu.network.frames import CONTROL, CONTROL_BYTES, Channel, Frame, make_control_frame, read_frame, split_pieces
from glasu.network.handshake import Code, Payload, RefusalError, ServerHandshake
from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.network.options import OnInvalidMessage
from glasu.network.roster import Attempt, Peer, Receipts, Roster
from glasu.network.states import PeerEvent, PeerState, RunState
from glasu.network.transport import FrameStream
from glasu.protocol.message_bytes import Head
from glasu.wire.message_key import ATTEMPTS

UNKNOWN = (PeerState.AWAY, PeerState.REFUSED, PeerState.ABSENT, PeerState.FAILED)
NOT_PREPARED = (PeerState.CONNECTED, PeerState.COMPARING)  # the server still waits for the party's next statement
UNLISTED = "connections that name no party"  # the log uses this name when it counts dropped lines
RUN_ENDED = (RunState.COMPLETE, RunState.CLOSED)  # every party has reported its results


class PeerFrames:
    """Receives the streams of all parties. It is the `Host` of a `Listener` (`transport.py`)."""

    def __init__(
        self, roster: Roster, handshake: ServerHandshake, run: str, on_invalid_message: OnInvalidMessage
    ) -> None:
        """Prepare to receive the parties.

        Args:
            roster: the states of the parties, and the lock.
            handshake: decides which processes are admitted.
            run: the id of the run.
            on_invalid_message: abort the run, or drop the sender and wait for it to reconnect.
        """
        self._roster, self._handshake, self._run = roster, handshake, run
        self._on_invalid_message = on_invalid_message
        # Every start of the server has another random name, so parties see that a restarted server does not know
        # their earlier frames.
        self._process = secrets.token_hex(8)
        self.refused = 0  # number of refused connections and processes

    # --- Host -----------------------------------------------------------------------------

    def open_stream(self) -> FrameStream:
        return FrameStream(self._roster.changed)

    def record_rejection(self, party: str, address: str, reason: str) -> None:
        with self._roster.changed:
            self.refused += 1
            line = f"{address}: not served: {make_printable(reason, MAX_REASON)}."
            self._roster.log.write(line, party or UNLISTED)

    def attach(self, party: str, stream: FrameStream, frames: Iterator[bytes]) -> None:
        """Read a party's frames until the stream ends. The first frame must be a hello."""
        peer, changed = self._roster.peers[party], self._roster.changed
        try:
            for data in frames:
                frame = read_frame(data)
                message = control.read_control(frame.body, CONTROL_BYTES) if frame.kind == CONTROL else None
                with changed:
                    if stream.is_open:
                        self._take(peer, stream, frame, message)
                    while peer.stream is stream and stream.is_open and peer.channel.is_overrun:
                        changed.wait(1.0)  # the party has sent more than its window allows
                    if not stream.is_open:
                        break
        except Exception as error:  # every exception: this thread must not end without a report
            with changed:
                self._reject(peer, stream, error)
        finally:
            with changed:
                self._detach(peer, stream)

    # --- frames; all methods below are called with the lock ----------------------------------

    def _take(self, peer: Peer, stream: FrameStream, frame: Frame, message: Any) -> None:
        """Process a frame; close the stream after its last frame. `message` is None in a piece or an ack."""
        if peer.stream is not stream:
            if not isinstance(message, control.Hello) or frame.number:
                raise ProtocolError(f"expected a hello, got a frame of kind {frame.kind}.")
            self._take_hello(peer, stream, message)
            return
        is_next = peer.channel.accept(frame)
        if frame.number == 0 and message is not None:
            self._take_final(peer, message)
        elif is_next and message is not None:
            self._take_control(peer, message)
        elif is_next:
            for piece in split_pieces(frame.body):
                self._add_piece(peer, piece)
            if self._roster.is_receiving:  # the thread of the run still waits for a message from another party
                self._roster.changed.wake_writers()
                return
        self._roster.changed.notify_all()  # last: the frame may have queued answers or acknowledged earlier frames

    def _add_piece(self, peer: Peer, piece: memoryview) -> None:
        """Add a piece to its message; put the message into the inbox when it is complete."""
        attempt = self._roster.attempt
        if attempt is None or peer.state is not PeerState.RUNNING:
            return  # the piece belongs to an attempt that is over; every attempt begins without incomplete messages
        whole = peer.channel.assembler.add(piece, lambda head, size: self._admit(peer, attempt, head, size))
        if whole is not None:
            peer.channel.put(whole, len(whole.content))

    def _admit(self, peer: Peer, attempt: Attempt, head: Head, size: int) -> None:
        """Check the header of a message, and refuse an unexpected one before memory is allocated for it."""
        key, identity = head.key, (attempt.number % ATTEMPTS, attempt.present.index(peer.name))
        if (key.attempt, key.client) != identity:
            raise ProtocolError(f"{head}: expected attempt and client {identity}, got {(key.attempt, key.client)}.")
        # A key that was received before is always an error. `Receipts` chooses the error when the message is complete.
        if peer.expected is not None and not peer.channel.inbox and not peer.receipts.knows(key):
            peer.expected.check(head.kind, key)
        attempt.check_limits(head, size)

    # --- hello ----------------------------------------------------------------------------

    def _take_hello(self, peer: Peer, stream: FrameStream, hello: control.Hello) -> None:
        """Resume the channel of a known process, admit a new process, or refuse it."""
        if self._roster.failure is not None:
            self._roster.stop(stream)
        elif self._roster.run.state is RunState.LEAVING:
            stream.close()
        elif (hello.process, hello.server) == (peer.channel.process, self._process) and peer.state not in UNKNOWN:
            # In an UNKNOWN state, a process cannot resume its channel. It was refused or omitted, or it failed, so it
            # must pass the handshake again. Otherwise it could resume in the middle of an attempt that continues
            # without it.
            peer.channel.outbox.rewind(hello.received)
            self._bind_stream(peer, stream, {}, resumed=True)
            self._roster.log.write(f"{peer.name}: connected again.", peer.name)
        else:
            try:
                self._admit_process(peer, stream, hello)
            except RefusalError as refusal:
                self._refuse(peer, stream, refusal)

    def _admit_process(self, peer: Peer, stream: FrameStream, hello: control.Hello) -> None:
        state = self._roster.run.state
        admit = self._handshake.admit_finished if state in RUN_ENDED else self._handshake.admit
        welcome = admit(peer.name, hello.payload)
        if peer.stream is not None:
            why = f"a newer process of party {peer.name!r} has replaced it."
            peer.stream.close(make_control_frame(control.Refused(Code.REPLACED, why, run=self._run)))
        peer.machine.advance(PeerEvent.ADMIT)
        peer.channel, peer.receipts, peer.refusal = Channel(hello.process), Receipts(), ""
        self._bind_stream(peer, stream, welcome, resumed=False)
        self._roster.log.write(f"{peer.name}: connected.", peer.name)
        self._roster.restart()
        if state is RunState.CLOSED:  # in earlier states, all parties will receive the goodbye at the same time
            self.send_goodbye(peer)

    def _bind_stream(self, peer: Peer, stream: FrameStream, payload: Payload, *, resumed: bool) -> None:
        """Make this stream the current one of the party."""
        if peer.stream is not None:
            peer.stream.close()
        channel = peer.channel
        welcome = control.Welcome(
            run=self._run, server=self._process, resumed=resumed, received=channel.received, payload=payload
        )
        stream.send(make_control_frame(welcome))
        stream.attach(channel)
        peer.stream = stream

    # --- control messages -----------------------------------------------------------------

    def _take_control(self, peer: Peer, message: Any) -> None:
        """Process a numbered control message."""
        if isinstance(message, control.Statement):
            self._take_statement(peer, message.payload)
            return
        if not isinstance(message, control.Confirmation | control.PartyResult):
            raise control.refuse_control(message)
        attempt = self._roster.attempt
        if attempt is None or message.attempt != attempt.number or peer.state in NOT_PREPARED:
            return  # the message belongs to an attempt that is over
        if isinstance(message, control.PartyResult):
            peer.machine.advance(PeerEvent.FINISH)
            peer.result = message.payload
        else:
            expected = attempt.digests.get(peer.name)
            if message.digest != expected:
                raise ProtocolError(
                    f"it confirmed another checkpoint of round {attempt.round}: expected SHA-256 {expected}, got "
                    f"{make_printable(message.digest, 64)}."
                )
            peer.machine.advance(PeerEvent.CONFIRM)

    def _take_statement(self, peer: Peer, statement: Payload) -> None:
        before = peer.state
        peer.machine.advance(PeerEvent.PREPARE)
        if peer.state is PeerState.CLOSED:
            return  # the run ended while the statement was in transit
        try:
            lines = self._handshake.prepare(peer.name, statement)
        except RefusalError as refusal:
            self._handshake.withdraw(peer.name)
            self._refuse(peer, peer.stream, refusal)
            return
        if before is not PeerState.COMPARING:  # a comparing party was already reported as prepared
            self._roster.log.write(f"{peer.name}: prepared.", peer.name)
        for line in lines:
            self._roster.announce(line, about=peer.name)
        self._roster.ask_to_compare()

    def _take_final(self, peer: Peer, message: Any) -> None:
        """Process a message with which a party ends its stream."""
        if isinstance(message, control.Failed):
            self._roster.drop(peer, PeerEvent.FAIL)
            if self._roster.run.state in RUN_ENDED:  # the run ended while the message was in transit
                self._roster.log.write(f"{peer.name}: failed after it had finished: {message.reason}", peer.name)
                return
            self._roster.fail(TrainingError(f"party {peer.name!r} failed: {message.reason}", code="party_failed"))
            return
        if not isinstance(message, control.Declined):
            raise control.refuse_control(message)
        self._handshake.withdraw(peer.name)
        peer.refusal = message.reason
        for line in message.table:
            self._roster.log.write(line, peer.name)
        self._roster.announce(f"{peer.name}: declines to take part: {message.reason}", about=peer.name, without=peer)
        self._roster.drop(peer, PeerEvent.REFUSE)
        self._roster.restart()

    # --- refusals -------------------------------------------------------------------------

    def may_return(self, error: Exception) -> bool:
        """Return whether the run waits for a party after this error. An EquivocationError always aborts the run."""
        return self._on_invalid_message == "wait" and not isinstance(error, EquivocationError)

    def expel(self, peer: Peer, reason: str) -> None:
        """Refuse the current process of a party. The run waits for the party to reconnect."""
        self._refuse(peer, peer.stream, RefusalError(Code.INVALID_MESSAGE, reason))
        self._roster.restart()

    def _refuse(self, peer: Peer, stream: FrameStream | None, refusal: RefusalError) -> None:
        """Tell a process and all parties why the process cannot take part."""
        refused = control.Refused(refusal.code, refusal.public_message, refusal.table, run=self._run)
        self.refused += 1
        if refusal.code == Code.OTHER_PURPOSE:  # for example from glasu doctor; the party's admitted process continues
            self._roster.log.write(
                f"{peer.name}: a connection for another purpose was refused: {refused.reason}", peer.name
            )
        elif refused.reason != peer.refusal:  # a process that reconnects repeatedly is reported once
            for line in refused.table:
                self._roster.log.write(line, peer.name)
            own = peer if stream is peer.stream else None  # a running process also receives the line about a second one
            self._roster.announce(f"{peer.name}: not accepted: {refused.reason}", about=peer.name, without=own)
            peer.refusal = refused.reason
        if stream is peer.stream:
            self._roster.drop(peer, PeerEvent.REFUSE, make_control_frame(refused))
        elif stream is not None:
            stream.close(make_control_frame(refused))

    def _reject(self, peer: Peer, stream: FrameStream, error: Exception) -> None:
        """Handle an error of a stream, such as an invalid frame: refuse its sender, or abort the run."""
        why = make_printable(get_public_message(error), MAX_REASON)
        fault = error.__cause__ if isinstance(error, CheckpointError) else error  # its cause may be an OSError
        if isinstance(fault, OSError) and fault.errno in OUT_OF_DESCRIPTORS:  # temporary; the party reconnects
            self._roster.log.write(f"{peer.name}: its connection was dropped: {why.rstrip('.')}.", peer.name)
        elif isinstance(fault, OSError):  # not the party's fault
            why = f"the server failed when party {peer.name!r} connected: {why}"
            self._abort(stream, TrainingError(why, code="server_failed"))
        elif peer.stream is not stream:
            if stream.is_open:  # otherwise a newer stream has replaced it
                self._refuse(peer, stream, RefusalError(Code.INVALID_HELLO, why))
        elif self.may_return(error):
            self.expel(peer, why)
        else:
            kind = type(error) if isinstance(error, ProtocolError) else ProtocolError
            self._abort(stream, kind(f"party {peer.name!r}: {why}", party=peer.name))

    def _abort(self, stream: FrameStream, error: GlasuError) -> None:
        self._roster.fail(error)
        self._roster.stop(stream)

    # --- the end of a stream --------------------------------------------------------------

    def send_goodbye(self, peer: Peer) -> None:
        """Send the goodbye of a complete run to a party, on its current stream or a later one."""
        if peer.machine.allows(PeerEvent.CLOSE) and peer.state is not PeerState.CLOSED:
            peer.machine.advance(PeerEvent.CLOSE)
            peer.send_control(control.Goodbye(self._roster.goodbye))
            self._roster.changed.notify_all()

    def _detach(self, peer: Peer, stream: FrameStream) -> None:
        stream.close()
        if peer.stream is stream:
            peer.stream, peer.away_since = None, self._roster.clock()
            if self._roster.run.state not in (RunState.CLOSED, RunState.LEAVING, RunState.FAILED):
                waits = "the server is waiting for this party to return. If it has stopped, start it again."
                line = f"{peer.name}: the connection ended; {waits}"
                self._roster.announce(line, about=peer.name)
        self._roster.changed.notify_all()
