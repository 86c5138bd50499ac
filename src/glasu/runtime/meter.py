"""Counts messages, bytes and exchanges around any runtime, as they are encoded on the wire."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glasu.protocol.message_bytes import measure
from glasu.protocol.messages import Message
from glasu.wire.message_key import SERVER, TO_ONE, Key

log = logging.getLogger("glasu.wire")  # at DEBUG: one line per message and per exchange, in the order of counting


@dataclass
class Meter:
    """Traffic so far; evaluation and redone rounds count too."""

    bytes_to_server: int = 0
    bytes_to_clients: int = 0
    messages: int = 0
    exchanges: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    by_phase: Counter[str] = field(default_factory=Counter)
    exchanges_by_phase: Counter[str] = field(default_factory=Counter)
    _last: tuple[Message, list[tuple[str, int]]] | None = field(default=None, repr=False, compare=False)

    @property
    def total(self) -> int:
        return self.bytes_to_server + self.bytes_to_clients

    def to_server(self, message: Message) -> None:
        """Count a message from a client."""
        self.bytes_to_server += self._count(message, "server")

    def to_client(self, message: Message) -> None:
        """Count a message to one client."""
        self.bytes_to_clients += self._count(message, "client")

    def _count(self, message: Message, receiver: str) -> int:
        if self._last is None or message is not self._last[0]:  # an answer to all is one message, sent to each
            self._last = message, measure(message)
        total = 0
        for kind, size in self._last[1]:
            self.by_kind[kind] += size
            total += size
        self.by_phase[message.key.phase.reported] += total
        self.messages += 1
        if log.isEnabledFor(logging.DEBUG):
            key, kind = message.key, type(message).__name__
            client = "all" if key.client == SERVER else key.client % TO_ONE
            about = f"phase={key.phase.name.lower()} round={key.round} layer={key.layer} chunk={key.chunk}"
            log.debug("to=%s kind=%s %s client=%s bytes=%d", receiver, kind, about, client, total)
        return total

    def exchanged(self, key: Key) -> None:
        """Count one round trip: what a client sends before it waits, and the answers."""
        self.exchanges += 1
        self.exchanges_by_phase[key.phase.reported] += 1
        log.debug("exchange phase=%s", key.phase.reported)

    def restore(self, figures: Mapping[str, Any]) -> None:
        """Go on from figures that `to_dict` gave."""
        for name, value in figures.items():
            setattr(self, name, Counter(value) if isinstance(value, Mapping) else value)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for the report."""
        return {
            "bytes_to_server": self.bytes_to_server,
            "bytes_to_clients": self.bytes_to_clients,
            "messages": self.messages,
            "exchanges": self.exchanges,
            "by_kind": dict(self.by_kind),
            "by_phase": dict(self.by_phase),
            "exchanges_by_phase": dict(self.exchanges_by_phase),
        }
