"""The server's session with all parties, as the thread of the run uses it: gather, begin, receive, send, finish.

Threads of gRPC put frames in (`peer_frames.py`), the thread of the run takes messages out. One lock guards both; its
order is described in `roster.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from glasu.errors import CheckpointError, DataError, GlasuError, ProtocolError, TrainingError, get_public_message
from glasu.network.frames import CheckLimits, check_expected, describe_expected
from glasu.network.handshake import Payload, ServerHandshake
from glasu.network.peer import Peer
from glasu.network.peer_frames import OnInvalidMessage, PeerFrames
from glasu.network.roster import Attempt, RestartAttempt, Roster, last_word
from glasu.network.states import PeerEvent, PeerState, RunEvent
from glasu.network.transport import Host
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Message
from glasu.protocol.requests import Receive

__all__ = ["OnInvalidMessage", "RestartAttempt", "ServerSession"]


class ServerSession:
    """All parties of one run, at the server.

    gather -> begin_attempt -> receive, broadcast, scatter ... -> collect_results -> dismiss. Any of these raises
    RestartAttempt when a party's process is new: gather again then. They raise the error of the run when it failed.
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
    ) -> None:
        """Expect the parties of the roster.

        Args:
            roster: names, in client order.
            handshake: decides which processes take part.
            run: the id of the run.
            wait: seconds that a party may be without a connection.
            log: receives lines for people.
            on_invalid_message: abort the run, or drop the sender and wait for it to reconnect.
            clock: returns seconds.
        """
        self._wait, self._handshake = wait, handshake
        self._roster = Roster(roster, clock, log)
        self._frames = PeerFrames(self._roster, handshake, run, on_invalid_message)

    # --- for a Listener, and for status displays in other threads ---------------------------

    @property
    def host(self) -> Host:
        """The receiver of streams that a `Listener` needs."""
        return self._frames

    @property
    def num_parties(self) -> int:
        return len(self._roster.peers)

    @property
    def refused(self) -> int:
        """How many connections and processes were refused."""
        return self._frames.refusals.count

    @property
    def seconds_waited(self) -> float:
        """How long the thread of the run has waited for parties."""
        return self._roster.seconds_waited

    def connected(self) -> dict[str, bool]:
        """Return which parties have a stream now."""
        with self._roster.changed:
            return {name: peer.is_connected for name, peer in self._roster.peers.items()}

    # --- an attempt --------------------------------------------------------------------------

    def gather(self) -> None:
        """Wait until every party is connected and its statement has passed the handshake."""
        roster = self._roster
        with roster.changed:
            if roster.failure is not None:
                raise roster.failure
            roster.run.advance(RunEvent.GATHER)
            roster.attempt = roster.expected = None
            for peer in roster.peers.values():
                peer.conversation.inbox.clear()
                if peer.machine.allows(PeerEvent.REGATHER):  # its checkpoints may have changed since its statement
                    peer.machine.advance(PeerEvent.REGATHER)
                    peer.send_control("report")
            roster.changed.notify_all()
            self._wait_for(lambda peer: peer.is_connected and peer.state is PeerState.PREPARED, "to join")

    def begin_attempt(
        self, number: int, round_index: int, digests: Sequence[str | None], check_limits: CheckLimits
    ) -> None:
        """Propose an attempt to the gathered parties, and wait until every party has confirmed it.

        Args:
            number: of the attempt; greater than all before.
            round_index: the attempt continues after this round.
            digests: of the parties' checkpoints of that round, in client order. A party must confirm its own.
            check_limits: refuses a message, by its header and size, that is too long for this run.
        """
        roster = self._roster
        with roster.changed:
            if any(peer.state is not PeerState.PREPARED for peer in roster.peers.values()):
                raise RestartAttempt  # a process came after `gather`, and has to be gathered as well
            roster.run.advance(RunEvent.PROPOSE)
            roster.attempt = Attempt(number, round_index, tuple(digests), check_limits)
            self._handshake.settle()
            for peer, digest in zip(roster.peers.values(), digests, strict=True):
                peer.machine.advance(PeerEvent.PROPOSE)
                peer.result = None
                peer.send_control("begin", attempt=number, round=round_index, digest=digest)
            roster.changed.notify_all()
            running = (PeerState.RUNNING, PeerState.FINISHED)  # a party with nothing left to do has finished already
            self._wait_for(lambda peer: peer.state in running, f"to continue after round {round_index}")
            roster.run.advance(RunEvent.START)

    def receive(self, expected: Receive) -> list[Message]:
        """Return the next message of every party, in client order; it must be the expected one."""
        roster = self._roster
        with roster.changed:
            roster.expected = expected
            try:
                self._wait_for(lambda peer: peer.conversation.inbox.is_ready, f"to send {describe_expected(expected)}")
                messages = [self._pop(peer, expected) for peer in roster.peers.values()]
            finally:
                roster.expected = None
            roster.changed.notify_all()  # there is room again
            return messages

    def broadcast(self, message: Message) -> None:
        """Send one message to every party, when there is room in its window."""
        self._send([encode(message)] * self.num_parties, message)

    def scatter(self, messages: Sequence[Message]) -> None:
        """Send every party its own message, in client order."""
        self._send([encode(message) for message in messages], messages[0])

    def collect_results(self) -> list[Payload]:
        """Wait until every party has written its results; return what each reported, in client order."""
        roster = self._roster
        with roster.changed:
            roster.run.advance(RunEvent.EXHAUST)
            self._wait_for(lambda peer: peer.state is PeerState.FINISHED, "to finish")
            return [peer.result or {} for peer in roster.peers.values()]

    # --- the end -------------------------------------------------------------------------------

    def set_aside(self, error: GlasuError) -> bool:
        """Drop the party whose message caused an error of the script, where the policy waits for it; else return False.

        After True, gather the parties again.
        """
        peer = self._roster.peers.get(error.party)
        if peer is None or not self._frames.refusals.may_return(error):
            return False
        with self._roster.changed:
            self._frames.refusals.expel(peer, error.public_message)
            self._roster.note(f"the run continues from the last common checkpoint when {peer.name} reconnects.")
        return True

    def dismiss(self, seconds: float, farewell: Payload | None = None) -> None:
        """Tell every party that the run is complete; wait a little for all to hang up, and for absent ones to come.

        Args:
            seconds: how long to wait.
            farewell: a payload for every party, which its `ClientSession.farewell` returns.
        """
        roster = self._roster
        with roster.changed:
            roster.farewell = farewell or {}
            roster.run.advance(RunEvent.CLOSE)
            for peer in roster.peers.values():
                self._frames.dismiss(peer)
            self._wait_for_end(
                lambda peer: peer.state is PeerState.DISMISSED and not peer.is_connected and peer.has_heard_all,
                roster.clock() + seconds,
            )

    def announce_failure(self, error: BaseException, seconds: float) -> None:
        """Tell every party why the run ends, ahead of data that waits; wait a little for all to hang up."""
        why = get_public_message(error)
        if not isinstance(error, GlasuError) or isinstance(error, CheckpointError | DataError):
            why = f"the server failed: {why}"
        roster = self._roster
        with roster.changed:
            roster.fail(TrainingError(why))  # a party that connects now hears it, too
            for peer in roster.peers.values():
                if peer.stream is not None:
                    peer.stream.close(last_word("stopped", why))
            self._wait_for_end(lambda peer: not peer.is_connected, roster.clock() + seconds)

    def leave(self) -> None:
        """Note that this process is interrupted: streams end because of it, and the parties wait for the next one."""
        with self._roster.changed:
            self._roster.run.advance(RunEvent.LEAVE)

    # --- helpers, called with the lock ---------------------------------------------------------

    def _wait_for(self, done: Callable[[Peer], bool], what: str) -> None:
        peers = self._roster.peers.values()
        self._roster.wait_until(lambda: [peer for peer in peers if not done(peer)], self._wait, what)

    def _wait_for_end(self, done: Callable[[Peer], bool], deadline: float) -> None:
        roster = self._roster
        while not all(map(done, roster.peers.values())) and roster.clock() < deadline:
            roster.changed.wait(0.2)

    def _pop(self, peer: Peer, expected: Receive) -> Message:
        message = peer.conversation.inbox.pop()
        try:
            check_expected(expected, type(message), message.key)
        except ProtocolError as error:
            found = ProtocolError(f"party {peer.name!r}: {error}", party=peer.name)
            if not self._frames.refusals.may_return(error):
                raise found from None
            self._frames.refusals.expel(peer, str(error))
            raise RestartAttempt from None
        return message

    def _send(self, encoded: Sequence[bytes], message: Message) -> None:
        roster = self._roster
        with roster.changed:
            self._wait_for(
                lambda peer: not peer.conversation.channel.outbox.is_full,
                f"to take the {type(message).__name__} messages of round {message.key.round}",
            )
            for peer, content in zip(roster.peers.values(), encoded, strict=True):
                peer.conversation.channel.outbox.put_message(content)
            roster.changed.notify_all()
