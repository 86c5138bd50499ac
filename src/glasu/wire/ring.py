"""The encoding as integers modulo a power of two, which masks hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from glasu.wire.encoding import Array, Encoding
from glasu.wire.message_key import Key


@dataclass(frozen=True)
class Ring(Encoding):
    """Integers modulo 2^bits. Masks hide them (`glasu.privacy.masking`).

    A client's integer lies in 0..levels - 1, so a sum over `num_clients` clients does not wrap around. Masks are
    uniform in the whole ring, so the server can check neither single numbers nor sums. As with `Integers`, the grid is
    not part of the message, and the readers compute the mean.
    """

    bits: int  # 8, 16 or 32
    num_clients: int
    name: str = "ring"
    is_hidden = True

    @cached_property
    def number_dtype(self) -> np.dtype[Any]:
        """The type of the integers."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.number_dtype

    @property
    def levels(self) -> int:
        """The number of possible values of one client's integer."""
        return ((1 << self.bits) - 1) // self.num_clients

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        return np.ascontiguousarray(value, self.number_dtype)

    def is_finite(self, payload: Array) -> bool:
        return True

    def decode(self, payload: Array) -> Array:
        return payload.astype(np.int64)

    def combine(self, payloads: Sequence[Array], divisor: int, keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        """Add modulo 2^bits. The readers divide the sum."""
        total = payloads[0].copy()
        for payload in payloads[1:]:
            total += payload  # numpy wraps around
        return [total] * len(keys)
