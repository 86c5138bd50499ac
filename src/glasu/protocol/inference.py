"""Algorithm 3: JointInference, the client's and the server's columns side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from glasu.keys import Phase
from glasu.protocol.messages import Exchange, Joint, Partial, Script, exchange

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.split import Dropout
    from glasu.protocol.actor import Batch, Client
    from glasu.protocol.server import Server


def client_inference(
    client: Client, batch: Batch, dropout: Dropout, phase: Phase = Phase.TRAINING, *, opened: bool = False
) -> Exchange[tuple[Tensor, dict[int, Tensor]]]:
    """Client column: compute, send, receive, layer by layer.

    Args:
        client: who takes part.
        batch: the nodes, blocks and features.
        dropout: the masks.
        phase: what it is for.
        opened: keep the graph as in step 0 of LocalUpdate, which then need not compute the same again.

    Returns:
        H_m[L] at the rows S[L], and {l+1: H_{-m}[l+1]} for every aggregation layer l.
    """
    hidden, initial = client.encode(batch, dropout, opened=opened)  # H_m[0] = X_m[S_m[0]]
    others: dict[int, Tensor] = {}
    for layer in range(client.config.model.num_layers):
        partial = client.partial(layer, hidden, initial[layer], batch, dropout, opened=opened)  # H_m^+[l]
        if layer in client.model.aggregation_layers:
            key = client.key(phase, batch.round, layer)
            sent = client.release.tensor("representation", partial, key)
            answer = yield from exchange(Partial(key=key, value=sent.payload, losses=client.take_losses(key)), Joint)
            joint = client.read("representation", answer, client.joint_shape(partial))
            others[layer + 1] = client.aggregation.extract_others(joint, sent.value)
            hidden = joint  # H_m[l+1] = H[l+1]
            if opened:
                hidden = client.aggregation.receive(joint, client.release.clip(partial))
        else:
            hidden = partial  # H_m[l+1] = H_m^+[l]
    return cast("Tensor", hidden), others  # no torch here: the server imports this module


def server_inference(server: Server, round_index: int, phase: Phase = Phase.TRAINING) -> Script:
    """Server column: aggregate and broadcast."""
    for layer in server.layers:
        messages = yield from server.receive((Partial,), phase, round_index, layer)
        server.answer(Joint, server.aggregated("representation", messages))
