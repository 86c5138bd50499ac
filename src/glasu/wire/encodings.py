"""How tensors travel: as floats, as bf16, or as 8-bit integers with a step per row; numpy only, as the server is.

An encoding knows no protocol: whoever reads a tensor that has travelled decodes it, the sender too, and computes with
what it then says. It has no memory either: a message made again is the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from glasu import registry
from glasu.config import RunConfig
from glasu.errors import TrainingError
from glasu.randomness import Stream
from glasu.wire.message_key import Key

Array = NDArray[Any]
Kind = Literal["representation", "gradient", "probabilities"]


class Encoding(Protocol):
    """Decides how the rows of a matrix travel; a row's bytes depend on no other row."""

    @property
    def name(self) -> str: ...

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        """Return the array that is sent.

        Args:
            value: the numbers.
            key: names the message that they travel in.
            first_row: where they stand in the tensor; the size of its chunks changes no bit.
        """

    def flaw(self, payload: Array, columns: int | None = None) -> str:
        """Return what is wrong with a received array; empty: nothing.

        Args:
            payload: what was received.
            columns: how many values a row must have, where the receiver knows it.
        """

    def is_finite(self, payload: Array) -> bool:
        """Tell whether an array without a flaw holds numbers only, neither NaN nor infinity."""

    def decode(self, payload: Array) -> Array:
        """Return the numbers that every reader of an array without a flaw computes with."""

    def combine(self, payloads: Sequence[Array], divisor: int, keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        """Add encoded arrays in the given order and divide the sum; return it encoded, once for every key.

        The server calls nothing else: for a mean (divisor M), for a sum (divisor 1), and for shares of a gradient (one
        key per receiver).

        Args:
            payloads: arrays without a flaw, of one shape.
            divisor: the divisor of the sum.
            keys: the keys of the messages that will carry the result.
            first_row: the position of the rows in their tensor.
        """

    def row_bytes(self, columns: int) -> int:
        """Return the encoded size of a row."""


@dataclass(frozen=True)
class Plain:
    """Little-endian floats, as they are."""

    name: str = "fp32"

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return _FLOATS[self.name]

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        return np.ascontiguousarray(value, self.dtype)

    def flaw(self, payload: Array, columns: int | None = None) -> str:
        if payload.dtype == self.dtype and payload.ndim == 2 and columns in (None, payload.shape[1]):
            return ""
        return _not_of(self.dtype, payload) or _not_as_wide(columns, payload.shape[1])

    def is_finite(self, payload: Array) -> bool:
        return bool(np.logical_and.reduce(np.isfinite(payload), axis=None))

    def decode(self, payload: Array) -> Array:
        return payload

    def combine(self, payloads: Sequence[Array], divisor: int, keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        return [_add(payloads, divisor)] * len(keys)

    def row_bytes(self, columns: int) -> int:
        return columns * self.dtype.itemsize


@dataclass(frozen=True)
class BFloat16:
    """The upper half of a 32-bit float, rounded to nearest, half to even; NaN and infinity stay what they are."""

    name: str = "bf16"

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        value = np.ascontiguousarray(value, "<f4")
        bits = value.view("<u4")
        upper: Array = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
        unknown = np.isnan(value)
        if unknown.any():  # rounding could make an infinity, or a zero, of its bits
            upper[unknown] = 0x7FC0
        return upper

    def flaw(self, payload: Array, columns: int | None = None) -> str:
        return _not_of(_HALVES, payload) or _not_as_wide(columns, payload.shape[1])

    def is_finite(self, payload: Array) -> bool:
        return bool(((payload & 0x7F80) != 0x7F80).all())

    def decode(self, payload: Array) -> Array:
        bits: Array = payload.astype("<u4") << 16
        return bits.view("<f4")

    def combine(self, payloads: Sequence[Array], divisor: int, keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        total = _add([self.decode(payload) for payload in payloads], divisor)
        return [self.encode(total, keys[0], first_row)] * len(keys)

    def row_bytes(self, columns: int) -> int:
        return 2 * columns


@dataclass(frozen=True)
class Int8:
    """Multiples -127..127 of a step of their own for every `width` values of a row: step, float32, then the values.

    The step is max|value| / 127. It stands before its values, so that blocks of columns keep their bytes when they are
    laid side by side or taken apart. A row that is not finite has no step and is refused, never sent as numbers.

    Rounding is to nearest, or stochastic: up with the probability of the rest, by a random number that is a function of
    (seed, phase, round, layer, sender, row, column); then what arrives is right in the mean, however small a value is
    beside its row's largest.
    """

    width: int
    stochastic: bool = False
    seed: int = 0
    name: str = "int8"

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        rows, count = len(value), value.shape[1] // self.width
        blocks = np.ascontiguousarray(value, np.float32).reshape(rows, count, self.width)
        with np.errstate(invalid="ignore"):
            largest = np.abs(blocks).max(axis=2, keepdims=True)
            sendable = bool((largest < _TOO_LARGE).all())
        if not sendable:
            raise TrainingError(
                f"{key}: a value to be sent is not a finite number; training diverged. Lower train.learning_rate."
            )
        largest[largest < _NEGLIGIBLE] = 0
        multiples = blocks * np.divide(_HIGH, largest, out=np.zeros_like(largest), where=largest > 0)
        if self.stochastic:
            multiples += self._uniform(key, first_row, *value.shape).reshape(multiples.shape)
            np.clip(np.floor(multiples, out=multiples), -_HIGH, _HIGH, out=multiples)
        else:
            np.rint(multiples, out=multiples)
        payload = np.empty((rows, count, _STEP_BYTES + self.width), np.int8)
        payload[:, :, :_STEP_BYTES] = (largest / _HIGH).astype("<f4").view(np.int8)
        payload[:, :, _STEP_BYTES:] = multiples
        return payload.reshape(rows, count * (_STEP_BYTES + self.width))

    def flaw(self, payload: Array, columns: int | None = None) -> str:
        block = _STEP_BYTES + self.width
        if flaw := _not_of(_BYTES, payload):
            return flaw
        if payload.shape[1] == 0 or payload.shape[1] % block:
            return f"expected rows of one or more times {block} bytes, got {payload.shape[1]}"
        if flaw := _not_as_wide(columns, payload.shape[1] // block * self.width):
            return flaw
        steps = self._steps(payload)
        with np.errstate(invalid="ignore"):
            good = (steps >= 0) & (steps <= _LARGEST_STEP)
        return "" if good.all() else f"the step of a row is {steps[~good][0]}, not within 0..{_LARGEST_STEP:.3g}"

    def is_finite(self, payload: Array) -> bool:
        return True  # or a step has a flaw

    def decode(self, payload: Array) -> Array:
        blocks = self._blocks(payload)
        values = blocks[:, :, _STEP_BYTES:].astype(np.float32)
        values *= self._steps(payload)
        return values.reshape(len(payload), blocks.shape[1] * self.width)

    def combine(self, payloads: Sequence[Array], divisor: int, keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        total = _add([self.decode(payload) for payload in payloads], divisor)
        if not self.stochastic:
            return [self.encode(total, keys[0], first_row)] * len(keys)
        return [self.encode(total, key, first_row) for key in keys]  # every receiver gets its own rounding

    def row_bytes(self, columns: int) -> int:
        return columns // self.width * (_STEP_BYTES + self.width)

    def _blocks(self, payload: Array) -> Array:
        block = _STEP_BYTES + self.width
        return payload.reshape(len(payload), payload.shape[1] // block, block)

    def _steps(self, payload: Array) -> NDArray[np.float32]:
        return np.ascontiguousarray(self._blocks(payload)[:, :, :_STEP_BYTES]).view("<f4")

    def _uniform(self, key: Key, first_row: int, rows: int, columns: int) -> NDArray[np.float32]:
        """Return a number inside (0, 1) for every value; each row starts a Philox counter of its own."""
        purpose, counters = f"rounding {key.phase.name}", -(-columns // _DRAWS)
        stream = Stream(self.seed, purpose, key.round, layer=key.layer, client=key.client)
        source = np.random.Philox(key=stream.key(), counter=first_row * counters)
        drawn = source.random_raw(4 * counters * rows).astype("<u8", copy=False).view("<u2")
        drawn = drawn.reshape(rows, _DRAWS * counters)[:, :columns]
        return (drawn + np.float32(0.5)) * np.float32(2.0**-16)


_FLOATS: dict[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp64": np.dtype("<f8")}
_HALVES, _BYTES = np.dtype("<u2"), np.dtype("|i1")
_HIGH = np.float32(127)
_STEP_BYTES = 4
_DRAWS = 16  # of 16 bits, from one counter of Philox
_NEGLIGIBLE = np.float32(2.0**-119)  # the step of a row below it would lose digits; such a row travels as zeros
_TOO_LARGE = np.float32(2.0**127)  # from here on a row counts as infinite
_LARGEST_STEP = _TOO_LARGE / _HIGH  # 128 of them are still a number


def _add(arrays: Sequence[Array], divisor: int) -> Array:
    """Return the sum in the order given, divided; an overflow becomes infinity, which the server refuses."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = arrays[0].copy()
        for array in arrays[1:]:
            total += array
        if divisor != 1:
            total /= divisor
    return total


def _not_of(dtype: np.dtype[Any], payload: Array) -> str:
    if payload.ndim == 2 and payload.dtype == dtype:
        return ""
    form = {1: "a vector", 2: "a matrix"}.get(payload.ndim, f"{payload.ndim} dimensions")
    return f"expected a matrix of {dtype.str[1:]}, got {form} of {payload.dtype.str[1:]}"


def _not_as_wide(expected: int | None, columns: int) -> str:
    return "" if expected in (None, columns) else f"expected {expected} columns, got {columns}"


def alike(encoding: Encoding) -> Mapping[Kind, Encoding]:
    """Let every kind of tensor travel in one encoding."""
    return {"representation": encoding, "gradient": encoding, "probabilities": encoding}


def _plain(config: RunConfig) -> Mapping[Kind, Encoding]:
    return alike(Plain(config.wire.precision))


def _bf16(config: RunConfig) -> Mapping[Kind, Encoding]:
    return {**alike(BFloat16()), "probabilities": Plain()}


def _int8(config: RunConfig) -> Mapping[Kind, Encoding]:
    gradient = Int8(config.model.hidden, stochastic=True, seed=config.train.seed)
    return {"representation": Int8(config.model.hidden), "gradient": gradient, "probabilities": Plain()}


# The choices of wire.precision: each returns the encoding of every kind of tensor.
ENCODINGS: dict[str, Callable[[RunConfig], Mapping[Kind, Encoding]]] = {
    "fp32": _plain,
    "bf16": _bf16,
    "int8": _int8,
    "fp64": _plain,
}


def encodings_of(config: RunConfig) -> Mapping[Kind, Encoding]:
    """Return how each kind of tensor travels, in both directions.

    Representations are rounded to nearest, which is the smaller error; gradients stochastically, for what is small in
    every round must not be lost in every round. Class probabilities are what a run is judged by, and few: they travel
    as computed.
    """
    encodings: Mapping[Kind, Encoding] = registry.load("encoding", config.wire.precision)(config)
    return encodings
