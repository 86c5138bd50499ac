"""Receive an answer that is identical for all clients. With hidden sums, add the answer to the running hash."""

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

    The hash does not include the client index of the key, because the server may send the same sums in one message to
    all clients or in a separate message to each client.
    """
    message: M = yield Receive((kind,), key)
    hash_answer(client, message)
    return message


def hash_answer(client: Client, message: Message) -> None:
    """Add an answer to the running hash, if sums are hidden from the server."""
    if client.release.sums.hiding is None:
        return
    _, phase, round_index, layer, chunk = message.key.topic
    about = f"{type(message).__name__} {phase.name} {round_index} {layer} {chunk}".encode()
    sections = (
        array for name, content in message.contents().items() for array in content.to_sections(getattr(message, name))
    )
    client.release.sums.hiding.running_hash.add(about, sections)
