"""Deliveries that change the messages of a run in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glasu.protocol.messages import Message
from glasu.runtime.delivery import UNCHANGED, Delivery


class ChangedDelivery(Delivery):
    """Applies a function to every message, in both directions."""

    def __init__(self, carry: Callable[[Message], Message]) -> None:
        self.carry = carry

    def to_server(self, message: Message) -> Message:
        return self.carry(message)

    def to_clients(self, messages: Sequence[Message]) -> Sequence[Message]:
        return [self.carry(message) for message in messages]


def apply_to_messages(carry: Callable[[Message], Message] | None) -> Delivery:
    """Return a delivery that applies a function to every message; None: no message changes."""
    return UNCHANGED if carry is None else ChangedDelivery(carry)
