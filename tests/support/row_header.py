"""An encoding whose encoded columns cannot be concatenated or sliced like a matrix of floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from glasu.wire.encoding import Array, Encoding
from glasu.wire.message_key import Key


@dataclass(frozen=True)
class RowHeader(Encoding):
    """Rows of 32-bit floats. A row starts with the number of its values."""

    name: str = "row header"
    dtype = np.dtype("<f4")

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        return np.hstack([np.full((len(value), 1), value.shape[1]), value]).astype(self.dtype)

    def find_error(self, payload: Array, columns: int | None = None) -> str:
        if error := super().find_error(payload, None if columns is None else columns + 1):
            return error
        return "" if (payload[:, 0] == payload.shape[1] - 1).all() else "expected the number of values before a row"

    def is_finite(self, payload: Array) -> bool:
        return bool(np.isfinite(payload).all())

    def decode(self, payload: Array) -> Array:
        return payload[:, 1:]

    def row_bytes(self, columns: int) -> int:
        return super().row_bytes(columns + 1)
