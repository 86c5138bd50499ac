"""Send tensors in chunks of rows. The results do not depend on the size of the chunks, to the bit.

A full chunk has `chunk_rows` rows; a chunk with fewer rows is the last one and may be empty. So the receiver does not
need to know the number of chunks in advance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from glasu.protocol.fields import Array
from glasu.protocol.messages import Message, TensorMessage, Waiting
from glasu.protocol.requests import Broadcast, Receive, Scatter, Script, Send
from glasu.wire.message_key import Key

if TYPE_CHECKING:
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

Respond = Callable[[Sequence[TensorMessage], Key, int], Broadcast | Scatter]  # messages, key of the answer, first row


def split_rows(num_rows: int, chunk_rows: int) -> list[slice]:
    """Divide rows into chunks. The last chunk has fewer than `chunk_rows` rows."""
    return [slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows + 1, chunk_rows)]


def send_rows(client: Client, kind: type[TensorMessage], key: Key, payload: Array) -> Script[None]:
    """Client: send the rows of an encoded tensor. The chunks are views of it."""
    for chunk, rows in enumerate(split_rows(len(payload), client.chunk_rows)):
        yield Send(kind(key.at(key.layer, chunk), payload[rows]))


def send_waiting(client: Client, key: Key, num_rows: int) -> Script[None]:
    """Client: contribute nothing to an exchange about `num_rows` rows."""
    for chunk in range(len(split_rows(num_rows, client.chunk_rows))):
        yield Send(Waiting(key.at(key.layer, chunk)))


def receive_rows(client: Client, kind: type[TensorMessage], key: Key, num_rows: int) -> Script[list[TensorMessage]]:
    """Client: receive the chunks of the server's answer about `num_rows` rows."""
    answers = []
    for chunk in range(len(split_rows(num_rows, client.chunk_rows))):
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
    for chunk in itertools.count():
        answer, first_row = key.at(key.layer, chunk), chunk * server.chunk_rows
        messages = yield Receive(kinds, answer)
        if Waiting in kinds:
            server.check_owner_alone(messages)
        tensors = [message for message in messages if isinstance(message, TensorMessage)]
        rows = server.check_tensors(tensors, answer, None if num_rows is None else num_rows - first_row)
        yield respond(tensors, answer, first_row)
        if rows < server.chunk_rows:
            return first_row + rows
    raise AssertionError("unreachable")
