"""Message keys. A receiver recognises a repeated message by its key. A ledger entry contains most of the key."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

SERVER = 0xFFFF  # the sender's index in a message from the server to all clients
ALL_CLIENTS = 0xFFFE  # in a transcript, the receiver of a message from the server to all clients
TO_ONE = 0x8000  # TO_ONE + m is the sender's index in a message from the server to client m
RUN_BYTES = 12
ATTEMPTS = 2**16  # keys contain the attempt number modulo this value
_LAYOUT = struct.Struct(f"<{RUN_BYTES}sIBIHhIH")
KEY_BYTES = _LAYOUT.size


class Phase(enum.IntEnum):
    """The part of a run that a message belongs to."""

    CONTROL = 0
    SAMPLING = 1
    TRAINING = 2
    EVALUATION = 3
    PREDICTION = 4
    BACKWARD = 5  # gradients in a round of training
    EVALUATION_SAMPLING = 6  # node sets of a sampled evaluation
    ALIGNMENT = 7  # blinded ids

    reported: str  # the name of the phase that includes this message in reports


_REPORTED = {Phase.BACKWARD: "training", Phase.EVALUATION_SAMPLING: "evaluation"}
for _phase in Phase:
    _phase.reported = _REPORTED.get(_phase, _phase.name.lower())


class Key(NamedTuple):
    """Identify one message by (run, incarnation, phase, round, attempt, layer, chunk, client)."""

    run: bytes
    phase: Phase
    client: int
    round: int = 0
    layer: int = -1  # -1: the message is not about a layer
    chunk: int = 0  # position among the chunks of one tensor
    incarnation: int = 0
    attempt: int = 0

    @property
    def topic(self) -> tuple[bytes, Phase, int, int, int]:
        """The part of the key that a message and its answer share: run, phase, round, layer and chunk."""
        return self.run, self.phase, self.round, self.layer, self.chunk

    def at(self, layer: int, chunk: int = 0) -> Key:
        """Return the key for another layer and chunk."""
        # This runs for every message, and `_replace` would take three times as long.
        return Key(self.run, self.phase, self.client, self.round, layer, chunk, self.incarnation, self.attempt)

    def to_client(self, client: int) -> Key:
        """Return the key of the server's message to one client."""
        return self._replace(client=TO_ONE + client)

    def pack_without_attempt(self) -> bytes:
        """Return the key as bytes, with incarnation and attempt set to 0. A repeated message gives the same bytes."""
        return self._replace(incarnation=0, attempt=0).pack()

    def pack(self) -> bytes:
        """Return the key as bytes of a fixed length."""
        return _LAYOUT.pack(
            self.run, self.incarnation, self.phase, self.round, self.attempt, self.layer, self.chunk, self.client
        )

    @classmethod
    def unpack(cls, content: bytes) -> Key:
        """Read the bytes that `pack` returned; raise ValueError if the phase is unknown."""
        run, incarnation, phase, round_index, attempt, layer, chunk, client = _LAYOUT.unpack(content)
        return cls(run, Phase(phase), client, round_index, layer, chunk, incarnation, attempt)

    def __str__(self) -> str:
        sender = "server" if self.client >= TO_ONE else f"client {self.client}"
        phase = self.phase.name.lower().replace("_", " ")
        return f"{phase} round {self.round} layer {self.layer} chunk {self.chunk} from {sender}"
