"""The differences between Algorithms 2 to 4 and Algorithms 5 to 7, in which one client holds the labels.

Algorithm 5: the label owner sends the batch (`sampling.py`). Algorithm 7: the other clients minimise <G, H_m[L]>
(`update.py`). This module contains the last lines of Algorithm 6: all clients receive the owner's gradient G at H[L].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasu.protocol.backward import compute_owner_gradient, exchange_gradient
from glasu.protocol.chunks import Chunk, receive_chunk
from glasu.protocol.masked import client_sealed_gradient, server_sealed_gradient
from glasu.protocol.messages import Gradient, JointGradient
from glasu.protocol.requests import Broadcast, Script
from glasu.wire.message_key import Key, Phase
from glasu.wire.tensor_kinds import GRADIENT

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.protocol.client import Client
    from glasu.protocol.learner import Batch
    from glasu.protocol.server import Server


def client_gradient(client: Client, batch: Batch, joint: Tensor) -> Script[tuple[list[float], Tensor]]:
    """Client column: the owner sends G = dL/dH[L] at step 0; all clients receive it, once per round.

    Returns:
        A list with the owner's loss (empty at the other clients), and G.
    """
    key = client.identity.key(Phase.BACKWARD, batch.round, client.config.model.num_layers)
    losses, own = compute_owner_gradient(client, batch, joint)
    exchange = exchange_gradient if client.release.sums.hiding is None else client_sealed_gradient
    gradient, _ = yield from exchange(client, key, own, batch.nodes[-1], joint.shape[1])
    return losses, gradient


def server_gradient(server: Server, key: Key, num_rows: int) -> Script[None]:
    """Server column: forward the owner's gradient unchanged; with hidden sums, it is encrypted for the clients."""
    key = key.at(server.config.model.num_layers)
    if server.shapes.encodings[GRADIENT].is_hidden:
        yield from server_sealed_gradient(server, key, num_rows)
        return
    owner = server.identity.owner
    assert owner is not None
    gradient: Chunk | None = None
    while gradient is None or not gradient.is_last:
        gradient = yield from receive_chunk(server, Gradient, key, gradient, num_rows, (owner,))
        yield Broadcast(JointGradient(gradient.key, gradient.check_answer(gradient.payloads[0])))
