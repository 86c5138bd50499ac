"""Algorithms 4 and 7: LocalUpdate, one step with stale representations of the other clients. It sends no message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from glasu.errors import TrainingError
from glasu.protocol.passes import walk_backward, walk_forward
from glasu.protocol.requests import Script

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.aggregation import Aggregation
    from glasu.model.step import Step
    from glasu.protocol.client import Client
    from glasu.protocol.learner import Batch


@dataclass(frozen=True, eq=False)
class Others:
    """The other clients' contribution to the objective of a client's local steps. It is constant during a round."""

    aggregation: Aggregation  # the aggregation over the clients that are present in the round
    parts: Mapping[int, Tensor]  # {l+1: H_{-m}[l+1]}
    gradient: Tensor | None = None  # G, at a client without labels
    constants: Mapping[int, Tensor] = field(default_factory=dict)  # {l: C_m[l]}; with exact gradients, these replace G

    def find_share(self, layer: int, gradient: Tensor | None) -> Tensor:
        """Return the gradient at H_m^+[l], given the gradient of the client's own objective at H_m[l+1], or None."""
        if gradient is None:
            return self.constants[layer]
        own = self.aggregation.own_gradient(gradient)
        return own + self.constants[layer] if self.constants else own


def local_update(
    client: Client, batch: Batch, step: Step, others: Others | None, joint: Tensor | None = None
) -> Script[float]:
    """Take one step on the client's own loss, with the other clients' parts constant; return the loss before the step.

    A client without labels minimises <G, H_m[L]>, where G is the label owner's gradient at H[L] from JointInference.
    With exact gradients (`backward.py`), the losses of the other clients add the linear terms <C_m[l], H_m^+[l]>.

    Args:
        client: the client.
        batch: the round's blocks, features and labels.
        step: local step q.
        others: the parts of the other clients; None: the client is alone, and H_m[l+1] = H_m^+[l].
        joint: H_m^{t,q}[L], if it is known: step 0 can reuse the forward pass of JointInference.
    """
    learner = client.learner
    gradient = None if others is None else others.gradient

    def merge(layer: int, partial: Tensor) -> Script[Tensor]:
        yield from ()
        own = client.release.clip(partial)
        return own if others is None else others.aggregation.merge(others.parts[layer + 1], own)

    def own_share(layer: int, gradient: Tensor | None) -> Script[Tensor]:
        yield from ()
        if others is not None:
            return others.find_share(layer, gradient)
        assert gradient is not None  # a client without labels is never alone
        return gradient

    if joint is None:
        joint = yield from walk_forward(client, step, merge)
    step.begin_backward()
    if client.has_labels:
        value, gradient = learner.loss_and_gradient(step, joint, batch)
    elif gradient is not None:
        value = (gradient * joint).sum().item()
    else:
        assert others is not None
        value = sum((constant * step.partials[layer]).sum().item() for layer, constant in others.constants.items())
    check_loss(client, value, batch.round)
    yield from walk_backward(client, step, gradient, own_share)
    return value


def check_loss(client: Client, value: float, round_index: int) -> float:
    """Return the loss; raise TrainingError if it is not finite, except in a race."""
    if not math.isfinite(value) and not client.progress.mark_divergence():
        when = f"round {round_index}" if round_index >= 0 else f"warm start, {-round_index} steps before round 0"
        raise TrainingError(
            f"party {client.name!r}, {when}: the loss is {value}; training diverged. Lower train.learning_rate."
        )
    return value
