"""The kinds of tensors in messages, and the properties of each kind that `Release` and the roles read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class TensorKind:
    """A kind of tensor. The protocol reads its properties. The name is used in ledgers, files, noise and errors."""

    name: str
    protected_as: TensorKind | None = None  # the kind whose clip and noise also apply to this kind; None: this kind
    is_change: bool = False  # whether the values are differences from a reference (`glasu.privacy.feedback`)
    starts_reference: bool = False  # whether a release of this kind becomes the reference of later changes
    is_differentiated: bool = False  # whether local updates differentiate through the clip of a release
    is_gradient: bool = False  # a gradient of a mean over rows: its values are small if there are many rows
    is_score: bool = False  # a prediction of a party; the server checks it, and the party repairs it after adding noise
    has_column_ranges: bool = True  # whether the last aggregate determines the column ranges (`column_grids.py`)

    def __str__(self) -> str:
        return self.name

    @property
    def protecting_kind(self) -> TensorKind:
        """The kind whose clip and noise apply to this kind."""
        return self if self.protected_as is None else self.protected_as


REPRESENTATION = TensorKind("representation", starts_reference=True, is_differentiated=True)
CHANGE = TensorKind("change", protected_as=REPRESENTATION, is_change=True)
GRADIENT = TensorKind("gradient", is_gradient=True)
# A class can be unlikely at all nodes now and likely later, so the last aggregate does not determine the range.
PROBABILITIES = TensorKind("probabilities", is_score=True, has_column_ranges=False)
# The gradient from the label owner, encrypted for the other parties. The ledger records it as a gradient.
OWNER_GRADIENT = TensorKind("owner gradient", protected_as=GRADIENT, is_gradient=True)
TENSOR_KINDS = {kind.name: kind for kind in (REPRESENTATION, CHANGE, GRADIENT, PROBABILITIES, OWNER_GRADIENT)}
