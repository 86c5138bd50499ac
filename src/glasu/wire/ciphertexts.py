"""The encoding as ciphertexts of CKKS, which contain the integers of a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.ckks_parameters import CKKS, CkksParameters
from glasu.wire.encoding import UNKNOWN_COLUMNS, Array, find_width_error
from glasu.wire.message_key import Key
from glasu.wire.ring import Ring

SHAPE_WORDS = 2  # numbers before the coefficients of a ciphertext: the message's rows and columns
COEFFICIENT = np.dtype("<u8")


@dataclass(frozen=True)
class Ciphertexts(Ring):
    """Encrypted integers of a ring (`glasu.privacy.encryption`). The server adds them without a key.

    The integers of one message, row by row, are packed into words of 32 bits. Sums of integers do not wrap around, so
    sums of words do not either. A ciphertext contains some thousand words, possibly from several rows of the tensor. A
    row of the encoded array is one ciphertext:

        rows and columns of the message     the same in all its ciphertexts
        two polynomials                     coefficients modulo q; a sum of ciphertexts is the sum of coefficients

    `encode` returns the integers. The client then encrypts the integers of each message together. So `select_rows` can
    select all rows of a message or none.
    """

    name: str = "ckks"
    parameters: CkksParameters = CKKS
    separates_rows = False

    @property
    def key_bytes(self) -> int:
        return self.parameters.key_bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        return COEFFICIENT

    @property
    def width(self) -> int:
        """The length of a row of the encoded array."""
        return SHAPE_WORDS + 2 * self.parameters.degree

    def count_ciphertexts(self, rows: int, columns: int) -> int:
        """Return the number of ciphertexts of one message."""
        return -(-rows * columns * self.bits // (32 * self.parameters.words))

    def find_error(self, payload: Array, columns: int | None = None) -> str:
        if error := self._find_dtype_error(payload):
            return error
        if payload.shape[1] != self.width:
            return f"expected ciphertexts of {self.width} words, got {payload.shape[1]}"
        if not len(payload):
            return ""
        found = [int(number) for number in payload[0, :SHAPE_WORDS]]
        if (payload[:, :SHAPE_WORDS] != payload[0, :SHAPE_WORDS]).any() or not all(0 < each < 2**31 for each in found):
            return "expected the same positive numbers of rows and columns in all ciphertexts"
        if error := find_width_error(columns, found[1]):
            return error
        if len(payload) != (count := self.count_ciphertexts(*found)):
            return f"expected {count} ciphertexts for {found[0]} rows and {found[1]} columns, got {len(payload)}"
        if payload[:, SHAPE_WORDS:].max() >= self.parameters.modulus:
            return "a coefficient of a ciphertext is not below the modulus"
        return ""

    def decode(self, payload: Array) -> Array:
        """Return the coefficients of the ciphertexts. A role without the key sees only these coefficients."""
        rows, columns = self.find_shape(payload)
        coefficients: Array = payload[:, SHAPE_WORDS:].reshape(-1)[: rows * columns].astype(np.int64)
        return coefficients.reshape(rows, max(columns, 0))

    def find_shape(self, payload: Array) -> tuple[int, int]:
        return (int(payload[0, 0]), int(payload[0, 1])) if len(payload) else (0, UNKNOWN_COLUMNS)

    def select_rows(self, payload: Array, rows: slice | NDArray[np.bool_]) -> Array:
        if not isinstance(rows, slice):
            assert rows.all() or not rows.any(), "a ciphertext cannot be divided"
            return payload if rows.any() else payload[:0]
        first = 0
        for message in self.split_messages(payload):
            if first == rows.start:
                return message
            first += self.find_shape(message)[0]
        return payload[:0]

    def split_messages(self, payload: Array) -> list[Array]:
        """Split the concatenated ciphertexts of several messages into one array per message."""
        found, position = [], 0
        while position < len(payload):
            count = self.count_ciphertexts(*self.find_shape(payload[position:]))
            found.append(payload[position : position + count])
            position += count
        return found

    def combine(self, payloads: Sequence[Array], divisor: int, keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        """Add ciphertexts: add their coefficients modulo q. The readers divide the sum."""
        total, modulus = payloads[0].copy(), np.uint64(self.parameters.modulus)
        coefficients = total[:, SHAPE_WORDS:]
        for payload in payloads[1:]:
            coefficients += payload[:, SHAPE_WORDS:]
            np.subtract(coefficients, modulus, out=coefficients, where=coefficients >= modulus)
        return [total] * len(keys)

    def count_bytes(self, rows: int, columns: int) -> int:
        return self.count_ciphertexts(rows, columns) * self.width * self.dtype.itemsize

    def row_bytes(self, columns: int) -> int:
        return self.count_bytes(1, columns)
