"""Warm start: local steps before round 0, and the evaluation after them; client and server columns.

Each client trains alone, with H_m[l+1] = H_m^+[l], and sends nothing. The classifiers are equal and stay fixed. So all
clients learn representations for the same classifier, and in round 0 this classifier works with their mean.

Then two candidates for the selected model are evaluated: the ensemble, which is the mean of the scores that the clients
compute alone, and the joint model. The ensemble is evaluated first, so it is kept unless the joint model is better. If
every evaluation would be a release with noise, both evaluations are skipped.

Warm step i of N draws its batch, neighbours and dropout masks like a round with the index i - N. Only warm steps have
negative indices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasu.data.methods import evaluates_once
from glasu.protocol.evaluation import client_selection, server_selection
from glasu.protocol.requests import Save, Script, WarmStepDone
from glasu.protocol.sampling import client_sampling, draw_batches
from glasu.protocol.scoring import Scoring
from glasu.protocol.update import local_update

if TYPE_CHECKING:
    from glasu.config import TrainConfig
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server


def client_warm_start(client: Client) -> Script[None]:
    """Client column: take the remaining warm steps, then evaluate the ensemble and the joint model."""
    progress = client.progress
    if not client.config.train.warm_start or progress.round or progress.stopped:
        return
    yield from take_warm_steps(client)
    if evaluates_once(client.config):
        return
    yield from client_selection(client, Scoring.of_ensemble(client))
    if not progress.stopped:
        yield from client_selection(client, Scoring.of_joint_model(client))


def server_warm_start(server: Server) -> Script[None]:
    """Server column: serve both evaluations. The warm steps need no server."""
    progress = server.progress
    if not server.config.train.warm_start or progress.round or progress.stopped or evaluates_once(server.config):
        return
    yield from server_selection(server, Scoring.of_ensemble(server))
    if not progress.stopped:
        yield from server_selection(server, Scoring.of_joint_model(server))


def draw_common_classifier(client: Client) -> None:
    """Derive the classifier of a warm start from the run key, unless a step has been taken."""
    progress = client.progress
    if client.config.train.warm_start and not (progress.position or progress.warm_steps):
        client.begin(client.config, client.data)


def take_warm_steps(client: Client) -> Script[None]:
    """Train alone with the fixed classifier. Then reset the optimizer to its state in a run without warm start."""
    progress, train, learner = client.progress, client.config.train, client.learner
    if progress.warm_steps >= train.warm_start:
        return
    examples = client.data.training_examples()
    learner.set_learning_rate(0)
    with learner.fix_classifier():
        for index in range(progress.warm_steps, train.warm_start):
            rounds = [index - train.warm_start]
            (sample,) = yield from client_sampling(client, rounds, draw_batches(client, examples, rounds), alone=True)
            with client.watch.measure("sampling"):
                batch = learner.gather(sample)
            loss = yield from local_update(client, batch, learner.step(batch, 0), None)
            progress.warm_steps = index + 1
            if progress.warm_steps == train.warm_start:
                learner.optimizer.restore({})
            if is_warm_save_due(train, progress.warm_steps) and progress.race is None:  # a race saves only after rounds
                yield Save(client.state)
            yield WarmStepDone(progress.warm_steps, train.warm_start, loss, client.name)


def is_warm_save_due(train: TrainConfig, steps_done: int) -> bool:
    """Return whether the state of a client must be saved. Q warm steps count as one round."""
    every = train.checkpoint_every * train.num_local_steps
    return every > 0 and (steps_done % every == 0 or steps_done == train.warm_start)
