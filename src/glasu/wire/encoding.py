"""The base class of encodings: what an encoding does, and how the server computes with encoded arrays.

The modules of encodings need numpy only, because the server has no torch.

All readers of a released tensor, including its sender, compute with the decoded values. An encoding keeps no state, so
encoding the same message again gives the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.secret import Secret
from glasu.wire.message_key import Key

Array = NDArray[Any]
# The dtypes of arrays in messages. A message contains the position of the dtype in this tuple.
DTYPES = ("<f4", "<f8", "<u2", "|i1", "|u1", "<u4", "<u8")
SINGLE, DOUBLE = np.dtype("<f4"), np.dtype("<f8")
UNKNOWN_COLUMNS = -1  # the number of columns is unknown if an encrypted message contains no ciphertext


class Encoding(ABC):
    """Converts the rows of a matrix to bytes and back. The bytes of a row do not depend on other rows."""

    name: str
    is_exact = False  # whether decoded values equal the original values bit for bit
    is_hidden = False  # whether the server receives masked or encrypted numbers, which it can add but not check
    separates_rows = True  # whether the server can select some rows of an encoded tensor

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The type of the encoded array."""

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The precision in which clients compute if representations have this encoding."""
        return SINGLE

    @property
    def key_bytes(self) -> int:
        """The size of the secret key that the clients share; 0 if there is none."""
        return 0

    @property
    def answer(self) -> Encoding:
        """The encoding of the result of `combine`."""
        return self

    @abstractmethod
    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        """Return the array to send.

        Args:
            value: the values.
            key: the key of the message.
            first_row: the position of the first row in the whole tensor. It makes results independent of the chunk
                size.
        """

    def find_error(self, payload: Array, columns: int | None = None) -> str:
        """Return a description of the first error in a received array, or "" if it is valid.

        Args:
            payload: the received array.
            columns: the number of values in a row, if the receiver knows it.
        """
        return self._find_dtype_error(payload) or find_width_error(columns, payload.shape[1])

    @abstractmethod
    def is_finite(self, payload: Array) -> bool:
        """Return whether a valid array contains neither NaN nor infinity."""

    @abstractmethod
    def decode(self, payload: Array) -> Array:
        """Return the values of a valid array."""

    def combine(self, payloads: Sequence[Array], divisor: int, keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        """Add encoded arrays in the given order and divide the sum; return one array per key, encoded as `answer`.

        The server computes with `combine`, `concatenate` and `split_sum` only. To check payloads, it uses `find_error`,
        `is_finite` and, for class probabilities, `decode`.

        Args:
            payloads: valid arrays of one shape.
            divisor: the divisor of the sum.
            keys: the keys of the messages that will carry the result.
            first_row: the position of the first row in the whole tensor.
        """
        total = add_arrays(map(self.decode, payloads), divisor)
        return [self.answer.encode(total, keys[0], first_row)] * len(keys)

    def concatenate(self, payloads: Sequence[Array], key: Key, first_row: int = 0) -> Array:
        """Return the columns of all encoded arrays side by side, in the given order, encoded as `answer`.

        By default the values are decoded and encoded again, which rounds them again if the encoding is not exact.

        Args:
            payloads: valid arrays of one shape.
            key: the key of the message that will carry the result.
            first_row: the position of the first row in the whole tensor.
        """
        values = np.concatenate([self.decode(payload) for payload in payloads], axis=1)
        return self.answer.encode(values, key, first_row)

    def split_sum(self, payloads: Sequence[Array], keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        """Add encoded arrays in the given order and divide the columns of the sum equally among the keys, in order.

        Args:
            payloads: valid arrays of one shape.
            keys: the keys of the messages that will carry the parts; each part is encoded as `answer`.
            first_row: the position of the first row in the whole tensor.
        """
        parts = np.split(add_arrays(map(self.decode, payloads)), len(keys), axis=1)
        return [self.answer.encode(part, key, first_row) for part, key in zip(parts, keys, strict=True)]

    def with_seed(self, seed: int | Secret) -> Encoding:
        """Return this encoding with another seed for its random numbers. A client with a secret calls this."""
        return self

    def row_bytes(self, columns: int) -> int:
        """Return the encoded size of a row."""
        return columns * self.dtype.itemsize

    def count_bytes(self, rows: int, columns: int) -> int:
        """Return the encoded size of these rows in one message."""
        return rows * self.row_bytes(columns)

    def find_shape(self, payload: Array) -> tuple[int, int]:
        """Return (rows, columns) of the values in a valid array of one message. Columns can be UNKNOWN_COLUMNS."""
        return len(payload), self.decode(payload[:1]).shape[1]

    def select_rows(self, payload: Array, rows: slice | NDArray[np.bool_]) -> Array:
        """Return the encoded rows of one message (a slice), or the encoded rows that a mask selects."""
        selected: Array = payload[rows]
        return selected

    def _find_dtype_error(self, payload: Array) -> str:
        if payload.ndim == 2 and payload.dtype == self.dtype:
            return ""
        form = {1: "a vector", 2: "a matrix"}.get(payload.ndim, f"{payload.ndim} dimensions")
        return f"expected a matrix of {self.dtype.str[1:]}, got {form} of {payload.dtype.str[1:]}"


def add_arrays(arrays: Iterator[Array], divisor: int = 1) -> Array:
    """Add arrays in the given order, and divide the sum. An overflow gives infinity, which the server refuses."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = next(arrays).copy()
        for array in arrays:
            total += array
        if divisor != 1:
            total /= divisor
    return total


def find_width_error(expected: int | None, columns: int) -> str:
    """Return a description of a wrong number of columns, or ""; `expected` is None if the receiver does not know it."""
    return "" if expected in (None, columns) else f"expected {expected} columns, got {columns}"
