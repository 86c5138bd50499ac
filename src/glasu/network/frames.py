"""What travels on a stream: control frames, messages in pieces, receipts; headers and sizes are checked first.

frame      one byte that tells the kind, then
control    a JSON object with "kind"
piece      total length and offset (8 bytes each), then at most PIECE_BYTES of one message; pieces come in order
receipt    the key of an answer that has arrived
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

from glasu.config import RunConfig
from glasu.errors import ProtocolError
from glasu.protocol import chunks
from glasu.protocol.message_bytes import HEADER, SECTION, Head, read_header, room_for
from glasu.protocol.messages import Gradient, Joint, JointGradient, JointScores, Message, Partial, Scores
from glasu.wire.message_key import RUN_BYTES, Key, Phase

CONTROL, PIECE, RECEIPT = 0, 1, 2
PIECE_BYTES = 1 << 20
MAX_FRAME = PIECE_BYTES + (1 << 12)  # gRPC refuses a longer one before it is here
CONTROL_BYTES = 64 << 10  # of a control frame of a party; settings, facts and starts have a few KiB
ROOM = 16 << 20  # bytes of one party's messages that wait to be used, and of answers that have not reached it
WINDOW = 4 << 20  # bytes of its messages that a party lets wait for answers, before it sends more of what goes together
SMALL = 256  # bytes of a message's own content, where it is no tensor
_PIECE = struct.Struct("<BQQ")


def control(kind: str, **fields: Any) -> bytes:
    """Return a control frame."""
    return bytes([CONTROL]) + json.dumps({"kind": kind, **fields}).encode()


ALIVE = control("alive")  # the server sends it every few seconds, so that parties notice a frozen one


def read_control(frame: bytes, most: int = MAX_FRAME) -> dict[str, Any]:
    """Return the fields of a control frame, or refuse it; one of more than `most` bytes is not read."""
    if len(frame) > most:
        raise ProtocolError(f"control frame: expected at most {most} bytes, got {len(frame)}.")
    try:
        fields = json.loads(frame[1:], parse_constant=_no_number)
        if not isinstance(fields["kind"], str):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ProtocolError(f"control frame of {len(frame)} bytes: expected a JSON object with a kind.") from None
    read: dict[str, Any] = fields
    return read


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def pieces(message: bytes) -> Iterator[bytes]:
    """Divide an encoded message into frames."""
    view = memoryview(message)
    for offset in range(0, max(1, len(message)), PIECE_BYTES):
        yield b"".join((_PIECE.pack(PIECE, len(message), offset), view[offset : offset + PIECE_BYTES]))


Admit = Callable[[Head, int], bool]


class Assembler:
    """Puts the pieces of messages together, each in one buffer, allocated when its header has been read."""

    def __init__(self, limit: int) -> None:
        """Accept messages of at most `limit` bytes."""
        self.limit = limit
        self.head: Head | None = None  # of the message that is under way, or was the last
        self._buffer: memoryview | None = None
        self._total = self._filled = 0  # equal: no message is under way

    def add(self, frame: bytes, admit: Admit = lambda head, size: True) -> memoryview | None:
        """Take the next piece; return the message, in the buffer itself, once it is whole.

        Args:
            frame: the piece.
            admit: is told the header and the size of a message before anything is allocated for it; refuses it by an
                error, or returns whether it is to be kept.
        """
        if len(frame) < _PIECE.size:
            raise ProtocolError(f"piece of {len(frame)} bytes: expected at least {_PIECE.size}, for its head.")
        _, total, offset = _PIECE.unpack_from(frame)
        content = memoryview(frame)[_PIECE.size :]
        if self._filled == self._total:
            self._begin(total, offset, content, admit)
        if (offset, total) != (self._filled, self._total) or offset + len(content) > total or not content:
            raise ProtocolError(
                f"{self.head}: expected a piece at {self._filled} of {self._total} bytes, got one of {len(content)} at "
                f"{offset} of {total}."
            )
        self._filled += len(content)
        if self._buffer is None:
            return None
        self._buffer[offset : self._filled] = content
        if self._filled < total:
            return None
        whole, self._buffer = self._buffer, None
        return whole

    def _begin(self, total: int, offset: int, content: memoryview, admit: Admit) -> None:
        """Read the header of a message, and make room for it if it is admitted."""
        if offset:
            raise ProtocolError(f"expected a piece at 0, where a message begins, got one at {offset} of {total} bytes.")
        if total > self.limit:
            about = f"{read_header(content, total)}: " if len(content) >= HEADER.size else ""
            raise ProtocolError(f"{about}message of {total} bytes declared: this run's settings allow {self.limit}.")
        self.head = read_header(content, total)
        self._buffer = room_for(total) if admit(self.head, total) else None
        self._total, self._filled = total, 0


class Limits:
    """How long the messages of a run may be, by what they are about."""

    def __init__(self, config: RunConfig, num_nodes: int, num_classes: int, num_clients: int) -> None:
        """Derive the limits from what is agreed at the handshake."""
        hidden, precision = config.model.hidden, config.wire.precision
        row = {"fp32": 4 * hidden, "fp64": 8 * hidden, "bf16": 2 * hidden, "int8": 4 + hidden}[precision]
        wide = row * (num_clients if config.model.aggregation == "concat" else 1)
        scores = (8 if precision == "fp64" else 4) * num_classes
        rows = min(num_nodes, chunks.CHUNK_ROWS)
        widths = {Partial: row, Joint: wide, Gradient: wide, JointGradient: wide, Scores: scores, JointScores: scores}
        self._own: dict[type[Message], int] = {kind: rows * width for kind, width in widths.items()}  # of a chunk
        self._losses = SECTION.size + 8 * config.train.num_local_steps
        self._set = SECTION.size + num_nodes  # a set of ids 0..N-1 has N bytes at most: a gap g has g + 1 or fewer
        self._ahead = max(1, config.train.prefetch)
        self.last_chunk = num_nodes // chunks.CHUNK_ROWS

    def of(self, kind: type[Message], key: Key) -> int:
        """Return how many bytes a message may have, in either direction."""
        size = HEADER.size + SECTION.size + self._own.get(kind, SMALL)
        if _carries(key):
            size += self._losses + self._rounds(key) * self._set
        return size

    def check(self, head: Head, size: int) -> None:
        """Refuse a message that is longer, or has more sections, than one of its kind can."""
        if size > (limit := self.of(head.kind, head.key)):
            raise ProtocolError(f"{head}: expected at most {limit} bytes, got {size}.")
        sections = 1 + (1 + self._rounds(head.key) if _carries(head.key) else 0)  # its own; losses, node sets
        if head.sections > sections:
            raise ProtocolError(f"{head}: expected at most {sections} sections, got {head.sections}.")

    def _rounds(self, key: Key) -> int:
        """Return of how many rounds node sets may ride."""
        return 1 if key.phase in (Phase.EVALUATION, Phase.PREDICTION) else self._ahead

    @property
    def largest(self) -> int:
        """How many bytes any message may have."""
        first = Key(run=bytes(RUN_BYTES), phase=Phase.TRAINING, client=0)
        return max(self.of(kind, first) for kind in (*self._own, Message))


def _carries(key: Key) -> bool:
    """Tell whether losses and node sets may ride on a message."""
    return key.phase is Phase.SAMPLING or key.chunk == 0
