"""All parties of a run at the server, the state of the run, and the lock that guards both.

Lock order: first `Roster.changed`, then the lock of a `StateFile`. Code that holds the lock of a state file writes the
file and acquires no other lock.

gRPC's threads and the thread of the run hold `Roster.changed` only for short steps. They parse JSON, and encode, decode
and hash messages, without it. Code that holds it may write a log line and call the handshake, which updates
serving.json. When the handshake admits a new process, it also reads and hashes the server's checkpoints (at most two).
It needs the lock for this, because the checkpoints must not change until the process is admitted. This happens once per
start of a party.

The thread of the run updates the state file without `Roster.changed`. The listener in `transport.py` has a separate
lock, and does not hold it when it calls the session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from glasu.errors import AbsenceError, EquivocationError, GlasuError, ProtocolError
from glasu.network.control import Notice, StatementRequest, Stopped
from glasu.network.frames import Channel, CheckLimits, make_control_frame
from glasu.network.handshake import Payload, ResultPayload, ServerHandshake
from glasu.network.id_keys import IdShare
from glasu.network.log_lines import LimitedLog, make_printable
from glasu.network.signatures import SignedHead
from glasu.network.states import (
    PeerEvent,
    PeerState,
    RunEvent,
    RunState,
    StateMachine,
    make_peer_machine,
    make_run_machine,
)
from glasu.network.transport import FrameStream, SessionLock
from glasu.protocol.requests import Receive
from glasu.wire.message_key import Key

SHOWN_REFUSAL = 120  # number of characters of a refusal in the list of missing parties
NAMED_AFTER = 10.0  # seconds after which the log first names a missing party; the interval then grows
NAMED_EVERY = 60.0  # maximum interval in seconds; parties receive the line and see that the server is alive
GROUPS = 8  # number of (phase, round) pairs whose digests are kept; an exchange uses only a few pairs


class Receipts:
    """Keys and digests of the messages that a party sent in the last GROUPS (phase, round) pairs.

    A key must be received at most once. If frames are sent again after a break, the channel recognises their numbers
    and drops them before they are read as messages. Every attempt and every process begins with empty receipts, and
    keys contain the number of the attempt. So no honest party repeats a key, and a repeated key is an invalid message.
    It must not be ignored: a party could send it instead of the expected message, and the server would wait forever.
    If two messages with one key differ in content, one of them is wrong, and the run stops under every policy.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], dict[bytes, bytes]] = {}  # {(phase, round): {key: digest}}

    def knows(self, key: Key) -> bool:
        """Return whether a message with this key was received before."""
        return key.pack() in self._groups.get((int(key.phase), key.round), {})

    def take(self, key: Key, digest: bytes) -> None:
        """Record a message.

        Raises:
            ProtocolError: the same message was received before.
            EquivocationError: a different message with this key was received before.
        """
        group, packed = (int(key.phase), key.round), key.pack()
        known = self._groups.get(group, {}).get(packed)
        if known == digest:
            raise ProtocolError(f"{key}: received twice.")
        if known is not None:
            raise EquivocationError(
                f"{key}: received with two contents, SHA-256 {known.hex()} and {digest.hex()}; the run stops, because "
                "one of them is wrong."
            )
        if group not in self._groups:
            for oldest in list(self._groups)[: 1 - GROUPS]:
                del self._groups[oldest]
            self._groups[group] = {}
        self._groups[group][packed] = digest


