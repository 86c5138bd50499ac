"""Algorithms 4 and 7: LocalUpdate, one step on stale representations of the others; no message."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glasu.model.split import Dropout
from glasu.protocol.actor import Batch, Client


def local_update(
    client: Client,
    batch: Batch,
    step: int,
    others: Mapping[int, Tensor],
    gradient: Tensor | None = None,
    hidden: Tensor | None = None,
) -> float:
    """Descend the client's own loss with the others' parts constant, and return the loss before the step.

    A client without labels minimises <G, H_m[L]>, G being the label owner's gradient at H[L] from the joint inference.

    Args:
        client: who learns.
        batch: the round's nodes, blocks and features.
        step: q.
        others: {l+1: H_{-m}[l+1]}, fixed for the round.
        gradient: G, at a client without labels.
        hidden: H_m[L] with its graph, where the joint inference left it for step 0.
    """
    dropout = client.dropout(batch.round, step)
    hidden = local_forward(client, batch, dropout, others) if hidden is None else hidden
    loss = local_loss(client, batch, dropout, hidden, gradient)
    value = client.finite(loss, batch.round)
    client.optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    client.optimizer.step()
    return value


def local_forward(client: Client, batch: Batch, dropout: Dropout, others: Mapping[int, Tensor]) -> Tensor:
    """Compute H_m^{t,q}[L] from the others' parts and the client's present weights."""
    hidden, initial = client.model.encode(batch.features, dropout)
    at_rows = batch.initial_at(initial)
    for layer, block in enumerate(batch.blocks):
        partial = client.model.sublayer(layer, hidden, at_rows[layer], block, dropout)  # H_m^{t,q,+}[l]
        if layer in client.model.aggregation_layers:
            hidden = client.aggregation.merge(others[layer + 1], client.release.clip(partial))
        else:
            hidden = partial
    assert isinstance(hidden, Tensor)
    return hidden


def local_loss(client: Client, batch: Batch, dropout: Dropout, hidden: Tensor, gradient: Tensor | None) -> Tensor:
    """Compute L_m^{t,q} at H_m^{t,q}[L], differentiable in the client's weights."""
    if client.has_labels:
        assert batch.labels is not None
        return client.loss(client.model.classify(hidden, dropout), batch.labels)
    assert gradient is not None
    return (gradient * hidden).sum()
