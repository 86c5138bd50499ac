"""Encodings of tensors: floats, bf16, 8-bit integers with a step per row, or integers on a grid known to all clients.

This module needs numpy only, because the server has no torch.

All readers of a released tensor, including its sender, compute with the decoded values. An encoding keeps no state, so
encoding the same message again gives the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from glasu import registry
from glasu.ckks_parameters import CKKS, CkksParameters
from glasu.config import RunConfig
from glasu.config_checks import count_levels
from glasu.errors import ConfigError, TrainingError
from glasu.randomness import Stream
from glasu.secret import Secret
from glasu.wire.message_key import Key
from glasu.wire.packing import pack_integers, unpack_integers
from glasu.wire.tensor_kinds import CHANGE, GRADIENT, OWNER_GRADIENT, PROBABILITIES, REPRESENTATION, TensorKind

Array = NDArray[Any]
# The dtypes of arrays in messages. A message contains the position of the dtype in this tuple.
DTYPES = ("<f4", "<f8", "<u2", "|i1", "|u1", "<u4", "<u8")
T = TypeVar("T")
SINGLE, DOUBLE = np.dtype("<f4"), np.dtype("<f8")
_FLOATS: dict[str, np.dtype[Any]] = {"fp32": SINGLE, "fp64": DOUBLE}
UNKNOWN_COLUMNS = -1  # the number of columns is unknown if an encrypted message contains no ciphertext
SHAPE_WORDS = 2  # numbers before the coefficients of a ciphertext: the message's rows and columns
COEFFICIENT = np.dtype("<u8")
_HIGH = np.float32(127)
_STEP_BYTES = 4
_DRAWS = 16  # 16-bit random numbers per Philox counter
_NEGLIGIBLE = np.float32(2.0**-119)  # a block of smaller values is sent as zeros, because its step would be subnormal
_TOO_LARGE = np.float32(2.0**127)  # a row is refused if it contains an absolute value of at least this size
_LARGEST_STEP = _TOO_LARGE / _HIGH  # 128 times this step is still finite


class Encoding(ABC):
    """Converts the rows of a matrix to bytes and back. The bytes of a row do not depend on other rows."""

    name: str
    is_exact = False  # whether decoded values equal the original values bit for bit
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
    def ring(self) -> Ring | None:
        """The ring of the integers that clients hide and the server adds; None if the server reads the values."""
        return None

    @property
    def is_hidden(self) -> bool:
        """Whether the server receives masked or encrypted numbers, which it can add but not check."""
        return self.ring is not None

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
        return self._find_dtype_error(payload) or _find_width_error(columns, payload.shape[1])

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
        total = _add(map(self.decode, payloads), divisor)
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
        parts = np.split(_add(map(self.decode, payloads)), len(keys), axis=1)
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
        if error := _find_width_error(columns, payload.shape[1] // block * self.width):
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
        total = _add(map(self.decode, payloads), divisor)
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


@dataclass(frozen=True)
class Ring(Encoding):
    """Integers modulo 2^bits, which masks hide (`glasu.privacy.masking`).

    A client's integer lies in 0..levels - 1, so a sum over `num_clients` clients does not wrap around. Masks are
    uniform in the whole ring, so the server can check neither single numbers nor sums. As with `Integers`, the grid is
    not part of the message, and the readers compute the mean.
    """

    bits: int  # 8, 16 or 32
    num_clients: int
    name: str = "ring"

    @property
    def ring(self) -> Ring:
        return self

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
        return count_levels(self.bits, self.num_clients)

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
        if error := _find_width_error(columns, found[1]):
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


def _add(arrays: Iterator[Array], divisor: int = 1) -> Array:
    """Add arrays in the given order, and divide the sum. An overflow gives infinity, which the server refuses."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = next(arrays).copy()
        for array in arrays:
            total += array
        if divisor != 1:
            total /= divisor
    return total


def _find_width_error(expected: int | None, columns: int) -> str:
    return "" if expected in (None, columns) else f"expected {expected} columns, got {columns}"


