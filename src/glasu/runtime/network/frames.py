"""What travels on a stream: control frames, messages in pieces, receipts; every size is checked before it is allocated.

frame      one byte that tells the kind, then
control    a JSON object with "kind"
piece      total length and offset (8 bytes each), then at most PIECE_BYTES of one message; pieces come in order
receipt    the key of an answer that has arrived
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from glasu.config import RunConfig
from glasu.errors import ProtocolError

CONTROL, PIECE, RECEIPT = 0, 1, 2
PIECE_BYTES = 1 << 20
MAX_FRAME = PIECE_BYTES + (1 << 12)  # gRPC refuses a longer one before it is here
_PIECE = struct.Struct("<BQQ")


def control(kind: str, **fields: Any) -> bytes:
    """Return a control frame."""
    return bytes([CONTROL]) + json.dumps({"kind": kind, **fields}).encode()


def read_control(frame: bytes) -> dict[str, Any]:
    """Return the fields of a control frame, or refuse it."""
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


class Assembler:
    """Puts the pieces of messages together, each in one buffer that is allocated once."""

    def __init__(self, limit: int) -> None:
        """Accept messages of at most `limit` bytes."""
        self.limit = limit
        self._buffer: bytearray | None = None
        self._filled = 0

    def add(self, frame: bytes) -> bytes | None:
        """Take the next piece; return the message once it is whole."""
        if len(frame) < _PIECE.size:
            raise ProtocolError(f"piece of {len(frame)} bytes: its head alone has {_PIECE.size}.")
        _, total, offset = _PIECE.unpack_from(frame)
        size = len(frame) - _PIECE.size
        if total > self.limit:
            raise ProtocolError(f"message of {total} bytes declared: this run's settings allow {self.limit}.")
        if self._buffer is None:
            if offset:
                raise ProtocolError(f"piece at {offset}: a message begins at 0.")
            self._buffer, self._filled = bytearray(total), 0
        if (offset, total) != (self._filled, len(self._buffer)) or offset + size > total or (size == 0 and total):
            raise ProtocolError(
                f"piece of {size} bytes at {offset} of {total}: expected one at {self._filled} of {len(self._buffer)}."
            )
        self._buffer[offset : offset + size] = memoryview(frame)[_PIECE.size :]
        self._filled += size
        if self._filled < total:
            return None
        whole, self._buffer = bytes(self._buffer), None
        return whole


def largest_message(config: RunConfig, num_nodes: int, num_classes: int, num_clients: int) -> int:
    """Return an upper bound of the bytes of any message of the run, in either direction.

    The largest tensor has a row per node, or a row of class probabilities per asked node; the node sets of `prefetch`
    rounds may ride on it, five bytes an id at most.
    """
    width = config.model.hidden * (num_clients if config.model.aggregation == "concat" else 1)
    tensor = num_nodes * (8 * max(width, num_classes) + 4 * num_clients)
    sets = max(1, config.train.prefetch) * (5 * num_nodes + 16)
    losses = 8 * config.train.num_local_steps
    return 4096 + tensor + sets + losses
