"""The test of a run whose losses and metrics stay at the parties: client and server columns.

In such a run, the parties release their representations only once (`once.py`), or they add noise in every round. In
rounds with noise there is no evaluation before the test, because every evaluation would be one more release. So the
model after the last round is selected.

Every party receives the mean of the class probabilities and has the labels. So each party computes the metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from glasu.protocol.averaging import client_average
from glasu.protocol.evaluation import measure
from glasu.protocol.once import client_once_scores, leave_stages, server_once_scores
from glasu.protocol.prediction import client_scores, server_prediction
from glasu.protocol.requests import Evaluated, Script
from glasu.protocol.scoring import Scoring
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from glasu.config import RunConfig
    from glasu.model.blocks import NodeSet
    from glasu.model.task import ScoreRows
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server


def client_final_test(client: Client) -> Script[dict[str, float]]:
    """Client column: predict validation and test nodes, and measure the predictions; return the test metrics."""
    validation, test = client.data.validation_examples(), client.data.test_examples()
    targets, count = client.data.find_targets(np.concatenate([validation, test])), len(validation)
    if client.stages is not None:
        client.learner.model.load_state_dict(client.progress.best_weights)
        key = _make_final_key(client, client.stages.whole)
        own, joint = yield from client_once_scores(client, key.at(client.stages.whole.model.num_layers), targets)
    else:
        client.progress.best_weights = client.learner.weights()
        key = _make_final_key(client, client.config)
        scores = yield from client_scores(client, Scoring(key), targets)
        assert scores is not None  # all clients have labels
        own = scores
        joint = yield from client_average(client, key.at(client.config.model.num_layers), own, targets.examples)
    yield from _report_scores(client, "validation", validation, own[:count], joint[:count])
    metrics = yield from _report_scores(client, "test", test, own[count:], joint[count:])
    if client.stages is not None:
        leave_stages(client)
    return metrics


def server_final_test(server: Server) -> Script[None]:
    """Server column of `client_final_test`."""
    key, num_rows = _make_final_key(server, server.config), server.sizes.num_validation + server.sizes.num_test
    if server.config.train.releases_once:
        yield from server_once_scores(server, key.at(server.config.model.num_layers), num_rows)
    else:
        yield from server_prediction(server, Scoring(key), num_rows)


def _make_final_key(role: Client | Server, config: RunConfig) -> Key:
    """Return the key of the final prediction."""
    return role.identity.fixed_key(Phase.EVALUATION, config.train.num_rounds + 1)


def _report_scores(
    client: Client, split: str, examples: NodeSet, own: ScoreRows, joint: ScoreRows
) -> Script[dict[str, float]]:
    """Measure the joint prediction of a split, and the party's own prediction; return the joint metrics."""
    alone, selected_by = next(iter(measure(client, own, examples).values())), client.learner.task.selected_by
    metrics, place = measure(client, joint, examples), client.progress.position
    yield Evaluated(
        place, split, metrics, selected_by, improved=True, party=client.name, last=True, per_client=(alone,)
    )
    return metrics
