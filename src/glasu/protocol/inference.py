"""Algorithm 3: JointInference, client and server columns side by side.

Algorithm 6 begins with the same lines; `label_owner.py` contains its last lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from glasu.protocol.chunks import Chunk, exchange_rows, receive_chunk
from glasu.protocol.messages import Change, Joint, JointChange, Partial, TensorMessage
from glasu.protocol.passes import walk_forward
from glasu.protocol.requests import Broadcast, Script
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.config import RunConfig
    from glasu.model.aggregation import Aggregation
    from glasu.model.blocks import NodeSet
    from glasu.model.step import Step
    from glasu.privacy.release import Sent
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server


def client_inference(
    client: Client, step: Step, key: Key, nodes: Sequence[NodeSet], aggregation: Aggregation
) -> Script[tuple[Tensor, dict[int, Tensor]]]:
    """Client column: compute, send, receive and extract, layer by layer.

    Args:
        client: the client.
        step: the client's layers, at step 0.
        key: phase and round.
        nodes: S_m[0..L].
        aggregation: the aggregation over the clients that are present in the round.

    Returns:
        H_m[L] at the rows S[L], and {l+1: H_{-m}[l+1]} for every aggregation layer l.
    """
    others: dict[int, Tensor] = {}

    def exchange(layer: int, partial: Tensor) -> Script[Tensor]:
        """Send H_m^+[l], receive H[l+1], and extract H_{-m}[l+1]."""
        joint, sent = yield from exchange_partial(client, key.at(layer), partial, nodes[layer + 1])
        others[layer + 1] = aggregation.extract_others(joint, sent.value)
        return joint

    return (yield from walk_forward(client, step, exchange)), others


def server_inference(
    server: Server, key: Key, num_rows: Mapping[int, int | None], present: Sequence[int] | None = None
) -> Script[dict[int, int]]:
    """Server column: aggregate and broadcast, layer by layer.

    Args:
        server: the server.
        key: phase and round.
        num_rows: |S[l+1]| by aggregation layer l, if the server knows it.
        present: the clients that contribute; None: all.

    Returns:
        |S[l+1]| for every aggregation layer l.
    """
    kind, joint = find_message_kinds(server.config, key)
    encoding, aggregation = server.shapes.encodings[kind.content().kind], server.make_aggregation(present)
    rows = {}
    for layer in server.aggregation_layers:
        partials: Chunk | None = None
        while partials is None or not partials.is_last:
            partials = yield from receive_chunk(server, kind, key.at(layer), partials, num_rows.get(layer), present)
            found = aggregation.combine_partials(encoding, partials.payloads, partials.key, partials.first_row)
            yield Broadcast(joint(partials.key, partials.check_answer(found)))
        rows[layer] = partials.end
    return rows


def exchange_partial(client: Client, key: Key, partial: Tensor, nodes: NodeSet) -> Script[tuple[Tensor, Sent]]:
    """Release H_m^+[l] at the nodes; return H[l+1], and H_m^+[l] as it was sent."""
    kinds = find_message_kinds(client.config, key)
    sent = client.release_tensor(kinds[0].content().kind, partial, key, nodes)
    shape = len(partial), partial.shape[1] * client.learner.aggregation.widening
    joint = yield from exchange_rows(client, key, kinds, sent, shape)
    return joint, sent


def find_message_kinds(config: RunConfig, key: Key) -> tuple[type[TensorMessage], type[TensorMessage]]:
    """Return the kinds of the clients' messages and of the answers in one exchange of a joint inference.

    With `wire.feedback`, rows that were released before in the same phase are sent as changes. All training rounds
    release the same rows. All evaluations on validation nodes also release the same rows. The test and predictions
    release other rows, so they do not send changes. All roles derive the kinds from the settings and the key.
    """
    train = config.train
    first = {Phase.TRAINING: 0, Phase.EVALUATION: min(train.evaluate_every, train.num_rounds)}.get(key.phase)
    if config.wire.feedback and first is not None and first < key.round <= train.num_rounds:
        return Change, JointChange
    return Partial, Joint
