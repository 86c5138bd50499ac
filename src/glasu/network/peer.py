"""One party as the server sees it: its stream, what its process says of itself, and what waits to be used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from glasu.errors import ProtocolError
from glasu.network.deduplication import Receipts
from glasu.network.frames import Assembler
from glasu.protocol.messages import Message

FEW = 2  # frames, of at most a MiB: what a slow line carries in the time that a last word has
COUNTS = {"nodes", "classes", "validation nodes", "test nodes"}


class Stream:
    """One connection of a party: frames to send, until it is closed."""

    def __init__(self) -> None:
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self.open = True
        self.accepted = False  # whoever is at its other end has said who it is, and may take part

    def send(self, frame: bytes) -> None:
        self._frames.put(frame)

    def send_soon(self, frame: bytes) -> None:
        """Send a last frame, which does not wait for many others."""
        put_soon(self._frames, frame)

    def close(self) -> None:
        """End the stream after what has been sent."""
        self.open = False
        self._frames.put(None)

    def outgoing(self) -> Iterator[bytes]:
        """Yield what is to be sent, until the stream is closed."""
        yield from iter(self._frames.get, None)


def put_soon(frames: SimpleQueue[bytes | None], frame: bytes) -> None:
    """Put a last frame into a queue, behind the next few at most: they are pieces of one message, without a gap."""
    waiting = []
    with suppress(Empty):
        while True:
            waiting.append(frames.get_nowait())
    for one in (*waiting[:FEW], frame):
        frames.put(one)


class Statement(NamedTuple):
    """What a party that is prepared states."""

    rounds: dict[int, str]  # its checkpoints and their digests
    facts: dict[str, Any]  # what must be equal at all parties


@dataclass(frozen=True)
class Hello:
    """What a party's process says of itself when it comes."""

    process: tuple[int, str]  # which start of its command, and which process
    before: tuple[str, ...]  # the processes that were started before it from the same folder
    run: str | None  # whose part its folder holds
    only: str | None  # in which alone it wants to take part
    fresh: bool  # it wants to start over, and gives its part of an earlier run up once this one begins
    attempt: int
    facts: dict[str, Any]
    rounds: dict[int, str]  # its checkpoints and their digests
    finished: dict[str, Any] | None  # what it found, once it has written its results


@dataclass(eq=False)
class Link:
    """One party, as the server sees it."""

    name: str
    index: int
    stream: Stream | None = None
    away_since: float = 0.0  # when it had a stream last, or could have come
    hello: Hello | None = None  # of the process that takes part
    facts: dict[str, Any] = field(default_factory=dict)  # what must be equal at all parties
    prepared: str | None = None  # the digest of the settings that it is ready to run
    rounds: dict[int, str] = field(default_factory=dict)  # its checkpoints and their digests, when it was prepared
    ready: int = 0  # the attempt that it has confirmed
    finished: dict[str, Any] | None = None
    inbox: deque[tuple[Message, int]] = field(default_factory=deque)
    receipts: Receipts = field(default_factory=Receipts)
    assembler: Assembler = field(default_factory=lambda: Assembler(0))
    refused: str = ""  # why its last process was not accepted
    compared: bool = False  # everyone was told where its builds are others
    dismissed: bool = False  # it was told that everyone is finished

    def send(self, frame: bytes) -> None:
        if self.stream is not None:
            self.stream.send(frame)

    def statement(self) -> Statement:
        return Statement(self.rounds, self.facts)

    def waiting_bytes(self) -> int:
        return sum(size for _, size in self.inbox)


def stated_facts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a party states about itself, without what it states to be nothing; counts must be counts."""
    stated = fields.get("facts")
    if not isinstance(stated, dict):
        raise ProtocolError("it does not say what it must have in common with the others.")
    facts = {name: value for name, value in stated.items() if value is not None}
    for name in COUNTS & set(facts):
        if not isinstance(facts[name], int) or not 0 <= facts[name] < 2**31:
            raise ProtocolError(f"{name}: expected a number, got {str(facts[name])[:60]!r}.")
    if "nodes" not in facts:
        raise ProtocolError("it does not say how many nodes it has.")
    return facts


def _count(value: Any, least: int, beyond: int) -> int:
    if not isinstance(value, int) or not least <= value < beyond:
        raise ValueError
    return value


def stated_rounds(fields: Mapping[str, Any]) -> dict[int, str]:
    """Return the checkpoints that a party says it has, and their digests."""
    try:
        return {_count(int(key), 0, 2**32): str(value) for key, value in fields["rounds"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ProtocolError("it does not say which checkpoints it has.") from None


def read_hello(fields: Mapping[str, Any]) -> Hello:
    """Return what a party's process says of itself, or refuse it."""
    if fields["kind"] != "hello":
        raise ProtocolError(f"expected a hello, got {fields['kind']!r}.")
    try:
        process = (_count(fields["incarnation"], 1, 2**32), str(fields["process"])[:64])
        before = tuple(map(str, fields.get("before", ())))
        attempt, finished = _count(fields["attempt"], 0, 2**31), fields["finished"]
        facts, rounds = stated_facts(fields), stated_rounds(fields)
        return Hello(
            process,
            before,
            fields["run"],
            fields.get("only"),
            fields.get("fresh") is True,
            attempt,
            facts,
            rounds,
            finished and dict(finished),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ProtocolError("its hello is incomplete; do both sides run the same version of GLASU?") from None
