"""Tensors by rows: a long one travels in chunks, which are sent together and answered one by one.

A chunk has CHUNK_ROWS rows, and one that has fewer is the last: nobody has to be told how many will come. What everyone
computes does not depend on the size of the chunks, to the bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from glasu.errors import ProtocolError
from glasu.protocol.messages import NO_NUMBERS, Exchange, Message, Reply, Script, TensorMessage, checked
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.protocol.server import Server

CHUNK_ROWS = 4096  # rows per message


def message_chunks(num_rows: int) -> list[slice]:
    """Divide rows into chunks; the last one is never full, and may be empty."""
    return [slice(start, min(start + CHUNK_ROWS, num_rows)) for start in range(0, num_rows + 1, CHUNK_ROWS)]


def first_row(chunk: int) -> int:
    """Return where a chunk begins."""
    return chunk * CHUNK_ROWS


def exchange_rows(message: Message, num_rows: int, kind: type[Reply]) -> Exchange[list[Reply]]:
    """Send a message about so many rows in chunks, all together, and return the answers to them.

    What rides along, rides on the first one.
    """
    if num_rows < CHUNK_ROWS:
        (answer,) = yield (message,)
        return [checked(answer, message.key, kind)]
    messages = [_chunk_of(message, chunk, rows) for chunk, rows in enumerate(message_chunks(num_rows))]
    answers = yield messages
    return [checked(answer, part.key, kind) for answer, part in zip(answers, messages, strict=True)]


def _chunk_of(message: Message, chunk: int, rows: slice) -> Message:
    """Return a message about some of the rows; the array is not copied."""
    part = dataclasses.replace(message, key=message.key._replace(chunk=chunk))
    if chunk:
        part = dataclasses.replace(part, losses=NO_NUMBERS, node_sets=())
    return dataclasses.replace(part, value=part.value[rows]) if isinstance(part, TensorMessage) else part


def answer_rows(
    server: Server,
    kinds: tuple[type[Message], ...],
    phase: Phase,
    round_index: int,
    layer: int,
    respond: Callable[[Sequence[Message]], None],
    num_rows: int | None = None,
) -> Script:
    """Server column: respond to chunk after chunk, until one is not full.

    Args:
        server: who answers.
        kinds: what may come.
        phase: what it is for.
        round_index: t.
        layer: l.
        respond: checks the messages about one chunk, one of every client, and prepares their answers.
        num_rows: how many rows there must be, where the server knows it.
    """
    for chunk in itertools.count():
        messages = yield from server.receive(kinds, phase, round_index, layer, chunk)
        most = CHUNK_ROWS if num_rows is None else max(0, min(CHUNK_ROWS, num_rows - first_row(chunk)))
        rows = 0
        for message in messages:
            if isinstance(message, TensorMessage):
                rows = len(message.value)
                if rows > most or (num_rows is not None and rows < most):
                    wanted = f"at most {most}" if num_rows is None else str(most)
                    party = server.roster[message.key.client]
                    raise ProtocolError(
                        f"party {party!r}, {message.key}: expected {wanted} rows, got {rows}.", party=party
                    )
        respond(messages)  # refuses tensors of several shapes
        if rows < CHUNK_ROWS:
            return
