"""The exact gradient (`backward = "joint"`): back-propagation through the server, layer by layer.

The loss is the sum of the clients' losses. At each aggregation layer the server adds the clients' gradients at H[l+1]
and returns to every client its share at H_m^+[l]: 1/M of the sum (mean), or its columns (concat).

With Q > 1, the first local step uses this gradient. The later steps send no message. They minimise the client's own
loss plus linear terms that stand for the losses of the other clients:

    L_m + sum over l in I of <C_m[l], H_m^+[l]>,   C_m[l] = the share that m received minus m's own contribution

At step 0 the gradient of this objective is the exact gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from glasu.protocol.chunks import Chunk, exchange_rows, receive_chunk
from glasu.protocol.inference import client_inference
from glasu.protocol.masked import client_sealed_gradient, server_sealed_gradient
from glasu.protocol.messages import Gradient, JointGradient
from glasu.protocol.passes import walk_backward
from glasu.protocol.requests import Scatter, Script
from glasu.protocol.update import Others, check_loss, local_update
from glasu.wire.message_key import Key, Phase
from glasu.wire.tensor_kinds import GRADIENT

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.aggregation import Aggregation
    from glasu.model.blocks import NodeSet
    from glasu.privacy.release import Sent
    from glasu.protocol.client import Client
    from glasu.protocol.learner import Batch
    from glasu.protocol.server import Server


def client_joint_round(client: Client, batch: Batch, aggregation: Aggregation) -> Script[list[float]]:
    """Client column: JointInference, a backward pass with one exchange per aggregation layer, then later local steps.

    Args:
        client: the client.
        batch: the round's blocks, features and labels.
        aggregation: the aggregation over the clients that are present in the round.

    Returns:
        The losses; an empty list at a client without labels.
    """
    key, later_steps = client.identity.key(Phase.TRAINING, batch.round), range(1, client.config.train.num_local_steps)
    step = client.learner.step(batch, 0)
    joint, parts = yield from client_inference(client, step, key, batch.nodes, aggregation)
    constants: dict[int, Tensor] = {}  # {l: C_m[l]}
    step.begin_backward()
    losses: list[float] = []
    gradient: Tensor | None = None
    if client.has_labels:
        loss, gradient = client.learner.loss_and_gradient(step, joint, batch)
        losses = [check_loss(client, loss, batch.round)]

    def receive_share(layer: int, gradient: Tensor | None) -> Script[Tensor]:
        own = client.identity.key(Phase.BACKWARD, batch.round, layer)
        share, sent = yield from exchange_share(client, own, gradient, batch.nodes[layer + 1], aggregation)
        if later_steps:
            constants[layer] = share if sent is None else share - aggregation.own_gradient(sent.value)
        return share

    yield from walk_backward(client, step, gradient, receive_share)
    others = Others(aggregation, parts, constants=constants)
    for _ in later_steps:
        step = client.learner.step(batch, 0)  # C_m[l] was computed with the dropout masks of step 0
        losses.append((yield from local_update(client, batch, step, others)))
    return losses if client.has_labels else []


def exchange_share(
    client: Client, key: Key, gradient: Tensor | None, nodes: NodeSet, aggregation: Aggregation
) -> Script[tuple[Tensor, Sent | None]]:
    """Send a gradient at H[l+1], if there is one; return the share at H_m^+[l], and the gradient as it was sent.

    The label owner's gradient at the last layer is not part of a sum. With hidden sums it is encrypted for the other
    clients.
    """
    is_last = key.layer == client.config.model.aggregation_layers[-1]
    width = client.config.model.hidden
    if client.release.sums.hiding is None or client.identity.owner is None or not is_last:
        return (yield from exchange_gradient(client, key, gradient, nodes, width))
    found, sent = yield from client_sealed_gradient(client, key, gradient, nodes, width)
    client.release.update_ranges(key, found)
    return aggregation.own_gradient(found), sent


def compute_owner_gradient(client: Client, batch: Batch, joint: Tensor) -> tuple[list[float], Tensor | None]:
    """Return the label owner's loss at step 0 and its gradient at H[L]. Other clients get an empty list and None."""
    if not client.has_labels:
        return [], None
    loss, gradient = client.learner.loss_and_gradient(client.learner.step(batch, 0), joint, batch)
    return [check_loss(client, loss, batch.round)], gradient


def exchange_gradient(
    client: Client, key: Key, gradient: Tensor | None, nodes: NodeSet, width: int
) -> Script[tuple[Tensor, Sent | None]]:
    """Send a gradient, if there is one; return the server's answer, and the gradient as it was sent.

    Args:
        client: the client.
        key: the key of the exchange.
        gradient: the gradient; None at a client that has none.
        nodes: the nodes of the rows.
        width: the number of columns of the answer.
    """
    sent = None if gradient is None else client.release_tensor(GRADIENT, gradient, key, nodes)
    return (yield from exchange_rows(client, key, (Gradient, JointGradient), sent, (len(nodes), width))), sent


def server_backward(
    server: Server, key: Key, rows: Mapping[int, int], present: Sequence[int] | None = None
) -> Script[None]:
    """Server column: add the gradients in client order and send every client its share.

    Args:
        server: the server.
        key: phase and round.
        rows: |S[l+1]| for every aggregation layer l.
        present: the clients that contribute; None: all.
    """
    encoding, aggregation = server.shapes.encodings[GRADIENT], server.make_aggregation(present)
    for layer in reversed(server.aggregation_layers):
        # At the last layer only the label owner has a gradient; the others wait for their share.
        owner = server.identity.owner if layer == server.aggregation_layers[-1] else None
        if owner is not None and encoding.is_hidden:
            yield from server_sealed_gradient(server, key.at(layer), rows[layer])
            continue
        senders = present if owner is None else (owner,)
        gradients: Chunk | None = None
        while gradients is None or not gradients.is_last:
            gradients = yield from receive_chunk(server, Gradient, key.at(layer), gradients, rows[layer], senders)
            # Stochastic rounding depends on the message's key, so the share of every client is rounded separately.
            keys = server.make_client_keys(gradients.key)
            shares = aggregation.combine_gradients(encoding, gradients.payloads, keys, gradients.first_row)
            for share in {id(share): share for share in shares}.values():  # equal shares can be one array
                gradients.check_answer(share)
            yield Scatter(tuple(JointGradient(own, share) for own, share in zip(keys, shares, strict=True)))
