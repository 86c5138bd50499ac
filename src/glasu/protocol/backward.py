"""The exact gradient (`backward = "joint"`): back-propagation through the server, layer by layer.

The loss is the sum of the clients' losses. At each aggregation layer the server adds the clients' gradients at H[l+1]
and returns to every client its share at H_m^+[l]: 1/M of the sum (mean), or its columns (concat).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from glasu.protocol.chunks import answer_rows, exchange_rows
from glasu.protocol.inference import client_inference
from glasu.protocol.messages import Gradient, JointGradient
from glasu.protocol.requests import Scatter, Script
from glasu.protocol.update import check_loss, walk_backward
from glasu.wire.encodings import Array
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.sampler import Sample
    from glasu.protocol.client import Client
    from glasu.protocol.learner import Batch
    from glasu.protocol.server import Server


def client_joint_round(client: Client, batch: Batch, upcoming: Sample | None) -> Script[list[float]]:
    """Client column: JointInference, the walk back with an exchange at each aggregation layer, then the step."""
    key = client.identity.key(Phase.TRAINING, batch.round)
    step = client.learner.step(batch, 0)
    joint, _ = yield from client_inference(client, step, key, upcoming)
    step.begin_backward()
    losses: list[float] = []
    gradient: Tensor | None = None
    if client.has_labels:
        loss, gradient = client.learner.loss_and_gradient(step, joint, batch)
        losses = [check_loss(client, loss, batch.round)]

    def exchange_gradient(layer: int, gradient: Tensor | None) -> Script[Tensor]:
        own = client.identity.key(Phase.BACKWARD, batch.round, layer)
        return (yield from share_gradient(client, own, gradient, len(step.partials[layer])))

    yield from walk_backward(client, step, gradient, exchange_gradient)
    return losses


def await_backward(client: Client, batch: Batch, joint: Tensor, num_rows: Mapping[int, int]) -> Script[list[float]]:
    """Client column of an absent client: take no step. A label owner still sends its gradient at H[L]."""
    losses: list[float] = []
    gradient: Tensor | None = None
    if client.identity.owner >= 0:
        losses, gradient = owner_gradient(client, batch, joint)
    for layer in reversed(client.config.model.aggregation_layers):
        yield from share_gradient(
            client, client.identity.key(Phase.BACKWARD, batch.round, layer), gradient, num_rows[layer]
        )
        gradient = None
    return losses


def owner_gradient(client: Client, batch: Batch, joint: Tensor) -> tuple[list[float], Tensor | None]:
    """Return the loss of the label owner at step 0 and its gradient at H[L]; nothing at the other clients."""
    if not client.has_labels:
        return [], None
    loss, gradient = client.learner.loss_and_gradient(client.learner.step(batch, 0), joint, batch)
    return [check_loss(client, loss, batch.round)], gradient


def share_gradient(client: Client, key: Key, gradient: Tensor | None, rows: int, widening: int = 1) -> Script[Tensor]:
    """Send a gradient, or wait without one; return the server's answer.

    Args:
        client: the client.
        key: of the exchange.
        gradient: None at a client that has none.
        rows: of the answer.
        widening: the width of the answer, in multiples of the width of a partial.
    """
    sent = None if gradient is None else client.release.tensor("gradient", gradient, key)
    shape = rows, client.config.model.hidden * widening
    return (yield from exchange_rows(client, key, (Gradient, JointGradient), sent, shape))


def server_backward(
    server: Server, key: Key, rows: Mapping[int, int], present: Sequence[int] | None = None
) -> Script[None]:
    """Server column: add the gradients in client order and send every client its share.

    Args:
        server: the server.
        key: phase and round.
        rows: |S[l+1]| for every aggregation layer l.
        present: the clients that contribute, if not all.
    """
    encoding, aggregation = server.shapes.encodings["gradient"], server.aggregation_among(present)

    def respond(gradients: list[Array], answer: Key, first_row: int) -> Scatter:
        # Stochastic rounding is drawn from the key of the message, so every client gets a share with its own rounding.
        keys = server.keys_to_each(answer)
        shares = aggregation.combine_gradients(encoding, gradients, keys, first_row)
        return Scatter(tuple(JointGradient(own, share) for own, share in zip(keys, shares, strict=True)))

    for layer in reversed(server.aggregation_layers):
        # At the last layer only the label owner has a gradient; the others wait for their share.
        at_loss = server.identity.owner >= 0 and layer == server.aggregation_layers[-1]
        senders = (server.identity.owner,) if at_loss else present
        yield from answer_rows(server, Gradient, key.at(layer), respond, rows[layer], senders)
