"""The kinds of tensors in messages, and what the gate and the roles need to know about each kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class TensorKind:
    """A kind of tensor. The protocol asks its properties; the name is for ledgers, files, noise and errors."""

    name: str
    protected_as: TensorKind | None = None  # the kind whose clip and noise protect this one; None: its own
    is_change: bool = False  # whether the values are relative to a reference (`glasu.privacy.feedback`)
    starts_reference: bool = False  # whether later releases of the same rows can be changes of this one
    is_differentiated: bool = False  # whether local updates differentiate through the clip of a release
    is_gradient: bool = False  # a derivative of a mean over rows; small values matter, and more rows make them smaller
    is_score: bool = False  # a prediction of a party; the server checks it, and noisy scores are repaired
    has_column_ranges: bool = True  # whether, in hidden sums, the last aggregate decides the range of each column

    def __str__(self) -> str:
        return self.name

    @property
    def protecting_kind(self) -> TensorKind:
        """The kind whose clip and noise protect this one."""
        return self if self.protected_as is None else self.protected_as


REPRESENTATION = TensorKind("representation", starts_reference=True, is_differentiated=True)
CHANGE = TensorKind("change", protected_as=REPRESENTATION, is_change=True)
GRADIENT = TensorKind("gradient", is_gradient=True)
# A class that was unlikely at all nodes can become likely, so the range does not follow from the last aggregate.
PROBABILITIES = TensorKind("probabilities", is_score=True, has_column_ranges=False)
# The gradient of the only party with labels, encrypted for the others. The ledger records it as a gradient.
OWNER_GRADIENT = TensorKind("owner gradient", protected_as=GRADIENT, is_gradient=True)
TENSOR_KINDS = {kind.name: kind for kind in (REPRESENTATION, CHANGE, GRADIENT, PROBABILITIES, OWNER_GRADIENT)}
