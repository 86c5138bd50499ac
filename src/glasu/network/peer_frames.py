"""The server's side of every stream: frames of parties become states, messages in inboxes, or refusals.

Threads of gRPC run this code. An invalid frame is refused before it changes anything; its sender is dropped or the
run is aborted, as the policy says. A process that was never admitted is refused without effect on the run.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
from collections.abc import Iterator
from typing import Literal

from glasu.errors import (
    CheckpointError,
    EquivocationError,
    GlasuError,
    ProtocolError,
    TrainingError,
    get_public_message,
)
from glasu.network.frames import (
    CONTROL,
    CONTROL_BYTES,
    Assembler,
    Control,
    Frame,
    check_expected,
    pack_control,
    pack_frame,
    read_control,
    read_frame,
)
from glasu.network.handshake import Payload, RefusalError, ServerHandshake
from glasu.network.peer import Arrival, Conversation, Peer
from glasu.network.roster import Attempt, Roster, last_word
from glasu.network.sanitize import SENTENCES, printable, printable_lines
from glasu.network.session_hello import PROTOCOL, read_hello
from glasu.network.states import PeerEvent, PeerState, RunState
from glasu.network.transport import Stream
from glasu.protocol.message_bytes import Head, decode
from glasu.wire.message_key import ATTEMPTS

OnInvalidMessage = Literal["abort", "wait"]
IN_SEQUENCE, LAST_WORDS = ("prepared", "ready", "finished"), ("failed", "declined")
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)  # of the process, of the system; both pass
UNKNOWN = (PeerState.AWAY, PeerState.REFUSED, PeerState.FAILED)


class Refusals:
    """What happens to a process that does not fit, and to a run in which an invalid message came."""

    def __init__(self, roster: Roster, run: str, on_invalid_message: OnInvalidMessage) -> None:
        self._roster, self._run, self._on_invalid_message = roster, run, on_invalid_message
        self.count = 0  # of refused connections and processes

    def may_return(self, error: Exception) -> bool:
        """Return whether the run waits for a party after this error; after two contents under one key it does not."""
        return self._on_invalid_message == "wait" and not isinstance(error, EquivocationError)

    def expel(self, peer: Peer, reason: str) -> None:
        """Refuse the process that takes part; its place stays, and the run waits for the party to reconnect."""
        self.refuse(peer, peer.stream, RefusalError("invalid_message", reason))
        self._roster.restart()

    def refuse(self, peer: Peer, stream: Stream | None, refusal: RefusalError) -> None:
        """Tell a process, and everyone, why it cannot take part."""
        why = printable(refusal.public_message, SENTENCES)
        self.count += 1
        last = last_word("refused", why, code=refusal.code, run=self._run, table=list(refusal.table))
        own = peer if stream is peer.stream else None  # a process that runs hears about a second one
        if why != peer.refusal:  # a process that reconnects repeatedly is reported once
            for line in refusal.table:
                self._roster.note(line, about=peer.name)
            self._roster.announce(f"{peer.name}: not accepted: {why}", about=peer.name, without=own)
            peer.refusal = why
        if stream is peer.stream:
            self._roster.drop(peer, PeerEvent.REFUSE, last)
        elif stream is not None:
            stream.close(last)

    def reject(self, peer: Peer, stream: Stream, error: Exception) -> None:
        """Abort the run because of an invalid frame, or refuse its sender."""
        why = printable(get_public_message(error), SENTENCES)
        with self._roster.changed:
            fault = error.__cause__ if isinstance(error, CheckpointError) else error  # of a state file, or of a stream
            if isinstance(fault, OSError) and fault.errno in OUT_OF_DESCRIPTORS:  # temporary; the party reconnects
                self._roster.note(f"{peer.name}: its connection was dropped: {why.rstrip('.')}.", about=peer.name)
            elif isinstance(fault, OSError):  # not the party's fault
                self._abort(stream, TrainingError(f"the server failed when party {peer.name!r} connected: {why}"))
            elif peer.stream is not stream:
                if stream.is_open:  # else a newer stream has taken its place
                    self.refuse(peer, stream, RefusalError("invalid_hello", why))
            elif self.may_return(error):
                self.expel(peer, why)
            else:
                kind = type(error) if isinstance(error, ProtocolError) else ProtocolError
                self._abort(stream, kind(f"party {peer.name!r}: {why}", party=peer.name))

    def _abort(self, stream: Stream, error: GlasuError) -> None:
        self._roster.fail(error)
        stream.close(last_word("stopped", error.public_message))


class PeerFrames:
    """Receives the streams of all parties; the `Host` of a `Listener`."""

    def __init__(
        self, roster: Roster, handshake: ServerHandshake, run: str, on_invalid_message: OnInvalidMessage
    ) -> None:
        """Receive parties.

        Args:
            roster: their states, and the lock.
            handshake: decides which processes take part.
            run: the id of the run.
            on_invalid_message: abort the run, or drop the sender and wait for it to reconnect.
        """
        self._roster, self._handshake, self._run = roster, handshake, run
        self._process = secrets.token_hex(8)  # a restarted server knows nothing of earlier frames
        self.refusals = Refusals(roster, run, on_invalid_message)

    # --- Host -----------------------------------------------------------------------------

    def open_stream(self) -> Stream:
        return Stream(self._roster.changed)

    def turn_away(self, party: str, caller: str, reason: str) -> None:
        with self._roster.changed:
            self.refusals.count += 1
            self._roster.note(f"{caller}: not served: {printable(reason, SENTENCES)}.", about=party or "strangers")

    def attach(self, party: str, stream: Stream, frames: Iterator[bytes]) -> None:
        """Read a party's frames until its stream ends. The first one must be its hello."""
        peer = self._roster.peers[party]
        try:
            for data in frames:
                if not self._take(peer, stream, data):
                    break
                self._pause_overrun(peer, stream)
        except Exception as error:  # of any kind: this thread must not end in silence
            self.refusals.reject(peer, stream, error)
        finally:
            self._detach(peer, stream)

    # --- frames ---------------------------------------------------------------------------

    def _take(self, peer: Peer, stream: Stream, data: bytes) -> bool:
        """Take a frame; return whether the stream stays open."""
        frame = read_frame(data)
        control = read_control(frame.body, CONTROL_BYTES) if frame.kind == CONTROL else None
        with self._roster.changed:
            if not stream.is_open:
                return False
            if peer.stream is not stream:
                if control is None or frame.number:
                    raise ProtocolError(f"expected a hello, got a frame of kind {frame.kind}.")
                return self._greet(peer, stream, control)
            is_next = peer.conversation.channel.accept(frame)
            self._roster.changed.notify_all()  # acknowledgements open windows
            if frame.number == 0:
                return control is None or self._take_last_word(peer, control)
            if not is_next:
                return True
            if control is not None:
                return self._take_control(peer, control)
            placed = self._place(peer, frame)
        if placed is not None:
            self._decode(peer, *placed)
        return True

    def _pause_overrun(self, peer: Peer, stream: Stream) -> None:
        """Stop reading a party that ignores the window."""
        with self._roster.changed:
            while peer.stream is stream and stream.is_open and peer.conversation.channel.is_overrun:
                self._roster.changed.wait(1.0)

    def _place(self, peer: Peer, frame: Frame) -> tuple[Conversation, Arrival, memoryview, Head] | None:
        """Add a piece to its message; return the message with its place in the inbox when it is complete."""
        attempt, conversation = self._roster.attempt, peer.conversation
        if attempt is None or peer.state is not PeerState.RUNNING:
            return None  # it belongs to an attempt that is over: no message is under way when one begins
        whole = conversation.assembler.add(frame.body, lambda head, size: self._admit(peer, attempt, head, size))
        if whole is None or conversation.assembler.head is None:
            return None
        return conversation, conversation.inbox.reserve(len(whole)), whole, conversation.assembler.head

    def _admit(self, peer: Peer, attempt: Attempt, head: Head, size: int) -> None:
        """Refuse a message that cannot come now, by its header, before memory is allocated for it."""
        key, expected = head.key, self._roster.expected
        identity = attempt.number % ATTEMPTS, peer.index
        if (key.attempt, key.client) != identity:
            raise ProtocolError(f"{head}: expected attempt and client {identity}, got {(key.attempt, key.client)}.")
        inbox = peer.conversation.inbox
        if expected is not None and inbox.is_empty and not inbox.receipts.knows(key):
            check_expected(expected, head.kind, key)
        attempt.check_limits(head, size)

    def _decode(self, peer: Peer, conversation: Conversation, arrival: Arrival, whole: memoryview, head: Head) -> None:
        """Decode a message without the lock, and put it in its place."""
        message, digest = decode(whole, head), hashlib.sha256(whole).digest()
        with self._roster.changed:
            conversation.inbox.fill(arrival, message, digest)
            self._roster.changed.notify_all()

    # --- hello ----------------------------------------------------------------------------

    def _greet(self, peer: Peer, stream: Stream, control: Control) -> bool:
        """Resume a known process, admit a new one, or refuse it; return whether the stream stays open."""
        hello = read_hello(control)
        run, conversation = self._roster.run.state, peer.conversation
        if self._roster.failure is not None:
            stream.close(last_word("stopped", self._roster.failure.public_message))
            return False
        if run is RunState.LEAVING:
            return False
        if (hello.process, hello.server) == (conversation.process, self._process) and peer.state not in UNKNOWN:
            conversation.channel.resume(hello.received)
            self._seat(peer, stream, {}, resumed=True)
            self._roster.note(f"{peer.name}: connected again.", about=peer.name)
            return True
        try:
            welcome = self._handshake.admit(peer.name, hello.payload, closing=run is RunState.CLOSED)
        except RefusalError as refusal:
            self.refusals.refuse(peer, stream, refusal)
            return False
        if peer.stream is not None:
            why = f"a newer process of party {peer.name!r} has taken its place."
            peer.stream.close(last_word("refused", why, code="replaced", run=self._run, table=[]))
        peer.machine.advance(PeerEvent.ADMIT)
        peer.conversation, peer.refusal, peer.result = Conversation(hello.process), "", None
        self._seat(peer, stream, welcome, resumed=False)
        self._roster.note(f"{peer.name}: connected.", about=peer.name)
        self._roster.restart()
        if run is RunState.CLOSED:
            self.dismiss(peer)
        return True

    def _seat(self, peer: Peer, stream: Stream, payload: Payload, *, resumed: bool) -> None:
        """Make this the party's stream."""
        if peer.stream is not None:
            peer.stream.close()
        channel = peer.conversation.channel
        welcome = {"protocol": PROTOCOL, "run": self._run, "server": self._process, "payload": dict(payload)}
        welcome |= {"resumed": resumed, "received": channel.received}
        stream.send(pack_frame(CONTROL, pack_control("welcome", **welcome)))
        stream.attach(channel)
        peer.stream = stream

    # --- control messages -----------------------------------------------------------------

    def _take_control(self, peer: Peer, control: Control) -> bool:
        """Take a control message in the sequence; return whether the stream stays open."""
        attempt, fields = self._roster.attempt, control.fields
        if control.kind == "prepared":
            return self._take_statement(peer, fields)
        if control.kind not in IN_SEQUENCE:
            raise ProtocolError(f"control message of unknown kind {printable(control.kind, 60)!r}.")
        if attempt is None or fields.get("attempt") != attempt.number or peer.state is PeerState.CONNECTED:
            return True  # of an attempt that is over
        if control.kind == "ready":
            digest, expected = fields.get("digest"), attempt.digests[peer.index]
            if digest != expected:
                raise ProtocolError(
                    f"it confirmed another checkpoint of round {attempt.round}: expected SHA-256 {expected}, got "
                    f"{printable(digest, 64)}."
                )
            peer.machine.advance(PeerEvent.CONFIRM)
            peer.conversation.assembler = Assembler()  # earlier pieces belong to an attempt that is over
        else:
            result = fields.get("result")
            if not isinstance(result, dict):
                raise ProtocolError("'finished' without a result.")
            peer.machine.advance(PeerEvent.FINISH)
            peer.result = result
        return True

    def _take_statement(self, peer: Peer, fields: Payload) -> bool:
        statement = fields.get("payload")
        if not isinstance(statement, dict):
            raise ProtocolError("'prepared' without a statement.")
        if not peer.machine.allows(PeerEvent.PREPARE) or peer.state is PeerState.DISMISSED:
            peer.machine.advance(PeerEvent.PREPARE)
            return True
        try:
            lines = self._handshake.prepare(peer.name, statement)
        except RefusalError as refusal:
            self._handshake.withdraw(peer.name)
            self.refusals.refuse(peer, peer.stream, refusal)
            return False
        peer.machine.advance(PeerEvent.PREPARE)
        self._roster.note(f"{peer.name}: prepared.", about=peer.name)
        for line in lines:
            self._roster.announce(line, about=peer.name)
        return True

    def _take_last_word(self, peer: Peer, control: Control) -> bool:
        """Take what a party says before it leaves; the stream ends."""
        if control.kind not in LAST_WORDS:
            raise ProtocolError(f"control message of unknown kind {printable(control.kind, 60)!r}.")
        why = printable(control.fields.get("reason"), SENTENCES)
        if control.kind == "failed":
            peer.machine.advance(PeerEvent.FAIL)
            self._roster.fail(TrainingError(f"party {peer.name!r} failed: {why}"))
            return False
        self._handshake.withdraw(peer.name)
        peer.refusal = why
        for line in printable_lines(control.fields.get("table")):
            self._roster.note(line, about=peer.name)
        self._roster.announce(f"{peer.name}: declines to take part: {why}", about=peer.name, without=peer)
        self._roster.drop(peer, PeerEvent.REFUSE)
        self._roster.restart()
        return False

    # --- the end of a stream --------------------------------------------------------------

    def dismiss(self, peer: Peer) -> None:
        """Tell a party that the run is complete; it hears so on this stream or a later one."""
        if peer.machine.allows(PeerEvent.DISMISS) and peer.state is not PeerState.DISMISSED:
            peer.machine.advance(PeerEvent.DISMISS)
            peer.send_control("goodbye", payload=dict(self._roster.farewell))
            self._roster.changed.notify_all()

    def _detach(self, peer: Peer, stream: Stream) -> None:
        with self._roster.changed:
            stream.close()
            if peer.stream is stream:
                peer.stream, peer.away_since = None, self._roster.clock()
                if self._roster.run.state not in (RunState.CLOSED, RunState.LEAVING, RunState.FAILED):
                    line = f"{peer.name}: the connection ended; waiting for it to return."
                    self._roster.announce(line, about=peer.name)
            self._roster.changed.notify_all()
