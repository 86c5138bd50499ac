"""The exact gradient (`backward = "joint"`): back-propagation through the server, layer by layer.

The loss is the sum of the clients' losses. At each aggregation layer the server adds the clients' gradients at H[l+1]
and returns to every client its share at H_m^+[l]: 1/M of the sum (mean), or its columns (concat).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from glasu.protocol.chunks import answer_rows, exchange_rows
from glasu.protocol.fields import Array
from glasu.protocol.inference import client_inference
from glasu.protocol.messages import Gradient, JointGradient, Waiting
from glasu.protocol.requests import Scatter, Script
from glasu.protocol.update import check_loss, walk_backward
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
        return (yield from share_gradient(client, own, gradient, step.partials[layer]))

    yield from walk_backward(client, step, gradient, exchange_gradient)
    return losses


def share_gradient(client: Client, key: Key, gradient: Tensor | None, like: Tensor) -> Script[Tensor]:
    """Send a gradient, or wait without one; return the server's answer, which has the shape of `like`."""
    sent = None if gradient is None else client.release.tensor("gradient", gradient, key)
    shape = len(like), like.shape[1]
    return (yield from exchange_rows(client, key, (Gradient, JointGradient), sent, shape))


def server_backward(server: Server, key: Key, rows: Mapping[int, int]) -> Script[None]:
    """Server column: add the gradients in client order and send every client its share.

    Args:
        server: the server.
        key: phase and round.
        rows: |S[l+1]| for every aggregation layer l.
    """

    encoding = server.shapes.encodings["gradient"]

    def respond(gradients: list[Array], answer: Key, first_row: int) -> Scatter:
        # Stochastic rounding is drawn from the key of the message, so every client gets a share with its own rounding.
        keys = server.keys_to_each(answer)
        shares = server.aggregation.combine_gradients(encoding, gradients, keys, first_row)
        return Scatter(tuple(JointGradient(own, share) for own, share in zip(keys, shares, strict=True)))

    for layer in reversed(server.aggregation_layers):
        # At the last layer only the label owner has a gradient; the others wait for their share.
        at_loss = server.identity.owner >= 0 and layer == server.aggregation_layers[-1]
        kinds = (Gradient, Waiting) if at_loss else (Gradient,)
        yield from answer_rows(server, kinds, key.at(layer), respond, rows[layer])
