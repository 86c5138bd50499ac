"""Exchange tensors in chunks of rows, and check them. Results are bit-identical for any chunk size.

A chunk has `wire.chunk_rows` rows. A chunk with fewer rows is the last one, so the server need not know the number of
rows in advance. If the rows fill all chunks exactly, an empty chunk follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from glasu.data.methods import NOTHING_TO_SMOOTH
from glasu.errors import ProtocolError, TrainingError
from glasu.protocol.messages import Message, TensorMessage, Waiting
from glasu.protocol.presence import list_contributors
from glasu.protocol.receiving import hash_answer
from glasu.protocol.requests import Receive, Script, Send
from glasu.wire.encoding import UNKNOWN_COLUMNS, Array
from glasu.wire.message_key import Key

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.privacy.release import Sent
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server


def split_rows(num_rows: int, chunk_rows: int) -> list[slice]:
    """Divide rows into chunks. The last chunk has fewer than `chunk_rows` rows, perhaps none."""
    return [slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows + 1, chunk_rows)]


def exchange_rows(
    client: Client,
    key: Key,
    kinds: tuple[type[TensorMessage], type[TensorMessage]],
    sent: Sent | None,
    shape: tuple[int, int | None],
    *,
    requested: NDArray[np.bool_] | None = None,
) -> Script[Tensor]:
    """Client: send a released tensor chunk by chunk, and return the server's answer.

    Args:
        client: the client.
        key: the key of the exchange.
        kinds: the kind of the messages and the kind of the answers.
        sent: the released tensor; None: this client contributes nothing and waits for the answer.
        shape: the shape of the whole answer; columns are None if this client does not know their number.
        requested: the rows of the answer that this client receives; None: all.
    """
    kind, answer = kinds
    reveal = client.release.prepare_reading(answer.content().kind, key, shape)
    chunks = split_rows(shape[0], client.config.wire.chunk_rows)
    keys = [key.at(key.layer, chunk) for chunk in range(len(chunks))]
    for own, rows in zip(keys, chunks, strict=True):
        yield Send(Waiting(own) if sent is None else kind(own, sent.encoding.select_rows(sent.payload, rows)))
    client.look_ahead.gather_next()
    parts, columns = [], shape[1]
    for own, rows in zip(keys, chunks, strict=True):
        message = yield Receive((answer,), own)
        if requested is None:  # otherwise clients receive different rows, so their hashes would differ
            hash_answer(client, message)
        expected = rows.stop - rows.start if requested is None else int(np.count_nonzero(requested[rows]))
        found = _check_answer(client, message, (expected, columns))
        if columns is None and found != UNKNOWN_COLUMNS:
            columns = found  # the later chunks must have as many columns
        parts.append(message.value)
    payload = parts[0] if len(parts) == 1 else np.concatenate(parts)
    num_summed = len(list_contributors(client.config, client.identity, key))
    return client.release.read(answer.content().kind, key, reveal(payload, requested), num_summed, sent)


def _check_answer(client: Client, message: TensorMessage, shape: tuple[int, int | None]) -> int:
    """Return the number of columns of an answer; refuse a wrong encoding, a wrong shape, NaN and infinity."""
    kind = message.content().kind
    encoding = message.content().find_encoding(client.release.encodings)

    def where() -> str:
        return f"party {client.name!r}, {message.key}"

    if error := encoding.find_error(message.value):
        raise ProtocolError(f"{where()}, {encoding.name} tensor: {error}.")
    if not encoding.is_finite(message.value):
        raise TrainingError(
            f"{where()}: expected a {kind} of finite values, got NaN or infinity. The answer was not used. "
            "Training diverged: lower train.learning_rate. If other parties report finite values, check the server."
        )
    found = encoding.find_shape(message.value)
    if found[0] != shape[0] or (shape[1] is not None and found[1] not in (shape[1], UNKNOWN_COLUMNS)):
        raise ProtocolError(f"{where()}: expected a {kind} of shape {shape}, got {found}.")
    return found[1]


def receive_chunk(
    server: Server,
    kind: type[TensorMessage],
    key: Key,
    before: Chunk | None,
    expected_rows: int | None = None,
    senders: Sequence[int] | None = None,
    *,
    from_any: bool = False,
) -> Script[Chunk]:
    """Server: receive the next chunk of a tensor from every client. The caller sends the answer.

    Args:
        server: the server.
        kind: the kind of message that clients send.
        key: the key of the exchange.
        before: the previous chunk; None: receive the first chunk.
        expected_rows: the number of rows of the whole tensor, if the server knows it.
        senders: the clients that send a tensor, while the others only wait for the answer; None: all.
        from_any: whether any client may send `Waiting` instead of a tensor, in all chunks or in none.
    """
    everyone = not from_any and (senders is None or len(senders) == len(server.roster))
    first_row = 0 if before is None else before.end
    own = key.at(key.layer, first_row // server.config.wire.chunk_rows)
    messages: Sequence[Message] = yield Receive((kind,) if everyone else (kind, Waiting), own)
    if from_any:
        _check_waiting(server, messages, before)
    elif senders is not None:
        _check_senders(server, messages, senders)
    chunk = Chunk(server, own, first_row, [each for each in messages if isinstance(each, TensorMessage)])
    chunk.check(None if expected_rows is None else expected_rows - first_row)
    return chunk


def _check_senders(server: Server, messages: Sequence[Message], senders: Sequence[int]) -> None:
    """Refuse a tensor from a client outside `senders`, and a missing tensor from a client in `senders`."""
    for client, message in enumerate(messages):
        if isinstance(message, TensorMessage) != (client in senders):
            listed = ", ".join(repr(server.roster[sender]) for sender in senders)
            server.refuse(
                message,
                f"expected a tensor from party {listed} alone, got a {type(message).__name__} from party "
                f"{server.roster[client]!r}.",
            )


def _check_waiting(server: Server, messages: Sequence[Message], before: Chunk | None) -> None:
    """Refuse a client that sends only some chunks of a tensor. Also refuse a chunk that no client sends."""
    if not any(isinstance(message, TensorMessage) for message in messages):
        raise ProtocolError(f"{messages[0].key}: no party has an edge. {NOTHING_TO_SMOOTH}")
    if before is None:
        return
    senders = {message.key.client for message in before.tensors}
    for message in messages:
        if isinstance(message, TensorMessage) != (message.key.client in senders):
            server.refuse(message, f"expected all chunks of a tensor or none, got a {type(message).__name__}.")


@dataclass(frozen=True, eq=False)
class Chunk:
    """Server: the tensors of one chunk, in client order."""

    server: Server
    key: Key  # the key of the answer
    first_row: int  # the position of the first row in the whole tensor
    tensors: Sequence[TensorMessage]

    @property
    def payloads(self) -> list[Array]:
        """The encoded tensors."""
        return [message.value for message in self.tensors]

    @property
    def num_rows(self) -> int:
        """The number of rows of every tensor, after `check`."""
        tensor = self.tensors[0]
        return self.server.shapes.encodings[tensor.content().kind].find_shape(tensor.value)[0]

    @property
    def end(self) -> int:
        """The position after the last row, in the whole tensor."""
        return self.first_row + self.num_rows

    @property
    def is_last(self) -> bool:
        """Whether this is the last chunk. It has fewer rows than a full chunk, perhaps none."""
        return self.num_rows < self.server.config.wire.chunk_rows

    def check(self, rows_left: int | None) -> None:
        """Check the tensors.

        Args:
            rows_left: the number of rows that this chunk and all later chunks must have, if the server knows it.
        """
        if not self.tensors:
            raise ProtocolError(f"{self.key}: no party sent a tensor.")
        server, content = self.server, self.tensors[0].content()
        encoding, columns = server.shapes.encodings[content.kind], content.columns(server.shapes) or None
        most = server.shapes.chunk_rows
        most = most if rows_left is None else max(0, min(most, rows_left))
        for message in self.tensors:
            if error := encoding.find_error(message.value, columns):
                server.refuse(message, f"{content.kind}: {error}.")
            # Check a known number of rows first: `_check_shapes` blames the minority, even if the minority is right.
            rows, _ = encoding.find_shape(message.value)
            if rows > most or (rows_left is not None and rows < most):
                wanted = f"at most {most}" if rows_left is None else str(most)
                server.refuse(message, f"expected {wanted} rows, got {rows}.")
        self._check_shapes()
        if content.kind.is_score and not encoding.is_hidden:
            # Without this check, a party that sends 1e30 or -5 would determine every prediction and the selected model.
            for message in self.tensors:
                if error := server.task.find_score_error(encoding.decode(message.value)):
                    server.refuse(message, f"{server.task.scores_name}: {error}; the server did not aggregate them.")

    def _check_shapes(self) -> None:
        """Refuse tensors of different shapes. Blame a party in the minority, or no party if there is no majority."""
        kind, roster = self.tensors[0].content().kind, self.server.roster
        encoding = self.server.shapes.encodings[kind]
        shapes = [encoding.find_shape(message.value) for message in self.tensors]
        if len(set(shapes)) == 1:
            return
        usual, count = Counter(shapes).most_common(1)[0]
        if 2 * count <= len(self.tensors):
            senders = [roster[each.key.client] for each in self.tensors]
            listed = "; ".join(f"party {name!r} {shape}" for name, shape in zip(senders, shapes, strict=True))
            raise ProtocolError(
                f"{self.key}: {kind}: expected the same shape from all parties, got {listed}. The server cannot decide "
                "which one is right."
            )
        for message, shape in zip(self.tensors, shapes, strict=True):
            if shape != usual:
                self.server.refuse(message, f"{kind}: expected shape {usual} as from most parties, got {shape}.")

    def check_answer(self, payload: Array) -> Array:
        """Return the encoded answer to this chunk. Refuse NaN and infinity, and name the party that sent them, if any.

        A value that is not finite in one tensor is not finite in the sum, so checking the sum is enough.
        """
        kind = self.tensors[0].content().kind
        encoding = self.server.shapes.encodings[kind]
        if encoding.answer.is_finite(payload):
            return payload
        for message in self.tensors:
            if not encoding.is_finite(message.value):
                why = "expected finite values, got NaN or infinity. Nothing was forwarded. Training diverged at this"
                self.server.refuse(message, f"{kind}: {why} party: lower train.learning_rate.", TrainingError)
        raise TrainingError(
            f"{self.key}: {kind}: all parties sent finite values, but their sum is not finite. Training diverged, and "
            "nothing was forwarded. Lower train.learning_rate."
        )
