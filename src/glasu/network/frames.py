"""Frames of a stream. They are numbered, acknowledged, sent again after a break, and checked before they are stored.

frame     kind (1 byte), number (8), last number received from the other side (8), body
control   a JSON object, see `control.py`
piece     total length and offset (8 bytes each), then at most MAX_PIECE of one message; pieces come in order.
          A party may put several short messages into one frame.
ack       no body: only the number received

The frames of one direction are numbered from 1, across all streams of the same two processes. Number 0 is outside the
sequence: hello and welcome, acks, notices, and the last message of either side. Such frames may be lost. This module
has no locks: a session holds its own lock when it calls a function of this module.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from glasu.errors import ProtocolError
from glasu.network.control import pack_control, read_control
from glasu.protocol.message_bytes import Head, allocate, read_header

CONTROL, PIECE, ACK = 0, 1, 2
MAX_PIECE = 1 << 20
MAX_FRAME = MAX_PIECE + (1 << 12)  # gRPC refuses longer frames before they reach this module
CONTROL_BYTES = 64 << 10  # limit of a party's control frame; settings, facts and starts have a few KiB
WINDOW = 8 << 20  # unacknowledged bytes in flight; it allows 80 MB/s at a round trip of 100 ms
ROOM = 8 << 20  # acknowledgements stop when this many bytes from one peer wait in its inbox
OVERHEAD = 512  # memory overhead of a queued frame or message, in bytes
FRAME_HEADER = struct.Struct("<BQQ")
_PIECE = struct.Struct("<QQ")

CheckLimits = Callable[[Head, int], None]  # raises ProtocolError for a message that is too long for its kind
Body = bytes | memoryview


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    number: int
    acknowledged: int
    body: memoryview
    control: Any  # the control message in it; None in pieces and acks


class Encoded(NamedTuple):
    """A complete message that is not decoded yet."""

    head: Head
    content: memoryview


def make_control_frame(message: object) -> bytes:
    """Return a control message as a frame outside the sequence."""
    return pack_frame(CONTROL, pack_control(message))


def pack_frame(kind: int, *body: Body, number: int = 0, acknowledged: int = 0) -> bytes:
    """Return a frame as bytes. The arguments `body` are concatenated."""
    return b"".join((FRAME_HEADER.pack(kind, number, acknowledged), *body))


def read_frame(data: bytes, max_control: int = MAX_FRAME) -> Frame:
    """Return a frame's parts, or refuse it; a control message of more than `max_control` bytes is not parsed."""
    if len(data) < FRAME_HEADER.size:
        raise ProtocolError(f"frame of {len(data)} bytes: expected at least {FRAME_HEADER.size}, for its header.")
    kind, number, acknowledged = FRAME_HEADER.unpack_from(data)
    if kind not in (CONTROL, PIECE, ACK):
        raise ProtocolError(f"frame of unknown kind {kind}.")
    if kind != CONTROL and (number == 0) != (kind == ACK):
        raise ProtocolError(f"frame of kind {kind} with number {number}: pieces are numbered, acks are not.")
    body = memoryview(data)[FRAME_HEADER.size :]
    control = read_control(body, max_control) if kind == CONTROL else None
    return Frame(kind, number, acknowledged, body, control)