@dataclass(eq=False)
class Peer:
    """What the server knows about one party."""

    name: str
    away_since: float  # when the party lost its last stream; before its first stream, the start of the server
    stream: FrameStream | None = None
    machine: StateMachine[PeerState, PeerEvent] = field(default_factory=make_peer_machine)
    channel: Channel = field(default_factory=Channel)  # the channel to the last admitted process
    receipts: Receipts = field(default_factory=Receipts)
    expected: Receive | None = None  # the message that the thread of the run waits for now
    refusal: str = ""  # why the party's last process was refused
    result: ResultPayload = field(default_factory=ResultPayload)  # empty until the party's `PartyResult` arrives

    @property
    def state(self) -> PeerState:
        return self.machine.state

    @property
    def is_connected(self) -> bool:
        return self.stream is not None

    def describe_connection(self) -> str:
        """Return whether the party is connected; if not, whether it was refused."""
        if self.is_connected:
            return "connected"
        if self.refusal:  # the log has the whole reason
            return f"refused: {make_printable(self.refusal, SHOWN_REFUSAL)}"
        return "not connected, start it there"

    def ask_again(self) -> None:
        """Ask for another statement, unless one is still due or the party is not part of the run."""
        if self.machine.allows(PeerEvent.REGATHER):
            self.machine.advance(PeerEvent.REGATHER)
            self.send_control(StatementRequest({}))

    def ask_to_compare(self, shares: Mapping[str, IdShare]) -> None:
        """Ask a prepared party to compare its ids with the parties in `shares`; it receives their key shares."""
        self.machine.advance(PeerEvent.COMPARE)
        self.send_control(StatementRequest(shares))

    @property
    def has_acknowledged_all(self) -> bool:
        """Return whether the party's process has acknowledged every frame."""
        return self.channel.outbox.held == 0

    def clear(self) -> None:
        """Drop all messages, pieces and receipts, because another attempt begins."""
        self.channel.clear()
        self.receipts = Receipts()

    def send_control(self, message: object) -> None:
        """Queue a numbered control message. It is sent on the current stream or a later one."""
        self.channel.outbox.put_control(message)


class RestartAttempt(Exception):  # noqa: N818 - not an error: another attempt follows
    """The attempt is void, because a party has a new process, was dropped or is omitted. Gather the parties again."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to run from a common checkpoint to the end."""

    number: int  # increases with every attempt
    round: int  # the attempt continues after this round
    digests: Mapping[str, str | None]  # digest of each party's checkpoint of that round, in client order
    check_limits: CheckLimits  # refuses a message that is too long for this run, from its header and size
    ledgers: Mapping[str, SignedHead] = field(default_factory=dict)  # heads of the ledgers, by party

    @property
    def present(self) -> tuple[str, ...]:
        """The parties of this attempt, in client order."""
        return tuple(self.digests)


