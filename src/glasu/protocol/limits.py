"""Limits on the size of messages, derived from their fields and from the counts agreed in the handshake."""

from __future__ import annotations

from dataclasses import dataclass

from glasu.errors import ProtocolError
from glasu.protocol.fields import HEADER, SECTION, Shapes
from glasu.protocol.message_bytes import Head
from glasu.protocol.messages import MESSAGES, Message
from glasu.wire.message_key import Phase


@dataclass(frozen=True)
class Limits(Shapes):
    """The maximum size of every kind of message in one run."""

    def of(self, kind: type[Message], phase: Phase) -> tuple[int, int]:
        """Return the maximum number of sections and of bytes of a message."""
        found = [content.limit(self, phase) for content in kind.contents().values()]
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
        """The maximum index of a chunk."""
        return self.num_nodes // self.chunk_rows

    @property
    def largest(self) -> int:
        """The maximum size of any message."""
        return max(self.of(kind, Phase.SAMPLING)[1] for kind in MESSAGES)
