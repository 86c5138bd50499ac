"""Former names of `TrafficCounter`; delete this module when no caller is left."""

from __future__ import annotations

from typing import Any

from glasu.protocol.messages import Message
from glasu.runtime.telemetry import TrafficCounter
from glasu.wire.message_key import Key


class Meter(TrafficCounter):
    """A TrafficCounter with its former names."""

    @property
    def total(self) -> int:
        return self.total_bytes

    def to_server(self, message: Message) -> None:
        """Count a message from one client."""
        self.sent_to_server(message)

    def to_client(self, message: Message) -> None:
        """Count a message to one client."""
        self.sent_to_clients(message)

    def exchanged(self, key: Key) -> None:
        """Count one exchange."""
        self.exchange(key)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for a report."""
        return self.snapshot().to_dict()
