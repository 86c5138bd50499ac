"""The end of a round: its losses, an evaluation, and a checkpoint; client and server columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glasu.config import TrainConfig
from glasu.data.methods import evaluates_once, keeps_scores
from glasu.errors import ProtocolError, TrainingError
from glasu.protocol.evaluation import client_selection, server_selection
from glasu.protocol.messages import Losses
from glasu.protocol.requests import Receive, RoundDone, Save, Script, Send
from glasu.protocol.scoring import Scoring
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.config import RunConfig
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server
    from glasu.protocol.state import Progress


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
