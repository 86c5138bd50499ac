"""Differential privacy of released rows: clipping to a constant norm, and discrete Gaussian noise on a constant grid.

A row is scaled down to an L2 norm of at most `clip` and rounded toward zero to multiples of `step`. Rounding toward
zero never makes a row longer, so the sensitivity has no extra term:

    a row becomes zero:        |x - 0| <= clip
    a row becomes any other:   |x - y| <= 2 clip

Then noise from the discrete Gaussian distribution on the same grid (Canonne, Kamath and Steinke 2020) is added to every
value, with deviation sigma = multiplier * clip. `step` is a power of two and a function of clip and multiplier only, so
the grid reveals nothing about the data. All computations use integers, so attacks on floating-point noise do not apply.

The noise of a row is a pseudorandom function of (kind, phase, round, layer, node, clip, multiplier, step, row) under
the party's secret. The same row in the same place always has the same noise, so an attacker cannot average over
repeated releases. A row that is computed again with other values has fresh noise. Run, attempt and incarnation are not
inputs of the function.

No module of this folder uses a random generator of numpy or torch; a test checks this.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from glasu.errors import TrainingError
from glasu.privacy.ledger import ROW_DIGEST_BYTES
from glasu.privacy.masking import draw_stream
from glasu.secret import Secret
from glasu.wire.message_key import Key
from glasu.wire.tensor_kinds import TensorKind

if TYPE_CHECKING:  # a server imports this module, and it has no torch
    from torch import Tensor

STEPS_IN_DEVIATION = 256  # sigma / step lies in 256..512
TAIL_DEVIATIONS = 14  # the probability of noise beyond this number of deviations is below 2^-140
_WORD = 1 << 64
_DRAW_BYTES = 16  # random bytes for the noise of one value
_NOISE = re.compile(r"noise\+norm=([^+]+)\+multiplier=([^+]+)")
_ROW_PLACE = struct.Struct("<BiiqdddI")  # phase, round, layer, node, clip, multiplier, step, columns
_ALMOST_ONE = 1 - 2.0**-40  # this factor makes up for rounding errors, so that no scaled row exceeds the clip


@dataclass(frozen=True)
class Mechanism:
    """The parameters of the noise of one kind of release. They are public."""

    clip: float
    multiplier: float

    @property
    def deviation(self) -> float:
        """sigma, before rounding to the grid."""
        return self.multiplier * self.clip

    @property
    def step(self) -> float:
        """The distance between neighbouring values of the grid: a power of two."""
        return math.ldexp(1.0, math.floor(math.log2(self.deviation)) - STEPS_IN_DEVIATION.bit_length() + 1)

    def quantize(self, rows: NDArray[np.floating]) -> NDArray[np.int64]:
        """Clip rows, and return them as multiples of `step`, rounded toward zero.

        No row of the result has a norm above clip / step; this is checked in integers.
        """
        values = rows.astype(np.float64)
        if not np.isfinite(values).all():
            why = "a value to release is not a finite number; training diverged. Lower train.learning_rate."
            raise TrainingError(why)
        largest = np.abs(values).max(axis=1, keepdims=True, initial=0.0)
        unit = np.divide(values, largest, out=np.zeros_like(values), where=largest > 0)  # squares cannot overflow
        lengths = largest * np.sqrt(np.square(unit).sum(axis=1, keepdims=True))
        factors = np.minimum(
            1.0, np.divide(self.clip * _ALMOST_ONE, lengths, out=np.ones_like(lengths), where=lengths > 0)
        )
        numbers: NDArray[np.int64] = np.trunc(values * factors / self.step).astype(np.int64)
        limit = math.floor(Fraction(self.clip) ** 2 / Fraction(self.step) ** 2)
        assert (np.square(numbers).sum(axis=1) <= limit).all()
        return numbers


@dataclass(frozen=True)
class RowNoise:
    """Clips the rows of one kind of tensor and adds noise, as the module docstring describes."""

    mechanism: Mechanism
    kind: TensorKind
    secret: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """The mechanism, as the ledger records it. `read_mechanism` is the inverse."""
        clip, multiplier = (repr(number).replace("+", "") for number in dataclasses.astuple(self.mechanism))
        return f"noise+norm={clip}+multiplier={multiplier}"

    def perturb(self, value: Tensor, key: Key, nodes: NDArray[np.int64] | None) -> tuple[Tensor, bytes]:
        """Return the rows with noise, in the precision of `value`, and a digest of every row without noise.

        Equal digests mean equal rows and equal noise. A digest reveals neither the row nor its noise.

        Args:
            value: the rows.
            key: phase, round and layer of the release.
            nodes: the nodes of the rows.
        """
        import torch

        if nodes is None or len(nodes) != len(value):
            raise ValueError("noise needs the node of every row")
        numbers = self.mechanism.quantize(value.numpy())
        seeds = self.seed_rows(numbers, key, nodes)
        noise = draw_noise(make_words(seeds, numbers.shape[1]), self.mechanism.deviation / self.mechanism.step)
        digests = b"".join(hmac.digest(seed, b"glasu row", "sha256")[:ROW_DIGEST_BYTES] for seed in seeds)
        return torch.from_numpy((numbers + noise) * self.mechanism.step).to(value.dtype), digests

    def seed_rows(self, numbers: NDArray[np.int64], key: Key, nodes: NDArray[np.int64]) -> list[bytes]:
        """Return the secret seed of the noise of every row: the PRF of place, mechanism and clean values."""
        mechanism, columns = self.mechanism, numbers.shape[1]
        clean = np.ascontiguousarray(numbers, "<i8")
        prefix, found = b"glasu noise\0" + self.kind.name.encode() + b"\0", []
        for node, row in zip(nodes.tolist(), clean, strict=True):
            place = _ROW_PLACE.pack(
                key.phase,
                key.round,
                key.layer,
                node,
                mechanism.clip,
                mechanism.multiplier,
                mechanism.step,
                columns,
            )
            found.append(hmac.digest(self.secret, prefix + place + row.tobytes(), "sha256"))
        return found


@dataclass(frozen=True)
class ScoreRepair:
    """Makes noisy values valid again, for example class probabilities. It reads only the noisy values."""

    function: Callable[[NDArray[np.floating]], NDArray[np.floating]] = field(repr=False)
    name: str = "repair"

    def __call__(self, value: Tensor, key: Key) -> Tensor:
        """Return the repaired values, in the precision of `value`."""
        import torch

        return torch.from_numpy(np.ascontiguousarray(self.function(value.numpy().astype(np.float64)))).to(value.dtype)


def make_words(seeds: Sequence[bytes], columns: int) -> NDArray[np.uint64]:
    """Return two random words for every value, shape (rows, columns, 2): AES-CTR under the seed of the row."""
    streams = b"".join(draw_stream(seed, _DRAW_BYTES * columns) for seed in seeds)
    return np.frombuffer(streams, "<u8").reshape(len(seeds), columns, 2)


def draw_noise(words: NDArray[np.uint64], deviation: float) -> NDArray[np.int64]:
    """Map random words to discrete Gaussian integers: P(n) is proportional to exp(-n^2 / (2 deviation^2)).

    The inverse of the distribution function is read from a table of 128-bit probabilities, so the distribution differs
    from the exact one by less than 2^-100 in total variation.

    Args:
        words: uniform, shape (..., 2): the high and the low half of a 128-bit number.
        deviation: sigma, in multiples of the step.
    """
    high, low = _tabulate(deviation)
    wanted, fine = words[..., 0].ravel(), words[..., 1].ravel()
    places = np.searchsorted(high, wanted, side="left")  # the first entry whose high half is at least `wanted`
    ends = np.searchsorted(high, wanted, side="right")
    for place in np.flatnonzero(ends > places):  # equal high halves are rare; the low half decides
        entry = places[place]
        while entry < ends[place] and low[entry] <= fine[place]:
            entry += 1
        places[place] = entry
    bound = len(high) // 2
    return (np.minimum(places, 2 * bound) - bound).reshape(words.shape[:-1])


@functools.lru_cache(maxsize=16)
def _tabulate(deviation: float) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return floor(2^128 P(n <= b)) for b = -bound..bound-1 as high and low words. The last entry is a sentinel."""
    bound = math.ceil(TAIL_DEVIATIONS * deviation)
    with localcontext() as context:
        context.prec = 60
        scale = -1 / (2 * Decimal(deviation) ** 2)
        weights = [(scale * (n * n)).exp() for n in range(bound + 1)]
        total = weights[0] + 2 * sum(weights[1:])
        running, entries = Decimal(0), []
        for n in range(-bound, bound):
            running += weights[abs(n)]
            entries.append(min(int(running / total * (1 << 128)), (1 << 128) - 1))
    entries.append((1 << 128) - 1)
    high = np.array([entry // _WORD for entry in entries], np.uint64)
    low = np.array([entry % _WORD for entry in entries], np.uint64)
    return high, low


def read_mechanism(protection: str) -> Mechanism | None:
    """Return the noise mechanism that the `protection` of a ledger entry contains, or None if there is no noise."""
    found = _NOISE.search(protection)
    return None if found is None else Mechanism(float(found[1]), float(found[2]))


def derive_noise_key(secret: Secret | None, seed: int) -> bytes:
    """Return the key of a party's noise. Without a secret, it is derived from the public seed and protects nothing."""
    if secret is not None:
        return secret.derive("noise").value
    return hashlib.sha256(f"glasu noise of seed {seed}".encode()).digest()
