"""The key of a message: what it is about, so that a repeat is recognised and a release can be named."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

SERVER = 0xFFFF  # stands in the place of a client's index in what the server sends to all
TO_ONE = 0x8000  # added to a client's index in what the server sends to it alone
RUN_BYTES = 12
ATTEMPTS = 2**16  # a key has room for so many; then they are counted from 0 again
_LAYOUT = struct.Struct(f"<{RUN_BYTES}sIBIHhIH")


class Phase(enum.IntEnum):
    """The part of a run that a message belongs to."""

    CONTROL = 0
    SAMPLING = 1
    TRAINING = 2
    EVALUATION = 3
    PREDICTION = 4
    BACKWARD = 5  # the gradients of a training round; reported as training

    reported: str  # the name under which reports add this phase up


for _phase in Phase:
    _phase.reported = "training" if _phase is Phase.BACKWARD else _phase.name.lower()


class Key(NamedTuple):
    """One key names one message: (run, incarnation, phase, round, attempt, layer, chunk, client)."""

    run: bytes
    phase: Phase
    client: int
    round: int = 0
    layer: int = -1  # -1: not about a layer
    chunk: int = 0
    incarnation: int = 0
    attempt: int = 0

    def about(self) -> bytes:
        """Return what the message is about as bytes: the same when a restarted client sends it again."""
        return self._replace(incarnation=0, attempt=0).pack()

    def pack(self) -> bytes:
        """Return the key as bytes of one fixed length."""
        return _LAYOUT.pack(
            self.run, self.incarnation, self.phase, self.round, self.attempt, self.layer, self.chunk, self.client
        )

    def __str__(self) -> str:
        sender = "server" if self.client >= TO_ONE else f"client {self.client}"
        return f"{self.phase.name.lower()} round {self.round} layer {self.layer} chunk {self.chunk} from {sender}"
