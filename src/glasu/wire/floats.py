"""Encodings as floats: 32 or 64 bits, unchanged, or bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from glasu.wire.encoding import DOUBLE, SINGLE, Array, Encoding
from glasu.wire.message_key import Key

_FLOATS: dict[str, np.dtype[Any]] = {"fp32": SINGLE, "fp64": DOUBLE}


@dataclass(frozen=True)
class Plain(Encoding):
    """Little-endian floats, unchanged. Clients compute in the same precision."""

    name: str = "fp32"
    is_exact = True

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return _FLOATS[self.name]

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        return self.dtype

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        return np.ascontiguousarray(value, self.dtype)

    def is_finite(self, payload: Array) -> bool:
        return bool(np.logical_and.reduce(np.isfinite(payload), axis=None))

    def decode(self, payload: Array) -> Array:
        return payload


@dataclass(frozen=True)
class BFloat16(Encoding):
    """The upper half of a 32-bit float, rounded to nearest, half to even. NaN and infinity are kept."""

    name: str = "bf16"
    dtype = np.dtype("<u2")

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        value = np.ascontiguousarray(value, "<f4")
        bits = value.view("<u4")
        upper: Array = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
        unknown = np.isnan(value)
        if unknown.any():  # rounding could turn the bits of a NaN into infinity or zero
            upper[unknown] = 0x7FC0
        return upper

    def is_finite(self, payload: Array) -> bool:
        return bool(((payload & 0x7F80) != 0x7F80).all())

    def decode(self, payload: Array) -> Array:
        bits: Array = payload.astype("<u4") << 16
        return bits.view("<f4")

    def concatenate(self, payloads: Sequence[Array], key: Key, first_row: int = 0) -> Array:
        return np.concatenate(payloads, axis=1)  # the same bits as after decoding, in less time
