"""Limits on the size of messages, derived from their fields and from the counts agreed in the handshake."""

from __future__ import annotations

from dataclasses import dataclass

from glasu.config import RunConfig
from glasu.errors import ProtocolError
from glasu.model.aggregation import aggregation_of
from glasu.protocol.fields import SECTION, Shapes
from glasu.protocol.message_bytes import HEADER, Head
from glasu.protocol.messages import MESSAGES, Message
from glasu.wire.encodings import encodings_of
from glasu.wire.message_key import Phase


@dataclass(frozen=True)
class Limits:
    """The greatest size of every kind of message in one run."""

    shapes: Shapes

    @classmethod
    def of_run(cls, config: RunConfig, num_nodes: int, num_classes: int, num_clients: int) -> Limits:
        """Derive the limits from the settings and the agreed counts."""
        hidden = config.model.hidden
        return cls(
            Shapes(
                num_nodes=num_nodes,
                num_classes=num_classes,
                hidden=hidden,
                joint_width=hidden * aggregation_of(config.model, num_clients).widening,
                num_local_steps=config.train.num_local_steps,
                prefetch=config.train.prefetch,
                chunk_rows=config.wire.chunk_rows,
                encodings=encodings_of(config),
            )
        )

    def of(self, kind: type[Message], phase: Phase) -> tuple[int, int]:
        """Return the greatest number of sections and of bytes of a message."""
        found = [content.limit(self.shapes, phase) for content in kind.contents().values()]
        sections = sum(count for count, _ in found)
        return sections, HEADER.size + SECTION.size * sections + sum(size for _, size in found)

    def check(self, head: Head, size: int) -> None:
        """Refuse a message that is longer, or has more sections, than its kind allows."""
        sections, limit = self.of(head.kind, head.key.phase)
        if size > limit:
            raise ProtocolError(f"{head}: expected at most {limit} bytes, got {size}.")
        if head.sections > sections:
            raise ProtocolError(f"{head}: expected at most {sections} sections, got {head.sections}.")
        if head.key.chunk > self.last_chunk:
            raise ProtocolError(f"{head}: expected a chunk of 0..{self.last_chunk}, got {head.key.chunk}.")

    @property
    def last_chunk(self) -> int:
        """The greatest index of a chunk."""
        return self.shapes.num_nodes // self.shapes.chunk_rows

    @property
    def largest(self) -> int:
        """The greatest size of any message."""
        return max(self.of(kind, Phase.SAMPLING)[1] for kind in MESSAGES)
