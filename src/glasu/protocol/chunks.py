"""Send tensors in chunks of rows. The results do not depend on the size of the chunks, to the bit.

A chunk has `wire.chunk_rows` rows; a chunk with fewer rows is the last one and may be empty. So the receiver does not
need to know the number of chunks in advance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from glasu.protocol.fields import Array, split_rows
from glasu.protocol.messages import Message, TensorMessage, Waiting
from glasu.protocol.requests import Broadcast, Receive, Scatter, Script, Send
from glasu.wire.message_key import Key

if TYPE_CHECKING:
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

Respond = Callable[[Sequence[TensorMessage], Key, int], Broadcast | Scatter]  # messages, key of the answer, first row


def send_rows(client: Client, kind: type[TensorMessage], key: Key, payload: Array) -> Script[None]:
    """Client: send the rows of an encoded tensor. The chunks are views of it."""
    for chunk, rows in enumerate(split_rows(len(payload), client.config.wire.chunk_rows)):
        yield Send(kind(key.at(key.layer, chunk), payload[rows]))


def send_waiting(client: Client, key: Key, num_rows: int) -> Script[None]:
    """Client: contribute nothing to an exchange about `num_rows` rows."""
    for chunk in range(num_rows // client.config.wire.chunk_rows + 1):
        yield Send(Waiting(key.at(key.layer, chunk)))


def receive_rows(client: Client, kind: type[TensorMessage], key: Key, num_rows: int) -> Script[list[TensorMessage]]:
    """Client: receive the chunks of the server's answer about `num_rows` rows."""
    answers = []
    for chunk in range(num_rows // client.config.wire.chunk_rows + 1):
        answers.append((yield Receive((kind,), key.at(key.layer, chunk))))
    return answers


def answer_rows(
    server: Server, kinds: tuple[type[Message], ...], key: Key, respond: Respond, num_rows: int | None = None
) -> Script[int]:
    """Server: answer chunk after chunk until a chunk is not full; return the number of rows.

    Args:
        server: the server.
        kinds: the kinds of message that clients may send.
        key: the key of the exchange.
        respond: builds the answer to the tensors of one chunk.
        num_rows: the number of rows to expect, if the server knows it.
    """
    chunk_rows = server.config.wire.chunk_rows
    for chunk in itertools.count():
        answer, first_row = key.at(key.layer, chunk), chunk * chunk_rows
        messages = yield Receive(kinds, answer)
        if Waiting in kinds:
            server.check_owner_alone(messages)
        tensors = [message for message in messages if isinstance(message, TensorMessage)]
        rows = server.check_tensors(tensors, answer, None if num_rows is None else num_rows - first_row)
        yield respond(tensors, answer, first_row)
        if rows < chunk_rows:
            return first_row + rows
    raise AssertionError("unreachable")
