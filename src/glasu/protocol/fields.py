"""The kinds of fields in messages: how a field is encoded as arrays, and how large it can be.

header (48 bytes)   magic, version, kind, number of sections, key, length of the rest
section (12 bytes)  tag, dtype, rows, columns (0: a vector); then rows x columns values
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from glasu.config import RunConfig, list_candidates
from glasu.errors import ProtocolError
from glasu.model.aggregation import make_aggregation
from glasu.model.task import make_task
from glasu.wire import ids
from glasu.wire.encoding import DTYPES, Array, Encoding
from glasu.wire.encodings import make_encodings
from glasu.wire.message_key import KEY_BYTES, Phase
from glasu.wire.tensor_kinds import TensorKind

HEADER = struct.Struct(f"<4sBBH{KEY_BYTES}sxQ")
SECTION = struct.Struct("<BBxxII")


@dataclass(frozen=True)
class Shapes:
    """The counts of a run that limit the size of its messages. All roles know them after the handshake."""

    num_nodes: int
    chunk_rows: int
    encodings: Mapping[TensorKind, Encoding]
    num_scores: int = 0  # columns of class probabilities or predictions; 0: unknown
    hidden: int = 0
    joint_width: int = 0  # columns of H[l+1]
    num_local_steps: int = 0
    prefetch: int = 0
    num_clients: int = 1

    @classmethod
    def of_run(cls, config: RunConfig, num_nodes: int, num_classes: int, num_clients: int) -> Self:
        """Derive the counts from the settings and from the numbers that the roles agreed on in the handshake."""
        hidden = config.model.hidden
        return cls(
            num_nodes=num_nodes,
            num_scores=make_task(config.train).num_scores(num_classes),
            hidden=hidden,
            joint_width=hidden * make_aggregation(config.model, num_clients).widening,
            num_local_steps=max(each.train.num_local_steps for each in list_candidates(config)),
            prefetch=config.train.prefetch,
            chunk_rows=config.wire.chunk_rows,
            encodings=make_encodings(config),
            num_clients=num_clients,
        )


CountOf = Callable[[Shapes], int]


class _OneArray:
    """A field that has one section. Its value is the array of this section."""

    def to_sections(self, value: Array) -> list[Array]:
        """Return the arrays to send."""
        return [value]

    def measure(self, value: Array) -> tuple[int, int]:
        """Return the number of sections and of bytes in them."""
        return 1, value.nbytes


@dataclass(frozen=True)
class NumbersField(_OneArray):
    """A vector of 64-bit floats."""

    tag: str
    count: CountOf
    dtypes: tuple[str, ...] = ("<f8",)

    def from_sections(self, arrays: Sequence[Array]) -> Array:
        return _check_vector(self.tag, *arrays)

    def limit(self, shapes: Shapes, phase: Phase) -> tuple[int, int]:
        """Return the maximum number of sections and of bytes in them."""
        return 1, 8 * self.count(shapes)


@dataclass(frozen=True)
class TensorField(_OneArray):
    """Some rows of a matrix, already in their wire encoding (`glasu.wire.encodings`)."""

    kind: TensorKind
    columns: CountOf
    is_answer: bool = False  # whether the server sends the tensor; it then combines values from all clients
    tag: str = "tensor"
    dtypes: tuple[str, ...] = DTYPES  # the encoding of the tensor has one of these dtypes

    def find_encoding(self, encodings: Mapping[TensorKind, Encoding]) -> Encoding:
        """Return the encoding of the values, given the encodings of a run."""
        encoding = encodings[self.kind]
        return encoding.answer if self.is_answer else encoding

    def from_sections(self, arrays: Sequence[Array]) -> Array:
        (array,) = arrays
        if array.ndim != 2:
            raise ProtocolError("tensor section of 0 columns: expected one or more.")
        return array

    def limit(self, shapes: Shapes, phase: Phase) -> tuple[int, int]:
        rows = min(shapes.num_nodes, shapes.chunk_rows)
        return 1, self.find_encoding(shapes.encodings).count_bytes(rows, self.columns(shapes))


@dataclass(frozen=True)
class NodeSetsField:
    """One sorted set of node numbers per round. A set is sent as the gaps between its numbers (`glasu.wire.ids`).

    It must be the last field of a message because its number of sections varies; every other field has one section.
    """

    tag: str = "index"
    dtypes: tuple[str, ...] = ("|u1",)

    def to_sections(self, value: Sequence[Array]) -> list[Array]:
        return [ids.encode(nodes) for nodes in value]

    def from_sections(self, arrays: Sequence[Array]) -> tuple[NDArray[np.int32], ...]:
        return tuple(ids.decode(_check_vector(self.tag, array)) for array in arrays)

    def measure(self, value: Sequence[Array]) -> tuple[int, int]:
        return len(value), sum(map(ids.measure_encoded, value))

    def limit(self, shapes: Shapes, phase: Phase) -> tuple[int, int]:
        # A set of ids below N has at most N bytes, because a gap g is encoded in at most g + 1 bytes.
        sets = max(1, shapes.prefetch) if phase is Phase.SAMPLING else 1
        return sets, sets * shapes.num_nodes


@dataclass(frozen=True)
class FlagField:
    """One truth value."""

    tag: str
    dtypes: tuple[str, ...] = ("|u1",)

    def to_sections(self, value: bool) -> list[Array]:
        return [np.array([value], np.uint8)]

    def from_sections(self, arrays: Sequence[Array]) -> bool:
        flags = _check_vector(self.tag, *arrays)
        if len(flags) != 1 or flags[0] > 1:
            raise ProtocolError(f"expected one {self.tag} flag, 0 or 1, got {flags[:4].tolist()}.")
        return bool(flags[0])

    def measure(self, value: bool) -> tuple[int, int]:
        return 1, 1

    def limit(self, shapes: Shapes, phase: Phase) -> tuple[int, int]:
        return 1, 1


@dataclass(frozen=True)
class RowsField(_OneArray):
    """Some rows of an array of integers in an alignment: blinded ids, or row numbers."""

    tag: str
    dtypes: tuple[str, ...]
    columns: int = 0  # 0: a vector
    single: bool = False  # whether there must be exactly one row

    def from_sections(self, arrays: Sequence[Array]) -> Array:
        (array,) = arrays
        columns = array.shape[1] if array.ndim == 2 else 0
        if columns != self.columns or (self.single and len(array) != 1):
            wanted = f"{'one row' if self.single else 'rows'} of {self.columns} columns"
            raise ProtocolError(f"{self.tag} section of {len(array)} rows, {columns} columns: expected {wanted}.")
        return array

    def limit(self, shapes: Shapes, phase: Phase) -> tuple[int, int]:
        rows = 1 if self.single else min(shapes.num_nodes, shapes.chunk_rows)
        size = np.dtype(self.dtypes[0]).itemsize * max(1, self.columns)
        return 1, rows * size


@dataclass(frozen=True)
class BytesField(_OneArray):
    """Bytes that the server does not read: keys, signatures, and data that one client encrypts for the others."""

    tag: str
    count: CountOf
    dtypes: tuple[str, ...] = ("|u1",)

    def from_sections(self, arrays: Sequence[Array]) -> Array:
        return _check_vector(self.tag, *arrays)

    def limit(self, shapes: Shapes, phase: Phase) -> tuple[int, int]:
        return 1, self.count(shapes)


Content = TensorField | NodeSetsField | NumbersField | FlagField | RowsField | BytesField


def _check_vector(tag: str, array: Array) -> Array:
    if array.ndim != 1:
        raise ProtocolError(f"{tag} section of {array.shape[1]} columns: expected none; only tensors have columns.")
    return array
