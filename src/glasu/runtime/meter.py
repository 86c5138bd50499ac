"""Former names of `TrafficCounter`, until runtime/inprocess.py and network/*_prediction.py count with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glasu.protocol.messages import Message
from glasu.runtime.telemetry import TrafficCounter


class Meter(TrafficCounter):
    """A TrafficCounter with the names that the present scripts' driver uses."""

    def to_server(self, message: Message) -> None:
        """Count a message from one client."""
        self.sent_to_server(message)

    def to_client(self, message: Message) -> None:
        """Count a message to one client."""
        self.sent_to_clients(message)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for a report."""
        return self.snapshot().to_dict()

    def exchanged(self, messages: Sequence[Message]) -> None:
        """Count one exchange."""
        self.exchange(messages[0].key, len(messages))
