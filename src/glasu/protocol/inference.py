"""Algorithms 3 and 6: JointInference, client and server columns side by side.

`client_round` in `rounds.py` calls Extract on the result. `label_owner.py` adds the last lines of Algorithm 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from glasu.protocol.chunks import Chunk, exchange_rows, receive_chunk
from glasu.protocol.messages import Change, Joint, JointChange, Partial, TensorMessage
from glasu.protocol.requests import Broadcast, Evaluating, Script
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.config import RunConfig
    from glasu.model.blocks import NodeSet
    from glasu.model.step import ForwardStep, Step
    from glasu.privacy.release import Sent
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

Combine: TypeAlias = "Callable[[int, Tensor], Script[Tensor]]"


def client_inference(
    client: Client, step: Step, key: Key, nodes: Sequence[NodeSet]
) -> Script[tuple[Tensor, dict[int, tuple[Tensor, Sent]]]]:
    """Client column: compute, send and receive, layer by layer.

    Args:
        client: the client.
        step: the client's layers, at step 0.
        key: phase and round.
        nodes: S_m[0..L].

    Returns:
        H_m[L] at the rows S[L], and {l+1: (H[l+1], H_m^+[l] as it was sent)} for every aggregation layer l.
    """
    exchanged: dict[int, tuple[Tensor, Sent]] = {}

    def combine(layer: int, partial: Tensor) -> Script[Tensor]:
        joint, sent = yield from exchange_partial(client, key.at(layer), partial, nodes[layer + 1])
        exchanged[layer + 1] = joint, sent
        return joint

    joint = yield from walk_forward(client, step, combine)
    return joint, exchanged


def await_inference(client: Client, key: Key, num_rows: Mapping[int, int]) -> Script[Tensor]:
    """Client column of an absent client: contribute nothing, and return H[L].

    Args:
        client: the client.
        key: phase and round.
        num_rows: |S[l+1]| for every aggregation layer l.
    """
    width = client.config.model.hidden * client.learner.aggregation.widening
    joints = []
    for layer, rows in num_rows.items():
        joints.append((yield from exchange_rows(client, key.at(layer), (Partial, Joint), None, (rows, width))))
    joint: Tensor = joints[-1]
    return joint


def walk_forward(client: Client, step: ForwardStep, combine: Combine) -> Script[Tensor]:
    """Compute H_m[L]. Training, local updates and evaluation all use this function for the forward pass.

    Args:
        client: the client.
        step: computes H_m[0], and H_m^+[l] from H_m[l].
        combine: returns H_m[l+1], given l and H_m^+[l], for layers l that aggregate. In other layers H_m[l+1] =
            H_m^+[l].
    """

    def report(share: float) -> Evaluating:
        """Return the progress of a long exact inference."""
        return Evaluating(client.progress.round, share, client.name)

    hidden: Any = step.encode()
    for layer in range(client.config.model.num_layers):
        hidden = yield from step.layer_in_parts(layer, hidden, report)
        if layer in client.config.model.aggregation_layers:
            hidden = yield from combine(layer, hidden)
    result: Tensor = hidden
    return result


def exchange_partial(client: Client, key: Key, partial: Tensor, nodes: NodeSet) -> Script[tuple[Tensor, Sent]]:
    """Release H_m^+[l] at the nodes; return H[l+1], and H_m^+[l] as it was sent."""
    kinds = find_message_kinds(client.config, key)
    sent = client.release_tensor(kinds[0].content().kind, partial, key, nodes)
    shape = len(partial), partial.shape[1] * client.learner.aggregation.widening
    joint = yield from exchange_rows(client, key, kinds, sent, shape)
    return joint, sent


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
