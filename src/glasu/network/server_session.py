"""The server's session with all parties. The thread of the run calls it: gather, begin, receive, send, finish.

gRPC's threads put messages into inboxes (`peer_frames.py`), and the thread of the run takes them out. One lock guards
the inboxes and all states; `roster.py` describes the lock order.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence

from glasu.errors import (
    CheckpointError,
    DataError,
    GlasuError,
    ProtocolError,
    TrainingError,
    get_code,
    get_public_message,
)
from glasu.network.control import ProposedAttempt
from glasu.network.frames import Encoded
from glasu.network.handshake import Payload, ResultPayload, ServerHandshake
from glasu.network.options import OnInvalidMessage
from glasu.network.peer_frames import PeerFrames
from glasu.network.roster import Attempt, Peer, RestartAttempt, Roster
from glasu.network.states import PeerEvent, PeerState, RunEvent
from glasu.network.transport import SessionLock
from glasu.protocol.message_bytes import decode, encode
from glasu.protocol.messages import Message
from glasu.protocol.requests import Receive


class ServerSession:
    """The server's session with all parties of one run.

    gather -> begin_attempt -> receive, broadcast, scatter ... -> collect_results -> close_run. If a party has a new
    process, the methods after `gather` raise RestartAttempt, and the caller must call `gather` again. If the run has
    failed, every method raises the error of the failure.
    """

    def __init__(
        self,
        roster: Sequence[str],
        handshake: ServerHandshake,
        run: str,
        *,
        wait: float,
        log: logging.Logger,
        on_invalid_message: OnInvalidMessage = "abort",
        clock: Callable[[], float] = time.monotonic,
        lock: SessionLock | None = None,
    ) -> None:
        """Prepare for the parties of the roster.

        Args:
            roster: names, in client order.
            handshake: decides which processes are admitted.
            run: the id of the run.
            wait: seconds that a party may be without a connection.
            log: receives lines for people.
            on_invalid_message: abort the run, or drop the sender and wait for it to reconnect.
            clock: returns seconds.
            lock: guards the state of the session; None: a new lock.
        """
        self._handshake = handshake
        lock = SessionLock() if lock is None else lock  # also available as `roster.changed`; hold it to read `roster`
        self.roster = Roster(roster, handshake, wait, clock, log, lock)
        self.host = PeerFrames(self.roster, handshake, run, on_invalid_message)  # receives the streams of a `Listener`

    @property
    def num_present(self) -> int:
        """The number of parties in the current attempt."""
        return len(self._list_present())

    @property
    def refused(self) -> int:
        """The number of refused connections and processes. Any thread may read it."""
        return self.host.refused

    def list_connected(self) -> dict[str, bool]:
        """Return which parties have a stream now. Any thread may call it."""
        with self.roster.changed:
            return {name: peer.is_connected for name, peer in self.roster.peers.items()}

    # --- an attempt --------------------------------------------------------------------------

    def gather(self) -> tuple[str, ...]:
        """Wait until every party is connected and its statement has passed the handshake.

        Returns:
            The parties that take part, in client order. A party that was absent for too long is omitted if the other
            parties can continue without it.
        """
        roster = self.roster
        with roster.changed:
            if roster.failure is not None:
                raise roster.failure
            roster.run.advance(RunEvent.GATHER)
            roster.attempt = None
            for peer in roster.peers.values():
                peer.clear()
                if peer.state is not PeerState.PREPARED:  # the checkpoints may have changed since the last statement
                    peer.ask_again()
            roster.ask_to_compare()
            roster.changed.notify_all()
            roster.wait_for(lambda peer: peer.is_connected and peer.state is PeerState.PREPARED, "to join")
            return tuple(peer.name for peer in roster.present)

    def begin_attempt(self, attempt: Attempt) -> None:
        """Propose an attempt to the gathered parties, and wait until every party has confirmed its checkpoint."""
        roster = self.roster
        with roster.changed:
            roster.check()
            prepared = tuple(peer.name for peer in roster.present if peer.state is PeerState.PREPARED)
            if prepared != attempt.present or len(prepared) < len(roster.present):
                raise RestartAttempt  # a process connected after `gather` and must be gathered as well
            roster.run.advance(RunEvent.PROPOSE)
            roster.attempt = attempt
            self._handshake.record_attempt()
            for peer in roster.present:
                peer.machine.advance(PeerEvent.PROPOSE)
                digest = attempt.digests[peer.name]
                proposal = ProposedAttempt(attempt.number, attempt.round, attempt.present, digest, attempt.ledgers)
                peer.send_control(proposal)
            roster.changed.notify_all()
            running = (PeerState.RUNNING, PeerState.FINISHED)  # a party with nothing left to do is already FINISHED
            roster.wait_for(lambda peer: peer.state in running, f"to confirm attempt {attempt.number}")
            roster.run.advance(RunEvent.START)

    def receive(self, expected: Receive) -> list[Message]:
        """Return the next message of every party of the attempt, in client order. All must match `expected`.

        Raises:
            ProtocolError: a party's message is invalid or unexpected; `drop_sender` may let the run continue.
        """
        roster, peers = self.roster, self._list_present()
        with roster.changed:
            for peer in peers:
                peer.expected = expected
            try:
                roster.wait_for(lambda peer: bool(peer.channel.inbox), f"to send {expected}")
                arrived = [peer.channel.pop() for peer in peers]
            finally:
                for peer in peers:
                    peer.expected = None
            roster.changed.notify_all()  # the inboxes have room again
        return [self._decode(peer, encoded, expected) for peer, encoded in zip(peers, arrived, strict=True)]

    def _decode(self, peer: Peer, encoded: Encoded, expected: Receive) -> Message:
        """Check and decode a message. The lock is not held for hashing and decoding."""
        (kind, key, *_), receipts = encoded.head, peer.receipts
        digest = hashlib.sha256(encoded.content).digest()
        try:
            with self.roster.changed:
                receipts.take(key, digest)
            expected.check(kind, key)
            return decode(encoded.content, encoded.head)
        except ProtocolError as error:
            raise type(error)(f"party {peer.name!r}: {error}", party=peer.name) from None

    def broadcast(self, message: Message) -> None:
        """Send one message to every party; wait until the outbox of every party has room."""
        self._send([encode(message)] * self.num_present, message)

    def scatter(self, messages: Sequence[Message]) -> None:
        """Send a different message to every party, in client order."""
        self._send([encode(message) for message in messages], messages[0])

    def collect_results(self) -> dict[str, ResultPayload]:
        """Wait until every party has written its results; return the results by party, in client order."""
        roster = self.roster
        with roster.changed:
            roster.check()  # a process may have restarted since the last message was sent
            roster.run.advance(RunEvent.EXHAUST)
            roster.wait_for(lambda peer: peer.state is PeerState.FINISHED, "to finish")
            roster.run.advance(RunEvent.COMPLETE)
            return {peer.name: peer.result for peer in self._list_present()}

    # --- the end -------------------------------------------------------------------------------

    def drop_sender(self, error: GlasuError) -> bool:
        """If the run waits after this error, drop the party whose message caused it, and return True.

        The caller must then gather the parties again. Return False if no party caused the error, or if the error aborts
        the run.
        """
        peer = self.roster.peers.get(error.party)
        if peer is None or not self.host.may_return(error):
            return False
        with self.roster.changed:
            self.host.expel(peer, error.public_message)
            self.roster.log.write(f"the run continues from the last common checkpoint when {peer.name} reconnects.")
        return True

    def close_run(self, seconds: float, goodbye: Payload | None = None) -> None:
        """Send the goodbye to every party. Wait until all parties, even absent ones, have received it and disconnected.

        Args:
            seconds: how long to wait at most.
            goodbye: the payload for every party; a party reads it from `ClientSession.goodbye`.
        """
        roster = self.roster
        with roster.changed:
            roster.check()
            roster.goodbye = goodbye or {}
            roster.run.advance(RunEvent.CLOSE)
            for peer in roster.peers.values():
                self.host.send_goodbye(peer)
            self._wait_for_end(
                lambda peer: peer.state is PeerState.CLOSED and not peer.is_connected and peer.has_acknowledged_all,
                roster.clock() + seconds,
            )

    def announce_failure(self, error: BaseException, seconds: float) -> None:
        """Tell every party why the run has failed. The reason is sent before any queued data.

        Then wait at most `seconds` for all parties to disconnect.
        """
        why, code = get_public_message(error), get_code(error)
        if not isinstance(error, GlasuError) or isinstance(error, CheckpointError | DataError):
            why, code = f"the server failed: {why}", "server_failed"
        roster = self.roster
        with roster.changed:
            roster.fail(TrainingError(why, code=code))  # a party that connects now also receives it
            for peer in roster.peers.values():
                if peer.stream is not None:
                    roster.stop(peer.stream)
            self._wait_for_end(lambda peer: not peer.is_connected, roster.clock() + seconds)

    def leave(self) -> None:
        """Record that this process is interrupted. Its streams end, and the parties wait for another server process."""
        with self.roster.changed:
            self.roster.run.advance(RunEvent.LEAVE)

    # --- helpers ------------------------------------------------------------------------------

    def _list_present(self) -> list[Peer]:
        """Return the parties of the current attempt, in client order.

        Only the thread of the run calls it, without the lock.
        """
        assert self.roster.attempt is not None  # only the thread of the run sets it
        return [self.roster.peers[name] for name in self.roster.attempt.present]

    def _wait_for_end(self, done: Callable[[Peer], bool], deadline: float) -> None:
        roster = self.roster
        while not all(map(done, roster.peers.values())) and roster.clock() < deadline:
            roster.changed.wait(0.2)

    def _send(self, encoded: Sequence[bytes], message: Message) -> None:
        roster = self.roster
        with roster.changed:
            roster.wait_for(
                lambda peer: not peer.channel.outbox.is_full,
                f"to take the {type(message).__name__} messages of round {message.key.round}",
            )
            for peer, content in zip(self._list_present(), encoded, strict=True):
                peer.channel.outbox.put_message(content)
            roster.changed.notify_all()
