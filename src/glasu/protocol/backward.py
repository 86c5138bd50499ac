"""The exact gradient: back-propagation through the server, layer by layer (`backward = "joint"`).

The loss is the sum of the clients' losses. At each aggregation layer the server adds the clients' gradients at H[l+1]
and returns what falls on each client's H_m^+[l]: 1/M of the sum (mean), or its columns (concat).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from glasu.keys import Phase
from glasu.protocol.messages import Exchange, Gradient, Joint, JointGradient, Partial, Script, Waiting, exchange

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.protocol.actor import Batch, Client
    from glasu.protocol.server import Server


def client_joint_round(client: Client, batch: Batch) -> Exchange[list[float]]:
    """Client column: forward with the graph kept, then one backward segment per aggregation layer, then the step."""
    dropout = client.dropout(batch.round, 0)
    initial_source, initial = client.open_encoder(batch, dropout)
    hidden = batch.features if initial is None else initial
    at_rows = batch.initial_at(initial)
    segments: list[tuple[int, Tensor, Tensor]] = []  # (l, own clipped partial, H[l+1] as a leaf)
    for layer in range(client.config.model.num_layers):
        partial = client.partial(layer, hidden, at_rows[layer], batch, dropout, opened=True)
        if layer in client.model.aggregation_layers:
            key = client.key(Phase.TRAINING, batch.round, layer)
            clipped = client.release.clip(partial)
            sent = client.release.tensor("representation", partial, key)
            answer = yield from exchange(Partial(key=key, value=sent.payload, losses=client.take_losses(key)), Joint)
            hidden = client.read("representation", answer, client.joint_shape(partial)).clone().requires_grad_()
            segments.append((layer, clipped, hidden))
        else:
            hidden = partial
    client.optimizer.zero_grad(set_to_none=True)
    losses = client.backward_from_loss(cast("Tensor", hidden), batch, dropout)
    for layer, clipped, joint in reversed(segments):
        key = client.key(Phase.BACKWARD, batch.round, layer)
        if joint.grad is None:  # H[L] at a client without labels
            reply = yield from exchange(Waiting(key=key), JointGradient)
        else:
            sent = client.release.tensor("gradient", joint.grad, key)
            reply = yield from exchange(Gradient(key=key, value=sent.payload), JointGradient)
        share = client.read("gradient", reply, (len(clipped), clipped.shape[1]))
        with client.watch.measure("compute"):
            clipped.backward(share)  # type: ignore[no-untyped-call]
    with client.watch.measure("compute"):
        if initial_source is not None and initial is not None:
            initial_source.backward(initial.grad)  # type: ignore[no-untyped-call]
        client.optimizer.step()
    return losses


def server_backward(server: Server, round_index: int) -> Script:
    """Server column: add the gradients in client order and send each client its share."""
    for layer in reversed(server.layers):
        messages = yield from server.receive((Gradient, Waiting), Phase.BACKWARD, round_index, layer)
        server.answer_each(JointGradient, server.backpropagated(messages))
