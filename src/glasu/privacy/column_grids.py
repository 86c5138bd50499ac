"""Public grids for hidden tensors: values become integers of a ring, and sums of integers become means.

A column has the grid {-r, ..., -step, 0, step, ..., r} with step = r / h. A value n * step, for n in -h..h, is sent as
the integer n + h. The number h is small enough that the sum over all parties stays below 2^bits. Zero is on every grid.

The range r is public. It is computed from the last aggregate, which every client receives, so it reveals nothing new.
This also holds under differential privacy: the aggregate is a sum of noisy rows, so ranges are post-processing. Before
the first aggregate, the range is derived from `privacy.range`. For class probabilities, the range is always
`privacy.range`, but at least 1 because a probability can be 1. It is not computed from the last aggregate, because a
class can be unlikely at all nodes now and likely later. Values outside the grid are clamped. The number of clamped
values does not leave the client.

r depends only on the largest absolute value of a column. It is computed with elementary floating-point operations, so
all clients have the same bits on any machine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from glasu.errors import TrainingError
from glasu.privacy.feedback import as_tensor
from glasu.privacy.masking import draw_stream
from glasu.secret import Secret

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.wire.encoding import Array
    from glasu.wire.message_key import Key
    from glasu.wire.ring import Ring
    from glasu.wire.tensor_kinds import TensorKind

# For each ring size in bits: r divided by the largest absolute sum in a column. The factors exceed 1, so a range that
# is too small grows, even if only one party has large values in the column. A ring of more bits has enough levels for a
# larger factor.
HEADROOM = {32: 16.0, 16: 2.0, 8: 1.25}
RANGE_DECAY = 0.5  # an aggregate shrinks a range at most by this factor, so that few rows cannot make it too small
SMALLEST = 2.0**-4  # the smallest range of a column relative to the largest, because values of a column can grow
Ranges: TypeAlias = "dict[tuple[str, int], Tensor]"  # by kind and layer: r of each column, in double precision


@dataclass
class ColumnGrids:
    """The grids of one client. All clients of a run have the same ranges at the same message."""

    first_range: float = 8.0  # `privacy.range`
    seed: int | Secret = 0  # the seed of the stochastic rounding of gradients
    ranges: Ranges = field(default_factory=dict)
    clamped: int = 0  # number of own values outside the grid so far; it does not leave the client
    # Reused for every tensor: allocating an array of a megabyte takes longer than computing its values.
    _scratch: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)

    def _derive_secret(self, key: Key) -> Secret:
        """Return the secret for rounding one tensor. If it is derived from a public seed, it protects nothing."""
        own = self.seed
        if not isinstance(own, Secret):
            own = Secret(hashlib.sha256(f"glasu grid of seed {own}".encode()).digest())
        return own.derive(f"grid {key.phase.name} {key.layer}", key.round)

    def to_integers(self, kind: TensorKind, value: Tensor, key: Key, ring: Ring) -> tuple[Array, Tensor]:
        """Return the integers to send, and the values that they represent.

        Representations are rounded to nearest. Gradients are rounded stochastically, because rounding to nearest would
        lose values that are small in every round.
        """
        half, step = _find_half(ring), self._find_steps(kind, key, value.shape, ring)
        with np.errstate(invalid="ignore", over="ignore"):
            numbers = np.divide(value.numpy(), step, out=self._find_scratch(value.shape))
            if kind.is_gradient:
                numbers += _draw_uniform(self._derive_secret(key), value)
                np.floor(numbers, out=numbers)
            else:
                np.rint(numbers, out=numbers)
            largest = max(numbers.max(initial=0.0), -numbers.min(initial=0.0))
        if not np.isfinite(largest):
            raise TrainingError(
                f"{key}: a value to send is not a finite number; training diverged. Lower train.learning_rate."
            )
        if largest > half:
            self.clamped += int(np.count_nonzero(np.abs(numbers) > half))
            np.clip(numbers, -half, half, out=numbers)
        contribution = as_tensor(np.multiply(numbers, step, out=np.empty(value.shape, np.float32), casting="same_kind"))
        numbers += half
        return numbers.astype(ring.number_dtype), contribution

    def to_mean(self, kind: TensorKind, total: Array, key: Key, ring: Ring, num_summed: int) -> Tensor:
        """Return the mean, given the sums of the integers of `num_summed` clients. Update the range from the mean.

        Args:
            kind: the kind of tensor.
            total: the sums, after unmasking or decryption.
            key: the key of the exchange.
            ring: the encoding.
            num_summed: the number of clients that contributed.
        """
        steps = self._find_steps(kind, key, total.shape, ring)
        mean = ((total.astype(np.float64) - num_summed * _find_half(ring)) * steps / num_summed).astype(np.float32)
        self.update_range(kind, key, mean, ring, num_summed)
        return as_tensor(mean)

    def update_range(self, kind: TensorKind, key: Key, mean: NDArray[np.floating], ring: Ring, num_summed: int) -> None:
        """Derive the next range from an aggregate that all clients have."""
        if not (kind.has_column_ranges and len(mean)):
            return
        found = np.abs(mean).max(axis=0).astype(np.float64) * (HEADROOM[ring.bits] * num_summed)
        if (most := found.max()) > 0:  # otherwise the range does not change
            before = self.ranges.get((kind.name, key.layer))
            least = 0.0 if before is None else before.numpy() * RANGE_DECAY
            self.ranges[kind.name, key.layer] = as_tensor(np.maximum(np.maximum(found, most * SMALLEST), least))

    def list_ranges(self, kind: TensorKind) -> dict[int, Tensor]:
        """Return the ranges of a kind of tensor, by layer."""
        return {layer: found for (name, layer), found in self.ranges.items() if name == kind.name}

    def _find_scratch(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        if self._scratch is None or self._scratch.shape != tuple(shape):
            self._scratch = np.empty(tuple(shape))
        return self._scratch

    def _find_steps(self, kind: TensorKind, key: Key, shape: tuple[int, ...], ring: Ring) -> NDArray[np.float64]:
        known = self.ranges.get((kind.name, key.layer))
        if known is not None:
            found: NDArray[np.float64] = known.numpy() / _find_half(ring)
            return found
        return np.full(shape[1], self._find_first_range(kind, shape[0]) / _find_half(ring))

    def _find_first_range(self, kind: TensorKind, num_rows: int) -> float:
        """Return the range of a tensor if there was no aggregate before.

        A loss is a mean over rows, so the gradient at one row is smaller by the factor `num_rows`. If the gradient
        ranges of higher layers are already known, the largest of these ranges is used.
        """
        if not kind.has_column_ranges:
            return max(self.first_range, 1.0)
        if not kind.is_gradient:
            return self.first_range
        above = [float(found.max()) for found in self.list_ranges(kind).values()]
        return max(above, default=self.first_range / max(1, num_rows))


def _find_half(ring: Ring) -> int:
    """Return h: integers lie in -h..h."""
    return (ring.levels - 1) // 2


def _draw_uniform(secret: Secret, value: Tensor) -> NDArray[np.float64]:
    """Return a number in (0, 1) for every value, from the words of AES-CTR under a secret."""
    words = np.frombuffer(draw_stream(secret.value, 4 * value.numel()), "<u4")
    return ((words + 0.5) * 2.0**-32).reshape(tuple(value.shape))
