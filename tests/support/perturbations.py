"""Perturbations for tests of the gate: rounding, and row noise with a given deviation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glasu.privacy.noise import Mechanism, RowNoise
from glasu.wire.message_key import Key
from glasu.wire.tensor_kinds import REPRESENTATION, TensorKind


@dataclass(frozen=True)
class Rounding:
    """Round to multiples of 2^-bits."""

    bits: int
    name: str = "rounding"

    def __call__(self, value: Tensor, key: Key) -> Tensor:
        return torch.round(value * 2.0**self.bits) * 2.0**-self.bits


def row_noise(
    deviation: float, clip: float = 1.0, secret: bytes = b"a secret", kind: TensorKind = REPRESENTATION
) -> RowNoise:
    """Return noise with this deviation."""
    return RowNoise(Mechanism(clip, deviation / clip), kind, secret)
