"""Algorithm 3: JointInference, the client's and the server's columns side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from glasu.protocol.chunks import answer_rows, exchange_rows
from glasu.protocol.messages import Exchange, Joint, Message, Partial, Script
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from glasu.model.step import Step
    from glasu.privacy.release import Sent
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server


def client_inference(
    client: Client, passes: Step, round_index: int, phase: Phase = Phase.TRAINING
) -> Exchange[tuple[Tensor, dict[int, tuple[Tensor, Sent]]]]:
    """Client column: compute, send, receive, layer by layer.

    Args:
        client: who takes part.
        passes: the way through the client's layers.
        round_index: t.
        phase: what it is for.

    Returns:
        H_m[L] at the rows S[L], and {l+1: (H[l+1], H_m^+[l] as it was sent)} for every aggregation layer l.
    """
    hidden = passes.encode()  # H_m[0]
    exchanged: dict[int, tuple[Tensor, Sent]] = {}
    for layer in range(client.config.model.num_layers):
        partial = passes.layer(layer, hidden)  # H_m^+[l]
        if layer in client.model.aggregation_layers:
            key = client.key(phase, round_index, layer)
            sent = client.release.tensor("representation", partial, key)
            message = Partial(key=key, value=sent.payload, losses=client.take_losses(key))
            answers = yield from exchange_rows(message, partial.shape[0], Joint)
            hidden = client.read_rows("representation", answers, client.joint_shape(partial))  # H_m[l+1] = H[l+1]
            exchanged[layer + 1] = hidden, sent
        else:
            hidden = partial  # H_m[l+1] = H_m^+[l]
    return cast("Tensor", hidden), exchanged  # no torch here: the server imports this module


def server_inference(
    server: Server, round_index: int, phase: Phase = Phase.TRAINING, num_rows: Sequence[int] | None = None
) -> Script:
    """Server column: aggregate and broadcast; of each layer so many rows, where the caller or the server knows it."""

    def respond(messages: Sequence[Message]) -> None:
        server.answer(Joint, server.aggregated("representation", messages))

    for position, layer in enumerate(server.layers):
        known = server.known_rows(phase, round_index, layer) if num_rows is None else num_rows[position]
        yield from answer_rows(server, (Partial,), phase, round_index, layer, respond, known)
