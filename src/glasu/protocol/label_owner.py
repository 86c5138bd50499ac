"""Algorithms 5 to 7: the differences when one client holds the labels.

Algorithm 5: the label owner sends the batch (`sampling.py`). Algorithm 7: the other clients minimise <G, H_m[L]>
(`update.py`). This module: the last lines of Algorithm 6, in which all clients receive the owner's gradient G at H[L].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasu.protocol.backward import owner_gradient, share_gradient
from glasu.protocol.chunks import answer_rows
from glasu.protocol.messages import Gradient, JointGradient
from glasu.protocol.requests import Broadcast, Script
from glasu.wire.encodings import Array
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.protocol.client import Client
    from glasu.protocol.learner import Batch
    from glasu.protocol.server import Server


def client_gradient(client: Client, batch: Batch, joint: Tensor) -> Script[tuple[list[float], Tensor]]:
    """Client column: the owner sends G = dL/dH[L] at step 0; all clients receive it, once per round.

    Returns:
        The owner's loss (none at the other clients), and G.
    """
    key = client.identity.key(Phase.BACKWARD, batch.round, client.config.model.num_layers)
    losses, own = owner_gradient(client, batch, joint)
    gradient, _ = yield from share_gradient(client, key, own, len(joint), client.learner.aggregation.widening)
    return losses, gradient


def server_gradient(server: Server, key: Key, num_rows: int) -> Script[None]:
    """Server column: pass the owner's gradient on to all clients, unchanged."""

    def respond(gradients: list[Array], answer: Key, first_row: int) -> Broadcast:
        return Broadcast(JointGradient(answer, gradients[0]))

    layer = server.config.model.num_layers
    yield from answer_rows(server, Gradient, key.at(layer), respond, num_rows, (server.identity.owner,))
