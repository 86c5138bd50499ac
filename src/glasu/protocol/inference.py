"""Algorithm 3: JointInference, client and server columns side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from glasu.protocol.chunks import answer_rows, receive_rows, send_rows
from glasu.protocol.messages import Joint, Partial, TensorMessage
from glasu.protocol.requests import Broadcast, Script
from glasu.protocol.walk import walk_forward
from glasu.wire.message_key import Key

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.step import Step
    from glasu.privacy.release import Sent
    from glasu.protocol.client import Client
    from glasu.protocol.sample import Sample
    from glasu.protocol.server import Server


def client_inference(
    client: Client, step: Step, key: Key, upcoming: Sample | None = None
) -> Script[tuple[Tensor, dict[int, tuple[Tensor, Sent]]]]:
    """Client column: compute, send and receive, layer by layer.

    Args:
        client: the client.
        step: the client's layers, at step 0.
        key: phase and round.
        upcoming: the sample of the next round, if it is known; it is gathered while answers travel.

    Returns:
        H_m[L] at the rows S[L], and {l+1: (H[l+1], H_m^+[l] as it was sent)} for every aggregation layer l.
    """
    exchanged: dict[int, tuple[Tensor, Sent]] = {}

    def combine(layer: int, partial: Tensor) -> Script[Tensor]:
        joint, sent = yield from exchange_partial(client, key.at(layer), partial, upcoming)
        exchanged[layer + 1] = joint, sent
        return joint

    joint = yield from walk_forward(client, step, combine)
    return joint, exchanged


def exchange_partial(
    client: Client, key: Key, partial: Tensor, upcoming: Sample | None = None
) -> Script[tuple[Tensor, Sent]]:
    """Release H_m^+[l]; return H[l+1], and H_m^+[l] as it was sent."""
    sent = client.release.tensor("representation", partial, key)
    yield from send_rows(client, Partial, key, sent.payload)
    if upcoming is not None:
        with client.watch.measure("sampling"):
            client.learner.gather(upcoming)  # useful work while the answer travels
    rows, columns = partial.shape
    answers = yield from receive_rows(client, Joint, key, rows)
    shape = rows, columns * client.learner.aggregation.widening
    return client.read_rows("representation", answers, shape), sent


def server_inference(server: Server, key: Key, num_rows: Mapping[int, int | None]) -> Script[dict[int, int]]:
    """Server column: aggregate and broadcast, layer by layer.

    Args:
        server: the server.
        key: phase and round.
        num_rows: |S[l+1]| for aggregation layers l, where the server knows it.

    Returns:
        |S[l+1]| for every aggregation layer l.
    """

    def respond(partials: Sequence[TensorMessage], answer: Key, first_row: int) -> Broadcast:
        return Broadcast(Joint(answer, server.aggregate(partials, answer, first_row)))

    rows = {}
    for layer in server.aggregation_layers:
        rows[layer] = yield from answer_rows(server, (Partial,), key.at(layer), respond, num_rows.get(layer))
    return rows
