"""The client column of a client that is absent from a round (party dropout): it contributes nothing and takes no step.

It still receives all answers. An absent label owner still computes the gradient at H[L], because the other clients have
no loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from glasu.protocol.backward import compute_owner_gradient, exchange_share
from glasu.protocol.chunks import exchange_rows
from glasu.protocol.label_owner import client_gradient
from glasu.protocol.messages import Joint, Partial
from glasu.protocol.requests import Script
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.aggregation import Aggregation
    from glasu.protocol.client import Client
    from glasu.protocol.learner import Batch


def client_absent_round(client: Client, batch: Batch, aggregation: Aggregation) -> Script[list[float]]:
    """Follow a round. Return the losses of a label owner; an empty list at other clients."""
    num_rows = {layer: len(batch.nodes[layer + 1]) for layer in client.config.model.aggregation_layers}
    joint = yield from await_inference(client, client.identity.key(Phase.TRAINING, batch.round), num_rows)
    if client.config.train.has_exact_gradients:
        return (yield from await_backward(client, batch, joint, aggregation))
    losses: list[float] = []
    if client.identity.owner is not None:
        losses, _ = yield from client_gradient(client, batch, joint)
    return losses


def await_inference(client: Client, key: Key, num_rows: Mapping[int, int]) -> Script[Tensor]:
    """Follow a joint inference; return H[L].

    Args:
        client: the client.
        key: phase and round.
        num_rows: |S[l+1]| for every aggregation layer l.
    """
    width = client.config.model.hidden * client.learner.aggregation.widening
    joints = []
    for layer, rows in num_rows.items():
        joints.append((yield from exchange_rows(client, key.at(layer), (Partial, Joint), None, (rows, width))))
    joint: Tensor = joints[-1]
    return joint


def await_backward(client: Client, batch: Batch, joint: Tensor, aggregation: Aggregation) -> Script[list[float]]:
    """Follow the exchange of exact gradients. A label owner still sends its gradient at H[L]."""
    losses: list[float] = []
    gradient: Tensor | None = None
    if client.identity.owner is not None:
        losses, gradient = compute_owner_gradient(client, batch, joint)
    for layer in reversed(client.config.model.aggregation_layers):
        own = client.identity.key(Phase.BACKWARD, batch.round, layer)
        yield from exchange_share(client, own, gradient, batch.nodes[layer + 1], aggregation)
        gradient = None
    return losses
