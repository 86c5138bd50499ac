"""The exact gradient: back-propagation through the server, layer by layer (`backward = "joint"`).

The loss is the sum of the clients' losses. At each aggregation layer the server adds the clients' gradients at H[l+1]
and returns what falls on each client's H_m^+[l]: 1/M of the sum (mean), or its columns (concat).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasu.protocol.chunks import answer_rows, exchange_rows
from glasu.protocol.inference import client_inference
from glasu.protocol.messages import Exchange, Gradient, JointGradient, Message, Script, Waiting
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from glasu.protocol.client import Batch, Client
    from glasu.protocol.server import Server


def client_joint_round(client: Client, batch: Batch) -> Exchange[list[float]]:
    """Client column: the joint inference, the way back with an exchange at each aggregation layer, then the step."""
    passes = client.passes(batch, 0)
    joint, _ = yield from client_inference(client, passes, batch.round)
    passes.begin_back()
    losses: list[float] = []
    gradient: Tensor | None = None
    if client.has_labels:
        loss, gradient = client.back_from_loss(passes, joint, batch)
        losses = [loss]
    for layer in reversed(range(client.config.model.num_layers)):
        if layer in client.model.aggregation_layers:
            gradient = yield from _joint_gradient(client, batch, layer, passes.partials[layer], gradient)
        assert gradient is not None
        gradient = client.back(passes, layer, gradient)
    client.end_step(passes, gradient)
    return losses


def _joint_gradient(
    client: Client, batch: Batch, layer: int, partial: Tensor, gradient: Tensor | None
) -> Exchange[Tensor]:
    """Send the gradient at H[l+1], and return what falls on the own H_m^+[l] of all clients' gradients there."""
    key = client.key(Phase.BACKWARD, batch.round, layer)
    message: Message
    if gradient is None:  # of H[L], at a client without labels
        message = Waiting(key=key)
    else:
        message = Gradient(key=key, value=client.release.tensor("gradient", gradient, key).payload)
    rows, columns = partial.shape
    answers = yield from exchange_rows(message, rows, JointGradient)
    return client.read_rows("gradient", answers, (rows, columns))


def server_backward(server: Server, round_index: int) -> Script:
    """Server column: add the gradients in client order and send each client its share."""

    def respond(messages: Sequence[Message]) -> None:
        if owners:
            server.owners_gradient(messages)
        server.answer_each(JointGradient, server.backpropagated(messages))

    for layer in reversed(server.layers):
        owners = server.owner >= 0 and layer == server.layers[-1]  # the loss is the owner's, the others wait for it
        kinds = (Gradient, Waiting) if owners else (Gradient,)
        yield from answer_rows(server, kinds, Phase.BACKWARD, round_index, layer, respond, server.rows[layer])
