"""Deliver messages between the server and the clients of one process: unchanged, or also recorded in a transcript.

An attack or a test replaces messages with a subclass of `Delivery`. Over a network, frames deliver the messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from glasu.protocol.messages import Message
from glasu.runtime.transcript import TranscriptWriter
from glasu.wire.message_key import ALL_CLIENTS, SERVER


class Delivery:
    """Delivers every message unchanged."""

    def to_server(self, message: Message) -> Message:
        """Return the message that the server gets, given the message that a client sent."""
        return message

    def to_clients(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages that the clients get, given those that the server sent: one per client, in their order.

        A message to all clients is in `messages` several times, as the same object.
        """
        return messages


UNCHANGED = Delivery()


class RecordedDelivery(Delivery):
    """Records every message in a transcript, as another delivery delivers it."""

    def __init__(self, inner: Delivery, writer: TranscriptWriter) -> None:
        self.inner, self.writer = inner, writer

    def to_server(self, message: Message) -> Message:
        """Deliver a message and record it."""
        delivered = self.inner.to_server(message)
        self.writer.write(delivered, SERVER)
        return delivered

    def to_clients(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Deliver messages and record them. A message to all clients is recorded once."""
        delivered = self.inner.to_clients(messages)
        first = delivered[0]
        if first.key.client == SERVER and all(each is first for each in delivered):
            self.writer.write(first, ALL_CLIENTS)
        else:
            for client, message in enumerate(delivered):
                self.writer.write(message, client)
        return delivered