class Roster:
    """The parties and the state of a run. Its methods wait for parties, and report the missing ones."""

    def __init__(
        self,
        names: Sequence[str],
        handshake: ServerHandshake,
        wait: float,
        clock: Callable[[], float],
        log: logging.Logger,
        lock: SessionLock,
    ) -> None:
        """Create a roster in which no party is connected.

        Args:
            names: the parties in client order.
            handshake: decides whether some parties continue without the missing ones.
            wait: seconds that a party may be without a connection.
            clock: returns seconds.
            log: receives lines for people.
            lock: guards the roster; its condition is notified after every change.
        """
        self.changed = lock
        self.peers = {name: Peer(name, away_since=clock()) for name in names}
        self._handshake = handshake
        self.run = make_run_machine()
        self.failure: GlasuError | None = None
        self.attempt: Attempt | None = None
        self.goodbye: Payload = {}  # the payload of the goodbye to every party
        self.log = LimitedLog(log, clock)
        self.clock, self._wait = clock, wait

    @property
    def present(self) -> list[Peer]:
        """The parties that are not absent, in client order."""
        return [peer for peer in self.peers.values() if peer.state is not PeerState.ABSENT]

    @property
    def is_receiving(self) -> bool:
        """Whether the thread of the run waits for a message that has not arrived."""
        return any(peer.expected is not None and not peer.channel.inbox for peer in self.peers.values())

    def fail(self, error: GlasuError) -> None:
        """Record the failure of the run. The thread of the run raises the first such error."""
        self.failure = self.failure or error
        self.run.advance(RunEvent.FAIL)
        self.changed.notify_all()

    def check(self) -> None:
        """Raise the error of a failed run, or RestartAttempt if the current attempt is void."""
        if self.failure is not None:
            raise self.failure
        if self.run.state is RunState.RESTARTING:
            raise RestartAttempt

    def stop(self, stream: FrameStream) -> None:
        """Close a stream after the run has failed. The last frame contains the reason."""
        if self.failure is not None:
            stream.close(make_control_frame(Stopped(self.failure.code, self.failure.public_message)))

    def restart(self) -> None:
        """Void the current attempt, if there is one."""
        if self.run.allows(RunEvent.RESTART):
            self.run.advance(RunEvent.RESTART)
        self.changed.notify_all()

    def drop(self, peer: Peer, event: PeerEvent, *last: bytes) -> None:
        """Remove a party's process from the run: close its stream, perhaps with a last frame."""
        peer.machine.advance(event)
        peer.clear()
        if peer.stream is not None:
            peer.stream.close(*last)
        peer.stream, peer.away_since = None, self.clock()
        self.changed.notify_all()

    def announce(self, line: str, about: str = "", without: Peer | None = None) -> None:
        """Write a line to the log and send it to every connected party, except one.

        Args:
            line: the text; parts that a party sent are already sanitized.
            about: the party that caused the line. The number of its lines is limited.
            without: a party that does not receive the line.
        """
        if not self.log.write(line, about):
            return
        notice = make_control_frame(Notice(line))
        for peer in self.peers.values():
            if peer.stream is not None and peer is not without:
                peer.stream.send(notice)

    def wait_for(self, done: Callable[[Peer], bool], what: str) -> None:
        """Wait until `done` is true for every party. After some time, log the parties for which it is false.

        A party with a stream is alive, because gRPC ends the stream of a dead process. It may compute as long as it
        needs. A party without a stream for too long is omitted, if the other parties can continue without it.
        Otherwise the run fails.
        """
        since, named, last = self.clock(), NAMED_AFTER, None
        while True:
            self.log.write_counts()
            self.check()
            pending = [peer for peer in self.present if not done(peer)]
            if not pending:
                return
            left = self._seconds_left(pending)
            if left <= 0:
                self._omit_overdue(pending, what)
                continue
            now, names = self.clock(), ", ".join(peer.name for peer in pending)
            if names != last:
                since, named, last = (now if last is not None else since), NAMED_AFTER, names
            if now - since >= named:
                states = "; ".join(f"{peer.name}: {peer.describe_connection()}" for peer in pending)
                self.announce(f"the server has been waiting for {names} {what} for {now - since:.0f} s ({states}).")
                named = min(2 * named, named + NAMED_EVERY)
            self.changed.wait(min(1.0, max(0.05, left)))

    def ask_to_compare(self) -> None:
        """Ask the first prepared party that has not compared its ids with all other prepared parties to do so.

        Parties are asked one after the other, in the order of their admission. So if the ids of two parties differ, the
        party that was admitted later is refused.
        """
        is_comparing = any(peer.state is PeerState.COMPARING for peer in self.present)
        if is_comparing or self.run.state is not RunState.GATHERING:
            return
        prepared = [peer.name for peer in self.present if peer.state is PeerState.PREPARED]
        found = self._handshake.find_comparison(prepared)
        if found is not None:
            party, shares = found
            self.peers[party].ask_to_compare(shares)

    def _seconds_left(self, pending: Sequence[Peer]) -> float:
        """Return the seconds until the first of these parties has been without a stream for too long."""
        gone = (peer for peer in pending if not peer.is_connected)
        return min((peer.away_since + self._wait - self.clock() for peer in gone), default=self._wait)

    def _omit_overdue(self, pending: Sequence[Peer], what: str) -> None:
        """Omit the overdue parties, or raise AbsenceError if the other parties cannot continue without them.

        If an attempt is running, it becomes void, because its messages were computed with the omitted parties.
        """
        overdue = [peer for peer in pending if not peer.is_connected and self._seconds_left([peer]) <= 0]
        refusals = "; ".join(f"{peer.name}: {peer.refusal}" for peer in overdue if peer.refusal)
        reasons = f" ({refusals})" if refusals else ""
        why = self._handshake.find_absence_error([peer.name for peer in self.present if peer not in overdue])
        if why is not None:
            raise AbsenceError(
                f"waited {self._wait:.0f} s for {', '.join(peer.name for peer in overdue)} {what}{reasons}; saved work "
                f"is kept. {why} Start the missing roles, then run the same command again."
            )
        for peer in overdue:
            self._handshake.withdraw(peer.name)
            self.drop(peer, PeerEvent.OMIT)
        names = ", ".join(peer.name for peer in overdue)
        self.announce(f"continuing without {names}: no connection for {self._wait:.0f} s{reasons}.")
        self.restart()
