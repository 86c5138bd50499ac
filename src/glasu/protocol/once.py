"""Runs that release representations only once (`train.release = "once"`): client and server columns, stage by stage.

Let l be the aggregation layer. Each party trains the layers 0..l and a classifier alone (the lower stage). With the
selected weights, it computes H_m^+[l] at all nodes, releases it once, and receives H[l+1]. Then it trains the layers
l+1..L-1 and a classifier on this fixed aggregate (the upper stage). The columns [H_m^+[l], H_{-m}[l+1]] replace the
features. As in every local update, the party's own columns have neither noise nor rounding. In both stages the party
selects its model on its own validation nodes and sends nothing.

At the end, the parties also release their final class probabilities, and the mean is the prediction. Without
`privacy.release_probabilities`, each party predicts alone. Losses and metrics are never sent.

If the aggregation is a mean, all parties train the lower layers with the same fixed classifier, as in a warm start.
This makes the representations of different parties comparable, so that their mean is meaningful.

Checkpoints do not contain the aggregate. Every attempt exchanges it again. This reveals nothing new, because the same
weights give the same rows, and the same rows have the same noise. With masks, which require mean aggregation, both the
representations and the class probabilities are exchanged as masked sums. The parties agree on the keys before the first
exchange of every attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from glasu.config import RunConfig
from glasu.protocol.averaging import client_average, server_average
from glasu.protocol.chunks import exchange_rows
from glasu.protocol.inference import server_inference
from glasu.protocol.messages import Joint, Partial
from glasu.protocol.passes import walk_forward
from glasu.protocol.requests import Script
from glasu.wire.message_key import Key, Phase
from glasu.wire.tensor_kinds import REPRESENTATION

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.task import ScoreRows, Targets
    from glasu.privacy.masking import Requested
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

Train: TypeAlias = "Callable[[Client], Script[None]]"  # trains to the last round of the current stage


def client_lower_stage(client: Client, train: Train) -> Script[None]:
    """Train the lower stage, unless it is complete.

    If the aggregation is a mean, the classifiers of all parties are equal, and no step changes them.
    """
    if client.progress.lower:
        return
    learner = client.learner
    with learner.fix_classifier() if learner.aggregation.is_mean else nullcontext():
        yield from train(client)


def client_aggregate(client: Client) -> Script[None]:
    """Release the representations of the lower stage, and enter the upper stage with the aggregate."""
    assert client.stages is not None
    progress, whole = client.progress, client.stages.whole
    if not progress.lower:
        progress.lower = progress.best_weights
        progress.start_over(whole.train.num_rounds)
    client.begin(client.stages.lower, client.stages.data)
    client.learner.model.load_state_dict(progress.lower)
    client.learner.model.eval()
    nodes = np.arange(client.data.num_nodes)
    partial = yield from walk_forward(client, client.learner.exact_inference(nodes), _keep_partial)
    key = _make_release_key(client, whole)
    # With masks, a repeated release must use the grid of the first release, so that it contains the same integers.
    client.release.sums.grids.ranges.clear()
    sent = client.release.tensor(REPRESENTATION, partial, key, nodes)
    shape = len(nodes), partial.shape[1] * client.learner.aggregation.widening
    joint = yield from exchange_rows(client, key, (Partial, Joint), sent, shape)
    _enter_upper(client, partial, client.learner.aggregation.extract_others(joint, sent.value))


def _enter_upper(client: Client, own: Tensor, others: Tensor) -> None:
    """Switch to the upper stage, with initial weights, trained weights or the weights of an interrupted run."""
    stages = client.stages
    assert stages is not None
    client.begin(stages.upper, stages.make_upper_data(own, others))
    if stages.trained:
        client.learner.model.load_state_dict(dict(stages.trained))
    if stages.interrupted is not None:
        client.learner.restore(stages.interrupted.weights, stages.interrupted.optimizer)
        stages.interrupted = None


def leave_stages(client: Client) -> None:
    """Combine the weights of both stages into the selected model at the end of the run."""
    stages, progress = client.stages, client.progress
    assert stages is not None
    progress.best_weights = stages.join_weights(progress.lower, progress.best_weights)
    client.config, client.learner.data = stages.whole, stages.data


def _keep_partial(layer: int, partial: Tensor) -> Script[Tensor]:
    """Return H_m[l+1] = H_m^+[l], because no layer of a stage aggregates."""
    yield from ()
    return partial


def server_aggregate(server: Server) -> Script[None]:
    """Server column of `client_aggregate`."""
    key = _make_release_key(server, server.config)
    yield from server_inference(server, key, {server.aggregation_layers[0]: server.sizes.num_nodes})


def _make_release_key(role: Client | Server, config: RunConfig) -> Key:
    """Return the key of the release. It is the same in training and prediction, so the noise is the same."""
    return role.identity.fixed_key(Phase.TRAINING, 0, config.model.aggregation_layers[0])


def client_once_scores(
    client: Client, key: Key, targets: Targets, requested: Requested | None = None
) -> Script[tuple[ScoreRows, ScoreRows]]:
    """Return the scores of this client's upper layers, and the mean over all clients if the settings release it."""
    assert client.stages is not None
    model = client.learner.model
    model.eval()
    hidden = yield from walk_forward(client, client.learner.exact_inference(targets.nodes), _keep_partial)
    own = np.asarray(client.learner.scores(hidden, targets).numpy())
    model.train()
    if not client.stages.whole.privacy.release_probabilities:
        return own, own if requested is None else own[requested]
    return own, (yield from client_average(client, key, own, targets.examples, requested=requested))


def server_once_scores(
    server: Server, key: Key, num_rows: int, requested: Sequence[Requested] | None = None
) -> Script[None]:
    """Server column of `client_once_scores`."""
    if server.config.privacy.release_probabilities:
        yield from server_average(server, key, num_rows, requested)
