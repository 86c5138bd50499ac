"""The exact gradient (`backward = "joint"`): back-propagation through the server, layer by layer.

The loss is the sum of the clients' losses. At each aggregation layer the server adds the clients' gradients at H[l+1]
and returns to every client its share at H_m^+[l]: 1/M of the sum (mean), or its columns (concat).

With Q > 1, the first local step uses this gradient, g_joint(W_0). The later steps send no message. They use

    (g_m(W_q) - g_m(W_0)) + g_joint(W_0)

where g_m is the gradient of LocalUpdate (`update.py`), with the others' parts and the dropout masks of step 0. So the
steps stand still where the exact gradient is zero, which steps with g_m alone do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from glasu.protocol.chunks import answer_rows, exchange_rows
from glasu.protocol.inference import client_inference
from glasu.protocol.messages import Gradient, JointGradient
from glasu.protocol.requests import Scatter, Script
from glasu.protocol.update import check_loss, local_gradient, walk_backward
from glasu.wire.encodings import Array
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.aggregation import Aggregation
    from glasu.model.sampler import Sample
    from glasu.protocol.client import Client
    from glasu.protocol.learner import Batch
    from glasu.protocol.server import Server


def client_joint_round(
    client: Client, batch: Batch, upcoming: Sample | None, aggregation: Aggregation
) -> Script[list[float]]:
    """Client column: JointInference, the walk back with an exchange at each aggregation layer, then all local steps.

    Args:
        client: the client.
        batch: the round's blocks, features and labels.
        upcoming: the sample of the next round, if it is known.
        aggregation: of the clients that are present in the round.

    Returns:
        The losses; none at a client without labels.
    """
    key, later_steps = client.identity.key(Phase.TRAINING, batch.round), range(1, client.config.train.num_local_steps)
    step = client.learner.step(batch, 0)
    joint, exchanged = yield from client_inference(client, step, key, upcoming)
    step.begin_backward()
    losses: list[float] = []
    gradient: Tensor | None = None
    top_share: Tensor | None = None  # what a client without labels receives at the last layer
    optimizer = client.learner.optimizer
    if client.has_labels:
        loss, gradient = client.learner.loss_and_gradient(step, joint, batch)
        losses = [check_loss(client, loss, batch.round)]

    def exchange_gradient(layer: int, gradient: Tensor | None) -> Script[Tensor]:
        own = client.identity.key(Phase.BACKWARD, batch.round, layer)
        share = yield from share_gradient(client, own, gradient, len(step.partials[layer]))
        if gradient is None:
            nonlocal top_share
            top_share = share
        return share

    yield from walk_backward(client, step, gradient, exchange_gradient)
    if not later_steps:
        optimizer.step(step.pending)
        return losses
    others = {layer: aggregation.extract_others(each, sent.value) for layer, (each, sent) in exchanged.items()}
    find_gradient = partial(local_gradient, client, batch, others=others, share=top_share, aggregation=aggregation)
    exact = optimizer.gradients.copy()
    yield from find_gradient(client.learner.step(batch, 0))
    start = optimizer.gradients.copy()
    optimizer.gradients[:] = exact
    optimizer.step()
    for _ in later_steps:
        losses.append((yield from find_gradient(client.learner.step(batch, 0))))
        optimizer.gradients[:] = (optimizer.gradients - start) + exact
        optimizer.step()
    return losses if client.has_labels else []


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
