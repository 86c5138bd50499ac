"""Algorithm 1: the rounds of training, client and server columns.

`client_round` is one round t. `sampling.py` agrees on its node sets, and `training.py` contains the parts of a run
before and after the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from glasu.protocol.absence import client_absent_round
from glasu.protocol.backward import client_joint_round, server_backward
from glasu.protocol.inference import client_inference, server_inference
from glasu.protocol.label_owner import client_gradient, server_gradient
from glasu.protocol.presence import draw_present
from glasu.protocol.requests import Script
from glasu.protocol.round_end import client_round_end, server_round_end
from glasu.protocol.sampling import find_known_rows, owner_leads
from glasu.protocol.update import Others, local_update
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.model.aggregation import Aggregation
    from glasu.model.sampler import Sample
    from glasu.protocol.client import Client
    from glasu.protocol.learner import Batch
    from glasu.protocol.server import Server


def client_rounds(client: Client, samples: Sequence[Sample]) -> Script[None]:
    """Compute the rounds of one window: successive rounds whose node sets are agreed on together."""
    for sample, following in zip(samples, [*samples[1:], None], strict=True):
        client.learner.set_learning_rate(sample.round)
        present = draw_present(client.config, client.identity.num_clients, sample.round)
        compute = client_joint_round if client.config.train.has_exact_gradients else client_round
        if client.identity.index not in present:
            compute = client_absent_round
        aggregation = client.learner.aggregation.with_clients(len(present))
        losses = yield from compute(client, client.look_ahead.take(sample, following), aggregation)
        yield from client_round_end(client, sample.round, losses)
        if client.progress.stopped:
            client.look_ahead.clear()
            return


def client_round(client: Client, batch: Batch, aggregation: Aggregation) -> Script[list[float]]:
    """Compute round t: JointInference, then Q local updates. Return the losses (empty without labels)."""
    step, key = client.learner.step(batch, 0), client.identity.key(Phase.TRAINING, batch.round)
    joint, parts = yield from client_inference(client, step, key, batch.nodes, aggregation)
    gradient = None
    if owner_leads(client.config):
        _, gradient = yield from client_gradient(client, batch, joint)
    others = Others(aggregation, parts, gradient)
    # JointInference used the dropout masks of step 0. If all parties read the released values exactly, JointInference
    # was the forward pass of step 0. Otherwise this client's part was rounded or noisy, and step 0 repeats the forward
    # pass without rounding and noise.
    forward = joint if client.release.transparent or not parts else None
    losses = [(yield from local_update(client, batch, step, others, forward))]
    for index in range(1, client.config.train.num_local_steps):
        losses.append((yield from local_update(client, batch, client.learner.step(batch, index), others)))
    return losses if client.has_labels else []


def server_rounds(server: Server, window: range, sizes: dict[tuple[int, int], int]) -> Script[None]:
    """Serve the rounds of one window; `sizes` holds {(round, l): |S[l]|} of the agreed node sets."""
    for index in window:
        key, backward = server.identity.key(Phase.TRAINING, index), server.identity.key(Phase.BACKWARD, index)
        present = draw_present(server.config, len(server.roster), index)
        rows = yield from server_inference(server, key, find_known_rows(server, index, sizes), present)
        if server.config.train.has_exact_gradients:
            yield from server_backward(server, backward, rows, present)
        elif server.identity.owner is not None:
            yield from server_gradient(server, backward, rows[server.aggregation_layers[-1]])
        yield from server_round_end(server, index)
        if server.progress.stopped:
            return
