"""The encoding as integers of a few bits on a grid that all clients know (`wire.feedback`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glasu.wire.encoding import Array, Encoding
from glasu.wire.message_key import Key
from glasu.wire.packing import pack_integers, unpack_integers


@dataclass(frozen=True)
class Integers(Encoding):
    """Integers of a few bits on a common grid, packed row by row. Unused bits at the end of a row are zero.

    The step of the grid is not part of the message: all clients derive it from earlier messages. So the server adds
    without rounding, and every reader decodes the same sum. Decoding gives the integers; clients multiply by the step.

    A client sends n + h for n in -h..h, where h = 2^(bits - 1) - 1. The sum of M such integers has 2 h M + 1 possible
    values. The server sends the sum in the smallest number of bits that is sufficient.
    """

    width: int  # number of integers in a row
    bits: int  # size of one client's integer in bits
    num_clients: int
    terms: int = 1  # number of added integers: 1 from a client, `num_clients` in the server's sum
    name: str = "integer"
    dtype = np.dtype("|u1")

    @property
    def answer(self) -> Integers:
        return replace(self, terms=self.num_clients)

    @property
    def largest(self) -> int:
        """The largest absolute value."""
        return self.terms * ((1 << (self.bits - 1)) - 1)

    @property
    def packed_bits(self) -> int:
        """The number of bits of an integer in the message."""
        return (2 * self.largest).bit_length()

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        """Pack integers. Values outside -largest..largest are clamped."""
        clamped = np.clip(value, -self.largest, self.largest).astype(np.int64)
        return pack_integers(clamped + self.largest, self.packed_bits)

    def find_error(self, payload: Array, columns: int | None = None) -> str:
        if error := self._find_dtype_error(payload):
            return error
        if columns not in (None, self.width):
            return f"expected {columns} columns, got {self.width}"
        expected = self.row_bytes(self.width)
        if payload.shape[1] != expected:
            return f"expected rows of {expected} bytes, got {payload.shape[1]}"
        unused = 8 * expected - self.width * self.packed_bits
        if (payload[:, -1] >> (8 - unused)).any():
            return "expected zeros at the end of a row"
        numbers = unpack_integers(payload, self.width, self.packed_bits)
        if numbers.size and (most := int(numbers.max())) > 2 * self.largest:
            return f"expected integers of 0..{2 * self.largest}, got {most}"
        return ""

    def is_finite(self, payload: Array) -> bool:
        return True

    def decode(self, payload: Array) -> NDArray[np.int64]:
        return unpack_integers(payload, self.width, self.packed_bits) - self.largest

    def combine(self, payloads: Sequence[Array], divisor: int, keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        """Add the integers. The readers divide, because the server would have to round the quotient."""
        total = self.decode(payloads[0])
        for payload in payloads[1:]:
            total += self.decode(payload)
        return [self.answer.encode(total, keys[0], first_row)] * len(keys)

    def row_bytes(self, columns: int) -> int:
        return -(-columns * self.packed_bits // 8)
