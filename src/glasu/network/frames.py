"""Frames of a stream. They are numbered, acknowledged, sent again after a break, and checked before they are stored.

frame     kind (1 byte), number (8 bytes), acknowledged number (8 bytes), body
control   the body is a JSON object, see `control.py`
piece     the body is the total length and the offset (8 bytes each), then at most MAX_PIECE bytes of one message. The
          pieces of a message are sent in order. A party may put several short messages into one frame.
ack       no body

In each direction, frames are numbered from 1, and the numbers continue on every new stream between the same two
processes. Frames with number 0 are outside the sequence and may be lost: hello, welcome, acks, notices, and the last
message of either side.

Numbered frames and acks acknowledge the last frame received from the other side, or an earlier one while the inbox is
full. Other frames acknowledge 0, which has no effect. So does the heartbeat of the server, which is an ack.

This module has no locks: a session holds its own lock when it calls a function of this module.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from glasu.errors import ProtocolError
from glasu.network.control import pack_control
from glasu.protocol.message_bytes import Head, allocate, read_header

CONTROL, PIECE, ACK = 0, 1, 2
MAX_PIECE = 1 << 20
MAX_FRAME = MAX_PIECE + (1 << 12)  # gRPC refuses longer frames before they reach this module
# Limit of a party's control frame. Settings, facts and the names of its processes (`fencing.py`) take a few KiB.
CONTROL_BYTES = 64 << 10
WINDOW = 8 << 20  # limit of the unacknowledged bytes in flight; enough for 80 MB/s with a round trip time of 100 ms
ROOM = 8 << 20  # a receiver stops acknowledging when this many bytes from one peer wait in the inbox
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
    body: memoryview  # not parsed: a parsed control message may take many times as much memory


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


def read_frame(data: bytes) -> Frame:
    """Read and check the header of a frame."""
    if len(data) < FRAME_HEADER.size:
        raise ProtocolError(f"frame of {len(data)} bytes: expected at least a header of {FRAME_HEADER.size} bytes.")
    kind, number, acknowledged = FRAME_HEADER.unpack_from(data)
    if kind not in (CONTROL, PIECE, ACK):
        raise ProtocolError(f"frame of unknown kind {kind}.")
    if kind != CONTROL and (number == 0) != (kind == ACK):
        raise ProtocolError(f"frame of kind {kind} with number {number}: pieces have a number above 0, acks have 0.")
    return Frame(kind, number, acknowledged, memoryview(data)[FRAME_HEADER.size :])


class Outbox:
    """The outgoing frames that are not acknowledged yet. After a break, they are sent again; see `rewind`."""

    def __init__(self, window: int = WINDOW) -> None:
        """Begin with frame 1. At most `window` bytes plus one frame are in flight."""
        self._window = window
        self._frames: deque[tuple[int, Body, Body]] = deque()  # unacknowledged frames: kind, two parts of the body
        self._first = 1  # number of the oldest unacknowledged frame
        self._sent = 0  # how many of the unacknowledged frames were sent on the current stream
        self._highest = 0  # number of the last frame that was sent on any stream
        self._in_flight = 0  # unacknowledged bytes sent on the current stream
        self.held = 0  # bytes of all unacknowledged frames

    def put_control(self, message: object) -> None:
        """Append a control message."""
        self._put(CONTROL, pack_control(message), b"")

    def put_message(self, message: bytes) -> None:
        """Append an encoded message in pieces. The pieces are views of `message`, so several outboxes can share it."""
        view = memoryview(message)
        for offset in range(0, max(1, len(message)), MAX_PIECE):
            self._put(PIECE, _PIECE.pack(len(message), offset), view[offset : offset + MAX_PIECE])

    def put_bundle(self, messages: Sequence[bytes]) -> None:
        """Append encoded messages. Short messages share one frame, because every additional frame has a cost."""
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

    A receiver acknowledges frames while fewer than ROOM bytes wait in its inbox. Without acknowledgements, the sender
    stops when its window is full. So a receiver that never stops reading holds at most ROOM + WINDOW bytes and one
    message. It must not stop reading, because acknowledgements arrive between the data: if both sides stopped, they
    would wait for each other.
    """

    def __init__(self, process: str = "", window: int = WINDOW, room: int = ROOM) -> None:
        """Begin a channel to a process of the other side; `process` is its random name."""
        self.process, self._window, self._room = process, window, room
        self.outbox = Outbox(window)
        self.received = 0  # number of the last frame received
        self.assembler = Assembler()
        self.inbox: deque[tuple[Any, int]] = deque()  # received items with their sizes
        self.waiting = 0  # bytes in the inbox
        self._acknowledged = 0  # number acknowledged by the last frame sent
        self._unacknowledged = 0  # bytes received since that acknowledgement

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
        """Drop the inbox and the incomplete message, because they belong to an attempt that is over."""
        self.inbox.clear()
        self.waiting, self.assembler = 0, Assembler()

    @property
    def is_full(self) -> bool:
        """Return whether the inbox is full. While it is full, no received frame is acknowledged."""
        return self.waiting >= self._room

    @property
    def is_overrun(self) -> bool:
        """Return whether the inbox holds more bytes than the other side is allowed to send."""
        return self.waiting > self._room + self._window + 2 * MAX_FRAME

    @property
    def has_next(self) -> bool:
        """Return whether `take_next` would return a frame."""
        return self.outbox.has_next or self._needs_ack

    @property
    def _needs_ack(self) -> bool:
        """Return whether an ack is due because 1/16 of the window was received since the last acknowledgement."""
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
    """Yield the pieces in the body of a frame. Bytes that follow the end of a message begin the next message."""
    while len(body) > _PIECE.size:
        total, offset = _PIECE.unpack_from(body)
        end = _PIECE.size + max(0, total - offset)
        yield body[:end]
        body = body[end:]
        if not body:
            return
    yield body  # too short; the assembler refuses it


class Assembler:
    """Assembles the pieces of a message. Its buffer is allocated only after the header of the message is accepted."""

    def __init__(self) -> None:
        self._head: Head | None = None  # header of the incomplete message
        self._buffer = memoryview(b"")
        self._filled = 0

    def add(self, piece: memoryview, admit: CheckLimits) -> Encoded | None:
        """Add the next piece. If the message is now complete, return it without a copy, otherwise None.

        Args:
            piece: the body of a frame.
            admit: called with the header and size of a message before memory is allocated; raises ProtocolError to
                refuse the message.
        """
        if len(piece) <= _PIECE.size:
            raise ProtocolError(f"piece of {len(piece)} bytes: expected content after a header of {_PIECE.size} bytes.")
        total, offset = _PIECE.unpack_from(piece)
        content = piece[_PIECE.size :]
        if self._head is None:
            if offset:
                raise ProtocolError(f"expected the first piece of a message, got offset {offset} of {total} bytes.")
            head = read_header(content, total)
            admit(head, total)
            self._head, self._buffer, self._filled = head, allocate(total), 0
        if (offset, total) != (self._filled, len(self._buffer)) or offset + len(content) > total:
            raise ProtocolError(
                f"{self._head}: expected a piece at offset {self._filled} of {len(self._buffer)} bytes, got "
                f"{len(content)} bytes at offset {offset} of {total}."
            )
        self._buffer[offset : offset + len(content)] = content
        self._filled += len(content)
        if self._filled < total:
            return None
        whole, self._head = Encoded(self._head, self._buffer), None
        return whole
