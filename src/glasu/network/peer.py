"""One party as the server sees it: its state, its stream, and the messages of its that wait to be used.

Nothing here locks. The session calls everything with its lock held.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from glasu.errors import EquivocationError
from glasu.network.frames import Assembler, Channel, Encoded
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


class Conversation:
    """What one process of a party and this server have exchanged, over all streams between them."""

    def __init__(self, process: str) -> None:
        """Begin; `process` is the name that the party's session gave itself."""
        self.process = process
        self.channel = Channel()
        self.assembler = Assembler()
        self.receipts = Receipts()
        self.inbox: deque[Encoded] = deque()  # in the order of their frames; their bytes wait in the channel

    def put(self, message: Encoded) -> None:
        """Append a message to the inbox."""
        self.inbox.append(message)
        self.channel.hold(len(message.content))

    def pop(self) -> Encoded:
        """Take the first message of the inbox."""
        message = self.inbox.popleft()
        self.channel.release(len(message.content))
        return message

    def clear(self) -> None:
        """Drop all messages, pieces and receipts: another attempt begins."""
        while self.inbox:
            self.pop()
        self.assembler, self.receipts = Assembler(), Receipts()


@dataclass(eq=False)
class Peer:
    """One party, as the server sees it."""

    name: str
    index: int
    away_since: float  # when it lost its last stream, or the run began
    stream: Stream | None = None
    machine: StateMachine[PeerState, PeerEvent] = field(default_factory=peer_machine)
    conversation: Conversation = field(default_factory=lambda: Conversation(""))
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
        return self.conversation.channel.outbox.held == 0

    def send_control(self, message: object) -> None:
        """Send a control message in the sequence: it arrives, over this stream or a later one."""
        self.conversation.channel.outbox.put_control(message)
