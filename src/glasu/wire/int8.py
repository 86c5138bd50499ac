"""The encoding as 8-bit integers with a step for every block of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glasu.errors import TrainingError
from glasu.randomness import Stream
from glasu.secret import Secret
from glasu.wire.encoding import Array, Encoding, add_arrays, find_width_error
from glasu.wire.message_key import Key

_HIGH = np.float32(127)
_STEP_BYTES = 4
_DRAWS = 16  # 16-bit random numbers per Philox counter
_NEGLIGIBLE = np.float32(2.0**-119)  # a block of smaller values is sent as zeros, because its step would be subnormal
_TOO_LARGE = np.float32(2.0**127)  # a row is refused if it contains an absolute value of at least this size
_LARGEST_STEP = _TOO_LARGE / _HIGH  # 128 times this step is still finite


@dataclass(frozen=True)
class Int8(Encoding):
    """8-bit multiples of a step. Every `width` values of a row form a block: a float32 step, then `width` integers.

    The step is max|value| / 127, and the integers lie in -127..127. A row with NaN or infinity is refused, because no
    step can represent it.

    Rounding is to nearest or stochastic. Stochastic rounding rounds up with a probability equal to the remainder, so
    the expected value is exact, even for values far below the largest value of their row. The random numbers are a
    function of (seed, phase, round, layer, sender, row, column).
    """

    width: int
    stochastic: bool = False
    seed: int | Secret = 0
    name: str = "int8"
    dtype = np.dtype("|i1")

    def with_seed(self, seed: int | Secret) -> Int8:
        return replace(self, seed=seed)

    def encode(self, value: Array, key: Key, first_row: int = 0) -> Array:
        rows, count = len(value), value.shape[1] // self.width
        blocks = np.ascontiguousarray(value, np.float32).reshape(rows, count, self.width)
        with np.errstate(invalid="ignore"):
            largest = np.abs(blocks).max(axis=2, keepdims=True)
            sendable = bool((largest < _TOO_LARGE).all())
        if not sendable:
            raise TrainingError(
                f"{key}: a value to send is not a finite number; training diverged. Lower train.learning_rate."
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

    def find_error(self, payload: Array, columns: int | None = None) -> str:
        block = _STEP_BYTES + self.width
        if error := self._find_dtype_error(payload):
            return error
        if payload.shape[1] == 0 or payload.shape[1] % block:
            return f"expected rows whose size is a positive multiple of {block} bytes, got {payload.shape[1]}"
        if error := find_width_error(columns, payload.shape[1] // block * self.width):
            return error
        steps = self._steps(payload)
        with np.errstate(invalid="ignore"):
            good = (steps >= 0) & (steps <= _LARGEST_STEP)
        return "" if good.all() else f"the step of a row is {steps[~good][0]}, expected 0..{_LARGEST_STEP:.3g}"

    def is_finite(self, payload: Array) -> bool:
        return True  # `find_error` refuses steps that are not finite

    def decode(self, payload: Array) -> Array:
        blocks = self._blocks(payload)
        values = blocks[:, :, _STEP_BYTES:].astype(np.float32)
        values *= self._steps(payload)
        return values.reshape(len(payload), blocks.shape[1] * self.width)

    def combine(self, payloads: Sequence[Array], divisor: int, keys: Sequence[Key], first_row: int = 0) -> list[Array]:
        if not self.stochastic:
            return super().combine(payloads, divisor, keys, first_row)
        total = add_arrays(map(self.decode, payloads), divisor)
        return [self.encode(total, key, first_row) for key in keys]  # each message has its own random numbers

    def concatenate(self, payloads: Sequence[Array], key: Key, first_row: int = 0) -> Array:
        return np.concatenate(payloads, axis=1)  # every block keeps its step, so nothing is rounded again

    def row_bytes(self, columns: int) -> int:
        return columns // self.width * (_STEP_BYTES + self.width)

    def _blocks(self, payload: Array) -> Array:
        block = _STEP_BYTES + self.width
        return payload.reshape(len(payload), payload.shape[1] // block, block)

    def _steps(self, payload: Array) -> NDArray[np.float32]:
        return np.ascontiguousarray(self._blocks(payload)[:, :, :_STEP_BYTES]).view("<f4")

    def _uniform(self, key: Key, first_row: int, rows: int, columns: int) -> NDArray[np.float32]:
        """Return a random number in (0, 1) for every value. Each row has its own Philox counters."""
        purpose, counters = f"rounding {key.phase.name}", -(-columns // _DRAWS)
        stream = Stream(self.seed, purpose, key.round, layer=key.layer, client=key.client)
        source = np.random.Philox(key=stream.key(), counter=first_row * counters)
        drawn = source.random_raw(4 * counters * rows).astype("<u8", copy=False).view("<u2")
        drawn = drawn.reshape(rows, _DRAWS * counters)[:, :columns]
        return (drawn + np.float32(0.5)) * np.float32(2.0**-16)
