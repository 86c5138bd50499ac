"""The passes of one step through a client's layers, forward and back; what happens between layers is the protocol's.

`AutogradStep` has torch derive every layer's gradient, for any backbone; `glasu.model.fused.gcnii` has gcnii's written
out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasu.model.blocks import Block
from glasu.model.dropout import Dropout
from glasu.model.layers import Hidden, rows_of
from glasu.model.optimizer import ALL
from glasu.model.split import ClientModel


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the layers of one client read in one round."""

    features: Hidden  # X_m[S_m[0]], scaled
    blocks: tuple[Block, ...]
    initial_rows: tuple[NDArray[np.int64], ...]  # per layer: where S_m[l+1] stands in S_m[0]


class Step(ABC):
    """Forward: `encode`, `layer` 0..L-1, `logits`. Back: `back_from_logits`, `back` L-1..0, `back_to_features`.

    `begin_back` first. Going back leaves the gradients of the `pending` weights; the others have changed by theirs.
    """

    pending: Sequence[slice] = ALL  # the weights that going back has not changed yet, in the vector of all

    def __init__(self, inputs: Inputs, dropout: Dropout) -> None:
        self.inputs, self.dropout = inputs, dropout
        self.partials: dict[int, Tensor] = {}  # H_m^+[l] as `layer` returned it; not to be changed

    @abstractmethod
    def encode(self) -> Hidden:
        """Return H_m[0]: the features, or what gcnii's encoder makes of them."""

    @abstractmethod
    def layer(self, layer: int, hidden: Hidden) -> Tensor:
        """Return H_m^+[l], given H_m[l]."""

    @abstractmethod
    def logits(self, joint: Tensor) -> Tensor:
        """Return what the classifier makes of H_m[L]."""

    @abstractmethod
    def begin_back(self) -> None:
        """Forget the gradients of the step before."""

    @abstractmethod
    def back_from_logits(self, gradient: Tensor) -> Tensor:
        """Return the gradient at H_m[L], given that at the logits."""

    @abstractmethod
    def back(self, layer: int, gradient: Tensor) -> Tensor | None:
        """Return the gradient at H_m[l], given that at H_m^+[l]; None where H_m[0] is the features."""

    @abstractmethod
    def back_to_features(self, gradient: Tensor | None) -> None:
        """Go back through the encoder, given the gradient at H_m[0]; whatever of the weights changes, changes now."""


class AutogradStep(Step):
    """Any backbone: each layer is a tape of its own, so that `back` can stop between any two."""

    def __init__(self, model: ClientModel, inputs: Inputs, dropout: Dropout, *, recording: bool = True) -> None:
        super().__init__(inputs, dropout)
        self.model, self.recording = model, recording
        self._tapes: dict[int, tuple[Tensor | None, Tensor | None, Tensor]] = {}  # what layer l read and made
        self._encoded: Tensor | None = None
        self._initial = self._initial_gradient = torch.empty(0)

    def encode(self) -> Hidden:
        with torch.set_grad_enabled(self.recording):
            hidden, self._encoded = self.model.encode(self.inputs.features, self.dropout)
        if self._encoded is None:
            return hidden
        self._initial = self._encoded.detach()
        if self.recording:
            self._initial_gradient = torch.zeros_like(self._initial)
        return self._initial

    def layer(self, layer: int, hidden: Hidden) -> Tensor:
        leaf, initial = None, None
        if isinstance(hidden, Tensor) and (layer > 0 or self._encoded is not None):
            leaf = hidden = self._leaf(hidden)
        if self._encoded is not None:
            rows = rows_of(self._initial, self.inputs.initial_rows[layer])
            assert isinstance(rows, Tensor)
            initial = self._leaf(rows)
        with torch.set_grad_enabled(self.recording):
            made = self.model.sublayer(layer, hidden, initial, self.inputs.blocks[layer], self.dropout)
        return self._kept(layer, leaf, initial, made)

    def logits(self, joint: Tensor) -> Tensor:
        leaf = self._leaf(joint)
        with torch.set_grad_enabled(self.recording):
            made = self.model.classify(leaf, self.dropout)
        return self._kept(len(self.model.layers), leaf, None, made)

    def begin_back(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def back_from_logits(self, gradient: Tensor) -> Tensor:
        found = self.back(len(self.model.layers), gradient)
        assert found is not None
        return found

    def back(self, layer: int, gradient: Tensor) -> Tensor | None:
        leaf, initial, made = self._tapes.pop(layer)
        if made.requires_grad:  # a first layer without weights to learn has no tape
            made.backward(gradient)  # type: ignore[no-untyped-call]
        if initial is not None and initial.grad is not None:
            rows = torch.from_numpy(self.inputs.initial_rows[layer])
            self._initial_gradient.index_add_(0, rows, initial.grad)
        return None if leaf is None else leaf.grad

    def back_to_features(self, gradient: Tensor | None) -> None:
        if self._encoded is not None:
            assert gradient is not None
            self._encoded.backward(self._initial_gradient.add_(gradient))  # type: ignore[no-untyped-call]

    def _leaf(self, hidden: Tensor) -> Tensor:
        return hidden.detach().requires_grad_(self.recording)

    def _kept(self, layer: int, leaf: Tensor | None, initial: Tensor | None, made: Tensor) -> Tensor:
        if self.recording:
            self._tapes[layer] = leaf, initial, made
        self.partials[layer] = made.detach()
        return self.partials[layer]