def use_for_all_kinds(value: T) -> Mapping[TensorKind, T]:
    """Return a dict that maps each kind of tensor affected by `wire.precision` to the same value."""
    return dict.fromkeys((REPRESENTATION, GRADIENT, PROBABILITIES), value)


@dataclass(frozen=True)
class Precision:
    """A choice of `wire.precision`."""

    make: Callable[[RunConfig], Mapping[TensorKind, Encoding]]  # returns the encoding of every kind of tensor
    ring_bits: int | None = None  # hidden tensors are integers modulo 2^ring_bits; None: tensors cannot be hidden

    @property
    def can_be_hidden(self) -> bool:
        """Whether masks or ciphertexts can hide tensors of this precision."""
        return self.ring_bits is not None


def _plain(config: RunConfig) -> Mapping[TensorKind, Encoding]:
    return use_for_all_kinds(Plain(config.wire.precision))


def _bf16(config: RunConfig) -> Mapping[TensorKind, Encoding]:
    return {**use_for_all_kinds(BFloat16()), PROBABILITIES: Plain()}


def _int8(config: RunConfig) -> Mapping[TensorKind, Encoding]:
    gradient = Int8(config.model.hidden, stochastic=True, seed=config.train.seed)
    return {REPRESENTATION: Int8(config.model.hidden), GRADIENT: gradient, PROBABILITIES: Plain()}


ENCODINGS: dict[str, Precision] = {
    "fp32": Precision(_plain, ring_bits=32),
    "bf16": Precision(_bf16, ring_bits=16),
    "int8": Precision(_int8, ring_bits=8),
    "fp64": Precision(_plain),
}


def make_encodings(config: RunConfig, seed: int | Secret | None = None) -> Mapping[TensorKind, Encoding]:
    """Return the encoding of each kind of tensor. The server's answers use `Encoding.answer`.

    Representations are rounded to nearest, which gives the smaller error. Gradients are rounded stochastically, because
    rounding to nearest would lose values that are small in every round. Class probabilities are not rounded, because
    they decide which model is selected, and there are few of them. Changes of representations (`wire.feedback`) are
    integers; the next change includes their rounding error.

    With masks, representations, gradients and class probabilities are integers of a ring. The ring has as many bits as
    the precision, but always 32 bits for class probabilities. With ckks, the same integers are encrypted.

    Args:
        config: the settings.
        seed: the seed of a client's stochastic rounding; None: `train.seed`. The server passes None.
    """
    precision: Precision = registry.load("encoding", config.wire.precision)
    encodings, num_clients = precision.make(config), config.data.num_clients
    if seed is not None:
        encodings = {kind: encoding.with_seed(seed) for kind, encoding in encodings.items()}
    encodings = {**encodings, OWNER_GRADIENT: encodings[GRADIENT]}
    hiding: type[Ring] | None = config.privacy.way_to_hide.encoding
    if hiding is not None:
        assert precision.ring_bits is not None  # `RunConfig` refuses other precisions
        ring = hiding(precision.ring_bits, num_clients)
        encodings = {**encodings, **use_for_all_kinds(ring), PROBABILITIES: hiding(32, num_clients)}
    encodings = {**encodings, CHANGE: Integers(config.model.hidden, config.wire.feedback_bits, num_clients)}
    for kind, encoding in encodings.items():
        _check_dtype(config.wire.precision, kind, encoding)
    return encodings


def _check_dtype(precision: str, kind: TensorKind, encoding: Encoding) -> None:
    """Refuse an encoding, for example from an extension, whose dtype messages cannot contain."""
    for dtype in (encoding.dtype.str, encoding.answer.dtype.str):
        if dtype not in DTYPES:
            raise ConfigError(
                f"wire.precision={precision!r}: the encoding {encoding.name!r} of a {kind} has the dtype {dtype!r}, "
                f"which messages cannot contain; use one of {', '.join(DTYPES)}."
            )


def find_compute_dtype(config: RunConfig) -> np.dtype[Any]:
    """Return the precision in which clients compute."""
    return make_encodings(config)[REPRESENTATION].compute_dtype
