"""Error feedback: the repeated release of a row sends only the change since the last release, in a few bits per value.

Client m keeps the reference R_m: the values of its rows that its peers have decoded so far. It sends integers n_m. The
server adds the clients' integers, and every client updates its copy of H[l+1], the mean of all references:

    n_m = round((H_m^+[l] - R_m) / step), clamped;    R_m += step n_m;    H[l+1] += step (n_1 + ... + n_M) / M

The error of rounding and clamping stays in H_m^+[l] - R_m, so it is part of the next change. Every column has its own
step, which is a function of the last joint change. The step shrinks with the changes, and it grows if most integers are
at their bound. It is computed from sums of integers, which every client receives, with elementary floating-point
operations. So all clients have the same bits on any machine.

The first release of the rows has the encoding of `wire.precision` and becomes the first reference. If that encoding
rounds, the rounding error of the first aggregate remains in H[l+1], because all changes are relative to this aggregate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glasu.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.wire.integers import Integers

# The range of a grid is LOADING * `bits` * the mean absolute change. This is nearly optimal for normally distributed
# changes.
LOADING = 0.8
SHRINK, GROW = 0.25, 4.0  # limits on the ratio of one step to the step before
FINEST = 2.0**-4  # the smallest step of a column, relative to the largest step of its layer


@dataclass(frozen=True, eq=False)
class Reference:
    """The values of one layer's rows that all readers know, in one phase."""

    own: Tensor  # R_m
    joint: Tensor  # H[l+1]: the mean of R_1, ..., R_M
    step: Tensor  # step of the next change, one per column, in double precision
    clamped: int = 0  # number of this client's values outside the grid so far; it is never sent


def start_reference(own: Tensor, joint: Tensor, integers: Integers) -> Reference:
    """Return the reference after the first release of rows. Its step allows changes as large as the values."""
    return Reference(own, joint, as_tensor(_find_first_step(joint.numpy(), integers)))


def find_change(reference: Reference, value: Tensor, integers: Integers) -> tuple[NDArray[np.int64], Reference]:
    """Return the integers to send, and the reference with the new `own`. `apply_change` later updates `joint`.

    Args:
        reference: the reference before the release.
        value: H_m^+[l].
        integers: the encoding of changes.
    """
    step = reference.step.numpy()
    exact = np.rint((value.numpy() - reference.own.numpy().astype(np.float64)) / step)
    if not np.isfinite(exact).all():
        raise TrainingError("a value to send is not a finite number; training diverged. Lower train.learning_rate.")
    numbers = np.clip(exact, -integers.largest, integers.largest)
    own = _add_rounded(reference.own, step * numbers)
    clamped = reference.clamped + int(np.count_nonzero(exact != numbers))
    return numbers.astype(np.int64), Reference(own, reference.joint, reference.step, clamped)


def apply_change(reference: Reference, total: NDArray[np.int64], integers: Integers) -> Reference:
    """Return the reference after the joint change, given the sums of the clients' integers."""
    step = reference.step.numpy()
    joint = _add_rounded(reference.joint, step * total / integers.num_clients)
    following = as_tensor(_find_next_step(step, total, integers))
    return Reference(reference.own, joint, following, reference.clamped)


def _find_first_step(joint: NDArray[np.floating], integers: Integers) -> NDArray[np.float64]:
    if not len(joint):
        return np.ones(joint.shape[1])
    largest = np.abs(joint).max(axis=0).astype(np.float64)
    return _limit_ratio(largest * (integers.bits / 2) / integers.largest)


def _find_next_step(step: NDArray[np.float64], total: NDArray[np.int64], integers: Integers) -> NDArray[np.float64]:
    """Return the step for changes as large as the last ones, assuming that the clients' changes are independent."""
    if not len(total):
        return step
    mean = np.abs(total).sum(axis=0) / len(total)
    wanted = mean * (LOADING * integers.bits) / (integers.largest * np.sqrt(np.float64(integers.num_clients)))
    return _limit_ratio(step * np.clip(wanted, SHRINK, GROW))


def _limit_ratio(step: NDArray[np.float64]) -> NDArray[np.float64]:
    """Raise steps below FINEST times the largest step to this limit, so that a constant column can change again."""
    most = step.max()
    limited: NDArray[np.float64] = np.maximum(step, most * FINEST if most > 0 else 1.0)
    return limited


def _add_rounded(values: Tensor, by: NDArray[np.float64]) -> Tensor:
    """Return the sum, rounded once to the precision of the values."""
    return as_tensor((values.numpy() + by).astype(values.numpy().dtype))


def as_tensor(values: NDArray[Any]) -> Tensor:
    """Return an array as a tensor."""
    import torch  # not at the top: the server imports this module, and it has no torch

    return torch.from_numpy(values)
