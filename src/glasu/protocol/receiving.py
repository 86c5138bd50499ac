"""Receive an answer that all clients receive alike. With hidden sums, it enters the running hash."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from glasu.protocol.messages import Message
from glasu.protocol.requests import Receive, Script
from glasu.wire.message_key import Key

if TYPE_CHECKING:
    from glasu.protocol.client import Client

M = TypeVar("M", bound=Message)


def receive_answer(client: Client, kind: type[M], key: Key) -> Script[M]:
    """Client column: return the server's answer in one exchange, and add it to the running hash of this attempt.

    The sender in the key is left out: the same sums can travel as one message to all or as one to each.
    """
    message: M = yield Receive((kind,), key)
    note_answer(client, message)
    return message


def note_answer(client: Client, message: Message) -> None:
    """Add an answer to the running hash, if sums are hidden from the server."""
    if client.hiding is None:
        return
    _, phase, round_index, layer, chunk = message.key.topic
    about = f"{type(message).__name__} {phase.name} {round_index} {layer} {chunk}".encode()
    sections = (
        array for name, content in message.contents().items() for array in content.to_sections(getattr(message, name))
    )
    client.hiding.transcript.add(about, sections)
