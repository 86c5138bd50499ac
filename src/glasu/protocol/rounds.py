"""Algorithm 1: the rounds of training, client and server columns.

`client_round` is one round t of a client. `training.py` contains the other parts of a run: keys, a race, a warm start,
the agreement on node sets, and the test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glasu.config import TrainConfig
from glasu.data.methods import evaluates_once, keeps_scores
from glasu.errors import ProtocolError, TrainingError
from glasu.protocol.backward import await_backward, client_joint_round, server_backward
from glasu.protocol.evaluation import (
    client_selection,
    server_selection,
)
from glasu.protocol.inference import await_inference, client_inference, server_inference
from glasu.protocol.label_owner import client_gradient, server_gradient
from glasu.protocol.messages import Losses
from glasu.protocol.presence import draw_present
from glasu.protocol.requests import Receive, RoundDone, Save, Script, Send
from glasu.protocol.sampling import (
    find_known_rows,
    owner_leads,
)
from glasu.protocol.update import Others, local_update
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.model.aggregation import Aggregation
    from glasu.model.sampler import Sample
    from glasu.protocol.client import Client
    from glasu.protocol.learner import Batch
    from glasu.protocol.server import Server
    from glasu.protocol.state import Progress


def client_rounds(client: Client, samples: Sequence[Sample]) -> Script[None]:
    """Compute the rounds of one window: successive rounds whose node sets are agreed on together."""
    progress, train = client.progress, client.config.train
    sends_losses = not (client.is_alone or keeps_scores(client.config))
    selects = not evaluates_once(client.config)
    for sample, following in zip(samples, [*samples[1:], None], strict=True):
        losses = yield from client_round(client, client.look_ahead.take(sample, following))
        loss = sum(losses) / len(losses) if losses else None
        if sends_losses:
            key = client.identity.key(Phase.TRAINING, sample.round)
            yield Send(Losses(key, client.release.numbers("losses", losses, key)))
        elif loss is not None:
            progress.losses += (loss,)
        progress.round = sample.round + 1
        if selects and is_evaluation_due(train, progress):
            yield from client_selection(client, loss)
        if is_save_due(train, progress):
            yield Save(client.state)
        yield RoundDone(sample.round, loss, client.name)
        if progress.stopped:
            client.look_ahead.clear()
            return


def client_round(client: Client, batch: Batch) -> Script[list[float]]:
    """Compute one round: JointInference, then Q local updates. Return the losses (empty without labels)."""
    client.learner.set_learning_rate(batch.round)
    present = draw_present(client.config, client.identity.num_clients, batch.round)
    aggregation = client.learner.aggregation.with_clients(len(present))
    if client.identity.index not in present:
        return (yield from client_absent_round(client, batch, aggregation))
    if client.config.train.has_exact_gradients:
        return (yield from client_joint_round(client, batch, aggregation))
    step = client.learner.step(batch, 0)
    joint, exchanged = yield from client_inference(
        client, step, client.identity.key(Phase.TRAINING, batch.round), batch.nodes
    )
    gradient = None
    if owner_leads(client.config):
        _, gradient = yield from client_gradient(client, batch, joint)
    parts = {layer: aggregation.extract_others(each, sent.value) for layer, (each, sent) in exchanged.items()}
    others = Others(aggregation, parts, gradient)
    # JointInference used the dropout masks of step 0. If all parties read the released values exactly, JointInference
    # was the forward pass of step 0. Otherwise this client's part was rounded or noisy, and step 0 repeats the forward
    # pass without rounding and noise.
    forward = joint if client.release.transparent or not exchanged else None
    losses = [(yield from local_update(client, batch, step, others, forward))]
    for index in range(1, client.config.train.num_local_steps):
        losses.append((yield from local_update(client, batch, client.learner.step(batch, index), others)))
    return losses if client.has_labels else []


def client_absent_round(client: Client, batch: Batch, aggregation: Aggregation) -> Script[list[float]]:
    """Follow a round without contributing to it and without taking a step.

    An absent label owner still computes the gradient at H[L], because the other clients have no loss.
    """
    num_rows = {layer: len(batch.nodes[layer + 1]) for layer in client.config.model.aggregation_layers}
    joint = yield from await_inference(client, client.identity.key(Phase.TRAINING, batch.round), num_rows)
    if client.config.train.has_exact_gradients:
        return (yield from await_backward(client, batch, joint, aggregation))
    losses: list[float] = []
    if client.identity.owner is not None:
        losses, _ = yield from client_gradient(client, batch, joint)
    return losses


def server_rounds(server: Server, window: range, sizes: dict[tuple[int, int], int]) -> Script[None]:
    """Serve the rounds of one window; `sizes` holds {(round, l): |S[l]|} of the agreed node sets."""
    progress, train = server.progress, server.config.train
    receives_losses, selects = not keeps_scores(server.config), not evaluates_once(server.config)
    for index in window:
        key, backward = server.identity.key(Phase.TRAINING, index), server.identity.key(Phase.BACKWARD, index)
        present = draw_present(server.config, len(server.roster), index)
        rows = yield from server_inference(server, key, find_known_rows(server, index, sizes), present)
        if train.has_exact_gradients:
            yield from server_backward(server, backward, rows, present)
        elif server.identity.owner is not None:
            yield from server_gradient(server, backward, rows[server.aggregation_layers[-1]])
        loss = None
        if receives_losses:
            loss = _mean_loss(server, (yield Receive((Losses,), key)))
            progress.losses += (loss,)
        progress.round = index + 1
        if selects and is_evaluation_due(train, progress):
            yield from server_selection(server, loss)
        if is_save_due(train, progress):
            yield Save(server.state)
        yield RoundDone(index, loss)
        if progress.stopped:
            return


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


def is_evaluation_due(train: TrainConfig, progress: Progress) -> bool:
    """Return whether the model is evaluated after the rounds so far."""
    return progress.round % train.evaluate_every == 0 or progress.round == progress.end(train)


def is_save_due(train: TrainConfig, progress: Progress) -> bool:
    """Return whether the state of a role must be saved after the rounds so far."""
    every = train.checkpoint_every
    return every > 0 and (progress.round % every == 0 or progress.round == progress.end(train) or progress.stopped)
