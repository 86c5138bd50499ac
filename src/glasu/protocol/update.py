"""Algorithms 4 and 7: LocalUpdate, one step on stale representations of the others; no message."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glasu.model.step import Step
from glasu.protocol.client import Batch, Client


def local_update(
    client: Client,
    batch: Batch,
    passes: Step,
    others: Mapping[int, Tensor],
    *,
    joint: Tensor | None = None,
    gradient: Tensor | None = None,
) -> float:
    """Descend the client's own loss with the others' parts constant, and return the loss before the step.

    A client without labels minimises <G, H_m[L]>, G being the label owner's gradient at H[L] from the joint inference.

    Args:
        client: who learns.
        batch: the round's nodes, blocks and features.
        passes: the passes of step q.
        others: {l+1: H_{-m}[l+1]}, fixed for the round.
        joint: H_m^{t,q}[L], where the passes have gone forward already: at step 0, in the joint inference.
        gradient: G, at a client without labels.
    """
    joint = local_forward(client, passes, others) if joint is None else joint
    passes.begin_back()
    if client.has_labels:
        value, gradient = client.back_from_loss(passes, joint, batch)
    else:
        assert gradient is not None
        value = client.finite((gradient * joint).sum().item(), batch.round)
    local_backward(client, passes, gradient)
    return value


def local_forward(client: Client, passes: Step, others: Mapping[int, Tensor]) -> Tensor:
    """Compute H_m^{t,q}[L] from the others' parts and the client's present weights."""
    hidden = passes.encode()
    for layer in range(client.config.model.num_layers):
        hidden = passes.layer(layer, hidden)  # H_m^{t,q,+}[l]
        if layer in client.model.aggregation_layers:
            hidden = client.aggregation.merge(others[layer + 1], client.release.clip(hidden))
    assert isinstance(hidden, Tensor)
    return hidden


def local_backward(client: Client, passes: Step, gradient: Tensor | None) -> None:
    """Go back from H_m^{t,q}[L] to the features, and change the weights."""
    for layer in reversed(range(client.config.model.num_layers)):
        assert gradient is not None
        if layer in client.model.aggregation_layers:
            gradient = client.aggregation.own_gradient(gradient)
        gradient = client.back(passes, layer, gradient)
    client.end_step(passes, gradient)
