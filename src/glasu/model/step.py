"""One pass through the layers of a client: forward and, in training, backward.

A step only computes; the scripts of the protocol exchange tensors between the layers. There are three implementations:
`AutogradStep` works for any backbone, `fused.gcnii.FusedStep` is faster for gcnii, and `exact.ExactInference` is a
forward pass over all nodes without sampling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasu import registry
from glasu.model.blocks import Block
from glasu.model.dropout import Dropout
from glasu.model.layers import Hidden, take_rows
from glasu.model.optimizer import ALL, Optimizer
from glasu.model.split import ClientModel

ProgressEvent = TypeVar("ProgressEvent")


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of one client's layers in one round."""

    features: Hidden  # X_m[S_m[0]], scaled
    blocks: tuple[Block, ...]
    initial_rows: tuple[NDArray[np.int64], ...]  # for each layer l: the positions of S_m[l+1] in S_m[0]


class ForwardStep(ABC):
    """The forward pass: `encode`, then layers 0..L-1, then `logits`."""

    @abstractmethod
    def encode(self) -> Any:
        """Return H_m[0]: the features, or the output of the encoder. Pass it to `layer` 0."""

    @abstractmethod
    def layer_in_parts(
        self, layer: int, hidden: Any, report: Callable[[float], ProgressEvent]
    ) -> Generator[ProgressEvent, None, Tensor]:
        """Return H_m^+[l], given H_m[l]. During a long computation, yield `report(completed share)` now and then."""

    @abstractmethod
    def logits(self, joint: Tensor) -> Tensor:
        """Return the output of the classifier, given H_m[L]."""


class Step(ForwardStep):
    """A training step. Its backward pass consists of several calls.

    The order of the calls is `begin_backward`, `backward_classifier`, `backward_layer` for the layers L-1..0,
    `backward_encoder`.

    After the backward pass, the `pending` weights have gradients. The other weights are already updated.
    """

    pending: Sequence[slice] = ALL  # parts of the weight vector that the optimizer must still update

    def __init__(self, inputs: Inputs, dropout: Dropout) -> None:
        self.inputs, self.dropout = inputs, dropout
        self.partials: dict[int, Tensor] = {}  # H_m^+[l] as `layer` returned it; read-only

    def layer_in_parts(
        self, layer: int, hidden: Any, report: Callable[[float], ProgressEvent]
    ) -> Generator[ProgressEvent, None, Tensor]:
        yield from ()
        return self.layer(layer, hidden)

    @abstractmethod
    def layer(self, layer: int, hidden: Any) -> Tensor:
        """Return H_m^+[l], given H_m[l]."""

    @abstractmethod
    def begin_backward(self) -> None:
        """Discard the gradients of the previous step."""

    @abstractmethod
    def backward_classifier(self, gradient: Tensor) -> Tensor:
        """Return the gradient at H_m[L], given the gradient at the logits."""

    @abstractmethod
    def backward_layer(self, layer: int, gradient: Tensor) -> Tensor | None:
        """Return the gradient at H_m[l], given the gradient at H_m^+[l]; None if H_m[l] is the raw features."""

    @abstractmethod
    def backward_encoder(self, gradient: Tensor | None) -> None:
        """Finish the backward pass, given the gradient at H_m[0]. Weights do not change before this call."""


class AutogradStep(Step):
    """A step for any backbone. Each layer has its own autograd tape, so the backward pass can stop between layers."""

    def __init__(self, model: ClientModel, inputs: Inputs, dropout: Dropout, *, recording: bool = True) -> None:
        """Start a step.

        Args:
            model: the network.
            inputs: the inputs of the layers.
            dropout: the masks of this step.
            recording: whether a backward pass will follow.
        """
        super().__init__(inputs, dropout)
        self.model, self.recording = model, recording
        self._tapes: dict[int, tuple[Tensor | None, Tensor | None, Tensor]] = {}  # input, H_m^0 and output of layer l
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
            rows = take_rows(self._initial, self.inputs.initial_rows[layer])
            assert isinstance(rows, Tensor)
            initial = self._leaf(rows)
        with torch.set_grad_enabled(self.recording):
            made = self.model.sublayer(layer, hidden, initial, self.inputs.blocks[layer], self.dropout)
        return self._save(layer, leaf, initial, made)

    def logits(self, joint: Tensor) -> Tensor:
        leaf = self._leaf(joint)
        with torch.set_grad_enabled(self.recording):
            made = self.model.classify(leaf, self.dropout)
        return self._save(len(self.model.layers), leaf, None, made)

    def begin_backward(self) -> None:
        self.model.zero_grad(set_to_none=False)  # gradients must stay views of one vector

    def backward_classifier(self, gradient: Tensor) -> Tensor:
        found = self.backward_layer(len(self.model.layers), gradient)
        assert found is not None
        return found

    def backward_layer(self, layer: int, gradient: Tensor) -> Tensor | None:
        leaf, initial, made = self._tapes.pop(layer)
        if made.requires_grad:  # False for a first layer without weights
            made.backward(gradient)  # type: ignore[no-untyped-call]
        if initial is not None and initial.grad is not None:
            rows = torch.from_numpy(self.inputs.initial_rows[layer])
            self._initial_gradient.index_add_(0, rows, initial.grad)
        return None if leaf is None else leaf.grad

    def backward_encoder(self, gradient: Tensor | None) -> None:
        if self._encoded is not None:
            assert gradient is not None
            self._encoded.backward(self._initial_gradient.add_(gradient))  # type: ignore[no-untyped-call]

    def _leaf(self, hidden: Tensor) -> Tensor:
        return hidden.detach().requires_grad_(self.recording)

    def _save(self, layer: int, leaf: Tensor | None, initial: Tensor | None, made: Tensor) -> Tensor:
        if self.recording:
            self._tapes[layer] = leaf, initial, made
        self.partials[layer] = made.detach()
        return self.partials[layer]


StepMaker = Callable[[Inputs, Dropout], Step]


class Steps:
    """Makes the steps of one client: fused steps if the backbone supports them for this model, else autograd steps."""

    def __init__(self, model: ClientModel, optimizer: Optimizer) -> None:
        self.model = model
        self._fused: StepMaker | None = None
        if target := model.backbone.fused_step:
            self._fused = registry.import_attribute(target, "the fused step")(model, optimizer)

    def make(self, inputs: Inputs, dropout: Dropout, *, recording: bool = True) -> Step:
        """Return a step; pass `recording=False` if no backward pass will follow."""
        # A fused step multiplies sparse blocks only. If a block has a dense copy, an autograd step is faster.
        if self._fused is not None and all(block.dense is None for block in inputs.blocks):
            return self._fused(inputs, dropout)
        return AutogradStep(self.model, inputs, dropout, recording=recording)
