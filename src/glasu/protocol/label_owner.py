"""Algorithms 5-7: what changes when one client holds the labels.

Sampling: the owner sends the batch (`sampling.owner_draws`). Update: the others minimise <G, H_m[L]>
(`update.local_update`). Here: Algorithm 6's last lines, the owner's gradient at H[L] reaches everyone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasu.protocol.chunks import answer_rows, exchange_rows
from glasu.protocol.messages import Exchange, Gradient, JointGradient, Message, Script, Waiting
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from glasu.protocol.client import Batch, Client
    from glasu.protocol.server import Server


def client_gradient(client: Client, batch: Batch, joint: Tensor) -> Exchange[Tensor]:
    """Client column: the owner sends G = dL/dH[L] at step 0; everyone receives it, once per round."""
    key = client.key(Phase.BACKWARD, batch.round, client.config.model.num_layers)
    message: Message = Waiting(key=key)
    if client.has_labels:
        message = Gradient(
            key=key, value=client.release.tensor("gradient", client.gradient_at(joint, batch), key).payload
        )
    rows, columns = joint.shape
    answers = yield from exchange_rows(message, rows, JointGradient)
    return client.read_rows("gradient", answers, (rows, columns))


def server_gradient(server: Server, round_index: int) -> Script:
    """Server column: pass the owner's gradient on, as it came."""

    def respond(messages: Sequence[Message]) -> None:
        server.answer(JointGradient, server.owners_gradient(messages))

    layer, rows = server.config.model.num_layers, server.rows[server.layers[-1]]
    yield from answer_rows(server, (Gradient, Waiting), Phase.BACKWARD, round_index, layer, respond, rows)