class Outbox:
    """Frames of one direction until they are acknowledged. After a break, `rewind` makes them be sent again."""

    def __init__(self, window: int = WINDOW) -> None:
        """Begin with frame 1. At most `window` bytes and one frame are in flight."""
        self._window = window
        self._frames: deque[tuple[int, Body, Body]] = deque()  # unacknowledged: kind, body in two parts
        self._first = 1  # number of the oldest unacknowledged frame
        self._sent = 0  # how many of these frames were sent on the current stream
        self._highest = 0  # number of the last frame that was sent on any stream
        self._in_flight = 0  # unacknowledged bytes sent on the current stream
        self.held = 0  # bytes of all unacknowledged frames

    def put_control(self, message: object) -> None:
        """Append a control message."""
        self._put(CONTROL, pack_control(message), b"")

    def put_message(self, message: bytes) -> None:
        """Append an encoded message in pieces. The pieces are views of `message`, so that outboxes can share it."""
        view = memoryview(message)
        for offset in range(0, max(1, len(message)), MAX_PIECE):
            self._put(PIECE, _PIECE.pack(len(message), offset), view[offset : offset + MAX_PIECE])

    def put_bundle(self, messages: Sequence[bytes]) -> None:
        """Append encoded messages. Several short ones share a frame: a frame costs more than their bytes."""
        if len(messages) > 1 and sum(map(len, messages)) + len(messages) * _PIECE.size <= MAX_PIECE:
            self._put(PIECE, b"", b"".join(_PIECE.pack(len(message), 0) + message for message in messages))
            return
        for message in messages:
            self.put_message(message)

    def _put(self, kind: int, head: Body, rest: Body) -> None:
        self._frames.append((kind, head, rest))
        self.held += len(head) + len(rest) + OVERHEAD

    @property
    def is_full(self) -> bool:
        """Return whether a sender should wait before it appends more."""
        return self.held > self._window

    @property
    def has_next(self) -> bool:
        """Return whether a frame waits to be sent and the window is open."""
        return self._sent < len(self._frames) and self._in_flight <= self._window

    def take_next(self, acknowledged: int) -> bytes | None:
        """Return the next frame to send on the current stream, if there is one and the window is open."""
        if not self.has_next:
            return None
        kind, head, rest = self._frames[self._sent]
        number = self._first + self._sent
        self._sent += 1
        self._in_flight += len(head) + len(rest) + OVERHEAD
        self._highest = max(self._highest, number)
        return pack_frame(kind, head, rest, number=number, acknowledged=acknowledged)

    def acknowledge(self, number: int) -> None:
        """Free every frame up to this number."""
        if number > self._highest:
            raise ProtocolError(f"frame {number} is acknowledged, but {self._highest} was the last frame sent.")
        while self._first <= number:
            _, head, rest = self._frames.popleft()
            size = len(head) + len(rest) + OVERHEAD
            self.held -= size
            self._first += 1
            if self._sent:
                self._sent -= 1
                self._in_flight -= size

    def rewind(self, received: int) -> None:
        """Begin another stream. All frames after `received` are sent again."""
        if received < self._first - 1:
            raise ProtocolError(f"frame {received + 1} is requested again, but it was acknowledged before.")
        self.acknowledge(received)
        self._sent = self._in_flight = 0


