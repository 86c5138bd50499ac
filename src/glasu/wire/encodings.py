"""The table of encodings: the choices of `wire.precision`, and the encoding of each kind of tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from glasu import registry
from glasu.config import RunConfig
from glasu.errors import ConfigError
from glasu.secret import Secret
from glasu.wire.encoding import DTYPES, Encoding
from glasu.wire.floats import BFloat16, Plain
from glasu.wire.int8 import Int8
from glasu.wire.integers import Integers
from glasu.wire.ring import Ring
from glasu.wire.tensor_kinds import CHANGE, GRADIENT, OWNER_GRADIENT, PROBABILITIES, REPRESENTATION, TensorKind

T = TypeVar("T")


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

    def count_levels(self, num_clients: int) -> int:
        """Return how many values a hidden integer of one party can have."""
        assert self.ring_bits is not None
        return Ring(self.ring_bits, num_clients).levels


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
    encodings, num_clients = _make(precision, config), config.data.num_clients
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


def _make(precision: Precision, config: RunConfig) -> Mapping[TensorKind, Encoding]:
    """Return what `precision.make` returns; refuse the result of an extension if it lacks an encoding."""
    encodings: object = precision.make(config)
    what = f"wire.precision={config.wire.precision!r}: the result of make"
    if not isinstance(encodings, Mapping) or not use_for_all_kinds(None).keys() <= encodings.keys():
        raise ConfigError(
            f"{what} must be a dict with the keys REPRESENTATION, GRADIENT and PROBABILITIES of "
            "glasu.wire.tensor_kinds; return an encoding for each of them."
        )
    for kind, encoding in encodings.items():
        registry.check_instance(encoding, Encoding, f"{what} for a {kind}")
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
