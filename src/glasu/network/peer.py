"""One party as the server sees it: its state, its stream, and the messages of its that wait to be used.

Nothing here locks. The session calls everything with its lock held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from glasu.errors import EquivocationError
from glasu.network.frames import Channel
from glasu.network.handshake import Payload
from glasu.network.states import PeerEvent, PeerState, StateMachine, peer_machine
from glasu.network.transport import Stream
from glasu.protocol.requests import Receive
from glasu.wire.message_key import Key

GROUPS = 8  # phases of rounds whose digests are kept; an exchange mixes few, and the previous phase must be among them


class Receipts:
    """Keys and digests of the messages that a party sent in the current and the previous phases.

    No honest party sends a key twice: frames are numbered. A repeat with the same content is dropped. Two contents
    under one key stop the run, because one of them is not the computed one.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], dict[bytes, bytes]] = {}  # by phase and round: digests by key

    def knows(self, key: Key) -> bool:
        """Return whether a message with this key came before."""
        return key.pack() in self._groups.get((int(key.phase), key.round), {})

    def take(self, key: Key, digest: bytes) -> bool:
        """Return whether a message is new; raise EquivocationError where its key came with another content."""
        group, packed = (int(key.phase), key.round), key.pack()
        known = self._groups.get(group, {}).get(packed)
        if known == digest:
            return False
        if known is not None:
            raise EquivocationError(
                f"{key}: came with two different contents, SHA-256 {known.hex()} and {digest.hex()}; the run stops, "
                "because one of them is not the computed one."
            )
        if group not in self._groups:
            for oldest in list(self._groups)[: 1 - GROUPS]:
                del self._groups[oldest]
            self._groups[group] = {}
        self._groups[group][packed] = digest
        return True


@dataclass(eq=False)
class Peer:
    """One party, as the server sees it."""

    name: str
    index: int
    away_since: float  # when it lost its last stream, or the run began
    stream: Stream | None = None
    machine: StateMachine[PeerState, PeerEvent] = field(default_factory=peer_machine)
    channel: Channel = field(default_factory=Channel)  # shared with the last process that was admitted
    receipts: Receipts = field(default_factory=Receipts)
    expected: Receive | None = None  # the message that the thread of the run waits for, right now
    refusal: str = ""  # why its last process was refused
    result: Payload = field(default_factory=dict)  # its report when it finished

    @property
    def state(self) -> PeerState:
        return self.machine.state

    @property
    def is_connected(self) -> bool:
        return self.stream is not None

    @property
    def has_heard_all(self) -> bool:
        """Return whether its process has acknowledged every frame."""
        return self.channel.outbox.held == 0

    def clear(self) -> None:
        """Drop all messages, pieces and receipts: another attempt begins."""
        self.channel.clear()
        self.receipts = Receipts()

    def send_control(self, message: object) -> None:
        """Send a control message in the sequence: it arrives, over this stream or a later one."""
        self.channel.outbox.put_control(message)
