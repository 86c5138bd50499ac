"""Random and largest messages of every kind, built from the fields that the kinds declare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import strategies as st

from glasu.protocol.fields import (
    BytesField,
    Content,
    FlagField,
    NodeSetsField,
    NumbersField,
    RowsField,
    Shapes,
    TensorField,
)
from glasu.protocol.messages import MESSAGES, Message, Scores
from glasu.wire.message_key import SERVER, Key, Phase

KEY = Key(run=bytes(range(12)), phase=Phase.TRAINING, client=1, round=3, layer=1)
keys = st.builds(
    Key,
    run=st.binary(min_size=12, max_size=12),
    phase=st.sampled_from(Phase),
    client=st.integers(0, SERVER),
    round=st.integers(0, 2**32 - 1),
    layer=st.integers(-(2**15), 2**15 - 1),
    chunk=st.integers(0, 2**32 - 1),
    incarnation=st.integers(0, 2**32 - 1),
    attempt=st.integers(0, 2**16 - 1),
)


def with_valid_scores(carry: Callable[[Message], Message] | None = None) -> Callable[[Message], Message]:
    """Return a `carry` that replaces class probabilities by equal ones; training does not read them.

    Clipping and noise turn probabilities into values that the server refuses.
    """

    def replace_scores(message: Message) -> Message:
        if isinstance(message, Scores):
            message = Scores(message.key, np.full_like(message.value, 1 / message.value.shape[1]))
        return message if carry is None else carry(message)

    return replace_scores


def node_sets(num_nodes: int, max_sets: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return up to `max_sets` sorted sets of nodes below `num_nodes`."""
    one = st.sets(st.integers(0, num_nodes - 1), max_size=40).map(lambda nodes: np.array(sorted(nodes), "<i4"))
    return st.lists(one, max_size=max_sets).map(tuple)


def values_of(content: Content) -> st.SearchStrategy[Any]:
    """Return small values of a field."""
    if isinstance(content, TensorField):
        shapes = st.tuples(st.integers(0, 4), st.integers(1, 3))
        return st.sampled_from(content.dtypes).flatmap(lambda dtype: hnp.arrays(dtype, shapes))
    if isinstance(content, NodeSetsField):
        return node_sets(2**31)
    if isinstance(content, NumbersField):
        return hnp.arrays("<f8", st.integers(0, 4))
    if isinstance(content, RowsField):
        return (st.just(1) if content.single else st.integers(0, 4)).map(lambda rows: make_rows(content, rows))
    if isinstance(content, BytesField):
        return hnp.arrays("|u1", st.integers(0, 4))
    return st.booleans()


def make_rows(content: RowsField, rows: int) -> Any:
    """Return distinct numbers in the form of a field."""
    shape = (rows, content.columns) if content.columns else rows
    return np.arange(rows * max(1, content.columns)).astype(content.dtypes[0]).reshape(shape)


def messages_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Return small messages of one kind."""
    return st.builds(kind, keys, **{name: values_of(content) for name, content in kind.contents().items()})


any_message = st.sampled_from(MESSAGES).flatmap(messages_of)


def sample_messages() -> list[Message]:
    """Return one small message of every kind."""
    return [kind(KEY, *map(_sample, kind.contents().values())) for kind in MESSAGES]


def _sample(content: Content) -> Any:
    if isinstance(content, TensorField):
        return np.arange(6, dtype=np.float32).reshape(3, 2)
    if isinstance(content, NodeSetsField):
        return np.array([1, 5, 9], np.int32), np.empty(0, np.int32)
    if isinstance(content, RowsField):
        return make_rows(content, 1 if content.single else 2)
    if isinstance(content, BytesField):
        return np.arange(5, dtype=np.uint8)
    return np.array([0.5, 0.25]) if isinstance(content, NumbersField) else True


def make_valid_values(content: Content, shapes: Shapes, phase: Phase) -> st.SearchStrategy[Any]:
    """Return values of a field that a run of these shapes can contain."""
    if isinstance(content, TensorField):
        encoding, columns = content.find_encoding(shapes.encodings), content.columns(shapes)
        rows = st.integers(0, min(shapes.num_nodes, shapes.chunk_rows))
        return rows.map(lambda rows: encoding.encode(np.ones((rows, columns)), KEY))
    if isinstance(content, NodeSetsField):
        return node_sets(shapes.num_nodes, content.limit(shapes, phase)[0])
    if isinstance(content, NumbersField):
        return hnp.arrays("<f8", st.integers(0, content.count(shapes)))
    if isinstance(content, RowsField):
        most = min(shapes.num_nodes, shapes.chunk_rows)
        return (st.just(1) if content.single else st.integers(0, most)).map(lambda rows: make_rows(content, rows))
    if isinstance(content, BytesField):
        return st.integers(0, content.count(shapes)).map(lambda size: np.zeros(size, np.uint8))
    return st.booleans()


def largest(content: Content, shapes: Shapes, phase: Phase, extra: int = 0) -> Any:
    """Return the largest value of a field in a run of these shapes, or one with `extra` more rows, sets or values."""
    if isinstance(content, TensorField):
        rows = min(shapes.num_nodes, shapes.chunk_rows) + extra
        value = np.ones((rows, content.columns(shapes)))
        return content.find_encoding(shapes.encodings).encode(value, KEY)
    if isinstance(content, NodeSetsField):
        return (np.arange(shapes.num_nodes, dtype=np.int32),) * (content.limit(shapes, phase)[0] + extra)
    if isinstance(content, NumbersField):
        return np.zeros(content.count(shapes) + extra)
    if isinstance(content, RowsField):
        return make_rows(content, (1 if content.single else min(shapes.num_nodes, shapes.chunk_rows)) + extra)
    if isinstance(content, BytesField):
        return np.zeros(content.count(shapes) + extra, np.uint8)
    assert isinstance(content, FlagField)
    return True