class Channel:
    """The numbered frames that two processes exchange in both directions, over all their streams.

    Received frames are acknowledged immediately, unless ROOM bytes wait in the inbox. Without acknowledgements, the
    sender stops at its window. So a receiver holds at most ROOM + WINDOW bytes and a message, and it never stops
    reading. It must not stop, because acknowledgements arrive among the data: if both sides stopped, they would wait
    for each other.
    """

    def __init__(self, process: str = "", window: int = WINDOW, room: int = ROOM) -> None:
        """Begin a channel with the other side's process of this name."""
        self.process, self._window, self._room = process, window, room
        self.outbox = Outbox(window)
        self.received = 0  # number of the last frame received
        self.assembler = Assembler()
        self.inbox: deque[tuple[Any, int]] = deque()  # received items with their sizes
        self.waiting = 0  # bytes in the inbox
        self._acknowledged = 0  # number acknowledged by the last frame sent
        self._unacknowledged = 0  # bytes received since then

    def accept(self, frame: Frame) -> bool:
        """Record a frame's numbers; return True for the next frame, False for a repeated frame. A gap is an error."""
        self.outbox.acknowledge(frame.acknowledged)
        if frame.number > self.received + 1:
            raise ProtocolError(f"expected frame {self.received + 1}, got frame {frame.number}.")
        if frame.number <= self.received:
            return False
        self.received = frame.number
        self._unacknowledged += len(frame.body) + OVERHEAD
        return True

    def put(self, item: Any, size: int) -> None:
        """Append a received item to the inbox."""
        self.inbox.append((item, size + OVERHEAD))
        self.waiting += size + OVERHEAD

    def pop(self) -> Any:
        """Take the first item of the inbox."""
        item, size = self.inbox.popleft()
        self.waiting -= size
        return item

    def clear(self) -> None:
        """Drop the inbox, and the pieces of a message that is not complete: they belong to an attempt that is over."""
        self.inbox.clear()
        self.waiting, self.assembler = 0, Assembler()

    @property
    def is_full(self) -> bool:
        """Return whether the waiting bytes exceed the room, so nothing more is acknowledged."""
        return self.waiting >= self._room

    @property
    def is_overrun(self) -> bool:
        """Return whether the inbox exceeds the bytes that the other side may have sent."""
        return self.waiting > self._room + self._window + 2 * MAX_FRAME

    @property
    def has_next(self) -> bool:
        """Return whether `take_next` would return a frame."""
        return self.outbox.has_next or self._needs_ack

    @property
    def _needs_ack(self) -> bool:
        """Return whether a part of the window was received, so that an ack is due if no other frame can carry it."""
        return not self.is_full and self._unacknowledged >= self._window // 16

    def take_next(self) -> bytes | None:
        """Return the next frame to send, an ack if one is due, or None."""
        may_acknowledge = not self.is_full
        acknowledged = self.received if may_acknowledge else self._acknowledged
        frame = self.outbox.take_next(acknowledged)
        if frame is None and self._needs_ack:
            frame = pack_frame(ACK, acknowledged=acknowledged)
        if frame is not None and may_acknowledge:
            self._acknowledged, self._unacknowledged = acknowledged, 0
        return frame


def split_pieces(body: memoryview) -> Iterator[memoryview]:
    """Yield the pieces in the body of a frame: the bytes after the end of a message begin another message."""
    while len(body) > _PIECE.size:
        total, offset = _PIECE.unpack_from(body)
        end = _PIECE.size + max(0, total - offset)
        yield body[:end]
        body = body[end:]
        if not body:
            return
    yield body  # too short; the assembler refuses it


class Assembler:
    """Puts the pieces of a message into one buffer, which is allocated after the message's header is accepted."""

    def __init__(self) -> None:
        self._head: Head | None = None  # header of the incomplete message
        self._buffer = memoryview(b"")
        self._filled = 0

    def add(self, piece: memoryview, admit: CheckLimits) -> Encoded | None:
        """Take the next piece; return the message, in the buffer itself, when it is complete.

        Args:
            piece: the body of a frame.
            admit: gets header and size of a message before memory is allocated for it, and raises ProtocolError to
                refuse it.
        """
        if len(piece) <= _PIECE.size:
            raise ProtocolError(f"piece of {len(piece)} bytes: expected more than {_PIECE.size}, for its header.")
        total, offset = _PIECE.unpack_from(piece)
        content = piece[_PIECE.size :]
        if self._head is None:
            if offset:
                raise ProtocolError(f"expected the first piece of a message, got one at {offset} of {total} bytes.")
            head = read_header(content, total)
            admit(head, total)
            self._head, self._buffer, self._filled = head, allocate(total), 0
        if (offset, total) != (self._filled, len(self._buffer)) or offset + len(content) > total:
            raise ProtocolError(
                f"{self._head}: expected a piece at {self._filled} of {len(self._buffer)} bytes, got one of "
                f"{len(content)} at {offset} of {total}."
            )
        self._buffer[offset : offset + len(content)] = content
        self._filled += len(content)
        if self._filled < total:
            return None
        whole, self._head = Encoded(self._head, self._buffer), None
        return whole
