"""Algorithm 1: the rounds of training, client and server columns.

`client_round` is one round t. `sampling.py` agrees on its node sets, and `training.py` contains the parts of a run
before and after the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glasu.config import TrainConfig
from glasu.data.methods import evaluates_once, keeps_scores
from glasu.errors import ProtocolError, TrainingError
from glasu.protocol.absence import client_absent_round
from glasu.protocol.backward import client_joint_round, server_backward
from glasu.protocol.evaluation import client_selection, server_selection
from glasu.protocol.inference import client_inference, server_inference
from glasu.protocol.label_owner import client_gradient, server_gradient
from glasu.protocol.messages import Losses
from glasu.protocol.presence import draw_present
from glasu.protocol.requests import Receive, RoundDone, Save, Script, Send
from glasu.protocol.sampling import find_known_rows, owner_leads
from glasu.protocol.scoring import Scoring
from glasu.protocol.update import Others, local_update
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.config import RunConfig
    from glasu.model.aggregation import Aggregation
    from glasu.model.sampler import Sample
    from glasu.protocol.client import Client
    from glasu.protocol.learner import Batch
    from glasu.protocol.server import Server
    from glasu.protocol.state import Progress


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


def client_round_end(client: Client, round_index: int, losses: Sequence[float]) -> Script[None]:
    """Client column: send or record the losses of the local steps, evaluate the model, and save the state."""
    progress, loss = client.progress, sum(losses) / len(losses) if losses else None
    if not (client.is_alone or keeps_scores(client.config)):
        key = client.identity.key(Phase.TRAINING, round_index)
        yield Send(Losses(key, client.release.numbers("losses", losses, key)))
    elif loss is not None:
        progress.losses += (loss,)
    progress.round = round_index + 1
    if is_evaluation_due(client.config, progress):
        yield from client_selection(client, Scoring.of_joint_model(client), loss)
    if is_save_due(client.config.train, progress):
        yield Save(client.state)
    yield RoundDone(round_index, loss, client.name)


def server_round_end(server: Server, round_index: int) -> Script[None]:
    """Server column: receive the losses, evaluate the model, and save the state."""
    progress, loss = server.progress, None
    if not keeps_scores(server.config):
        key = server.identity.key(Phase.TRAINING, round_index)
        loss = _mean_loss(server, (yield Receive((Losses,), key)))
        progress.losses += (loss,)
    progress.round = round_index + 1
    if is_evaluation_due(server.config, progress):
        yield from server_selection(server, Scoring.of_joint_model(server), loss)
    if is_save_due(server.config.train, progress):
        yield Save(server.state)
    yield RoundDone(round_index, loss)


def _mean_loss(server: Server, messages: Sequence[Losses]) -> float:
    """Return the mean loss over the clients with labels. Refuse a loss that is not finite, except in a race."""
    means = []
    for message in messages:
        if not (np.isfinite(message.values).all() or server.progress.is_racing):
            server.refuse(
                message, "its loss is not finite; training diverged. Lower train.learning_rate.", TrainingError
            )
        if len(message.values):
            means.append(float(message.values.mean()))
    if not means:
        raise ProtocolError(f"{messages[0].key}: no party sent a loss.")
    return sum(means) / len(means)


def is_evaluation_due(config: RunConfig, progress: Progress) -> bool:
    """Return whether the model is evaluated after the rounds so far."""
    every, last = config.train.evaluate_every, progress.end(config.train)
    return not evaluates_once(config) and (progress.round % every == 0 or progress.round == last)


def is_save_due(train: TrainConfig, progress: Progress) -> bool:
    """Return whether the state of a role must be saved after the rounds so far."""
    every = train.checkpoint_every
    return every > 0 and (progress.round % every == 0 or progress.round == progress.end(train) or progress.stopped)
