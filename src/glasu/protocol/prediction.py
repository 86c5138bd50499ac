"""Compute scores by joint inference, for evaluations and for requested predictions. Predictions use every edge.

Scores are class probabilities, or the task's equivalent, such as the predictions of a regression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glasu.config import RunConfig
from glasu.data.methods import find_method, has_server
from glasu.errors import ConfigError, ProtocolError
from glasu.model.task import Targets
from glasu.privacy.masking import Requested
from glasu.protocol.absence import await_inference
from glasu.protocol.averaging import (
    client_average,
    client_average_all,
    client_average_propagated,
    server_average,
    server_average_all,
    server_average_propagated,
)
from glasu.protocol.inference import client_inference, exchange_partial, server_inference
from glasu.protocol.key_agreement import client_key_agreement, server_key_agreement
from glasu.protocol.once import client_aggregate, client_once_scores, server_aggregate, server_once_scores
from glasu.protocol.passes import walk_forward
from glasu.protocol.requests import Script
from glasu.protocol.sampling import agree, client_sampling, find_known_rows, server_sampling, unite
from glasu.protocol.scoring import Scoring
from glasu.wire.message_key import Key, Phase
from glasu.wire.tensor_kinds import PROBABILITIES

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.blocks import NodeSet
    from glasu.model.task import ScoreRows
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server


def client_request(client: Client, requested: NodeSet) -> Script[tuple[NodeSet, NDArray[Any]]]:
    """Client column: request scores of some nodes. A client that only helps the other parties requests no nodes.

    Returns:
        The sorted nodes whose scores this client receives, and the scores. If all clients have labels, these are the
        nodes that the client requested. If one party has the labels, only this party has a classifier. It receives the
        scores of all nodes that any party requested, and the other parties receive no scores.
    """
    check_predicts_nodes(client)
    if client.requested.privacy.hides_parts:
        yield from client_key_agreement(client)
    scoring = Scoring.of_request(client)
    (nodes,) = yield from agree(client, scoring.key, [requested])
    own = np.isin(nodes, requested)
    targets = Targets.of_nodes(nodes)
    probabilities = yield from client_prediction(client, scoring, targets, own)
    if client.identity.owner is not None:
        return (nodes if client.has_labels else nodes[:0]), probabilities
    return nodes[own], probabilities


def check_predicts_nodes(client: Client) -> None:
    """Raise ConfigError if a saved model cannot predict, because its task has no prediction for a node."""
    if not client.learner.task.examples_are_nodes:
        raise ConfigError(
            f'train.task="{client.config.train.task}": its examples are not nodes, and a saved model predicts nodes '
            "only. Use the test metrics of the training."
        )


def client_prediction(
    client: Client, scoring: Scoring, targets: Targets, requested: Requested | None = None
) -> Script[NDArray[Any]]:
    """Client column: return the scores of the examples, in the unit of the labels.

    If all clients have labels, the result is the mean of the clients' scores, for all examples or for the examples that
    this client requested. Without a server, the result is this client's own scores. If one party has the labels, the
    owner returns its scores, and the other clients return an empty array. If the method smooths, the mean is propagated
    over the parties' edges. If only some clients are present, the absent clients contribute nothing but receive the
    mean, too.
    """
    task, key = client.learner.task, scoring.key
    if client.stages is not None:
        yield from client_aggregate(client)
        place = key.at(client.stages.whole.model.num_layers)
        _, scores = yield from client_once_scores(client, place, targets, requested)
        return task.convert_scores(scores)
    if find_method(client.requested).smooths:
        own = yield from client_scores(client, scoring, Targets.of_nodes(np.arange(client.data.num_nodes)))
        mean, alpha = (yield from client_average_all(client, key, own)), client.progress.alpha
        joint = yield from client_average_propagated(client, key, mean, alpha, targets.nodes, requested=requested)
        return task.convert_scores(joint) if client.has_labels else joint
    own = yield from client_scores(client, scoring, targets)
    if client.has_labels and client.identity.owner is None and has_server(client.config):
        key = key.at(client.config.model.num_layers)
        return task.convert_scores((yield from client_average(client, key, own, targets.examples, requested=requested)))
    return np.empty((0, 0)) if own is None else task.convert_scores(own)


def client_scores(client: Client, scoring: Scoring, targets: Targets) -> Script[ScoreRows | None]:
    """Client column: return the scores of this client's classifier; None if it has no labels or is absent.

    The scores of the warm ensemble use every edge.
    """
    layers, nodes = client.config.model.aggregation_layers, targets.nodes
    if not (client.has_labels or layers):  # no other client needs this client's layers
        return None
    if scoring.present is not None and client.identity.index not in scoring.present:
        if not scoring.ensemble:
            lower = dict.fromkeys(layers[:-1], client.data.num_nodes)
            yield from await_inference(client, scoring.key, {**lower, layers[-1]: len(nodes)})
        return None
    model = client.learner.model
    model.eval()
    if _is_sampled(client.config, scoring.key.phase) and not scoring.ensemble:
        joint = yield from _run_sampled_forward(client, scoring.key, nodes)
    else:
        joint = yield from _exact_forward(client, scoring, nodes)
    own = np.asarray(client.learner.scores(joint, targets).numpy()) if client.has_labels else None
    model.train()
    return own


def _is_sampled(config: RunConfig, phase: Phase) -> bool:
    """Return whether neighbourhoods are sampled. Prediction is always exact."""
    return config.train.sampled_evaluation and phase is Phase.EVALUATION


def _exact_forward(client: Client, scoring: Scoring, nodes: NodeSet) -> Script[Tensor]:
    """Compute H[L] at the nodes with every edge. In the warm ensemble, no layer aggregates: H_m[l+1] = H_m^+[l].

    Lower layers are computed at all nodes, so that no node sets are sent. The last layer is computed only at `nodes`.
    """

    def combine(layer: int, partial: Tensor) -> Script[Tensor]:
        if scoring.ensemble:
            return client.release.clip(partial)
        is_last = layer == client.config.model.num_layers - 1
        rows = nodes if is_last else np.arange(client.data.num_nodes)
        joint, _ = yield from exchange_partial(client, scoring.key.at(layer), partial, rows)
        return joint

    return (yield from walk_forward(client, client.learner.exact_inference(nodes), combine))


def _run_sampled_forward(client: Client, key: Key, nodes: NodeSet) -> Script[Tensor]:
    """Compute H[L] at the nodes with sampled neighbourhoods, as in a round of training."""
    distinct, places = np.unique(nodes, return_inverse=True)  # node sets must be sorted; `places` restores the order
    rounds = [client.identity.find_round(key)]
    (sample,) = yield from client_sampling(client, rounds, [Targets.of_nodes(distinct)], Phase.EVALUATION_SAMPLING)
    batch = client.learner.gather(sample, with_labels=False)
    step, aggregation = client.learner.step(batch, None), client.learner.aggregation
    hidden, _ = yield from client_inference(client, step, key, batch.nodes, aggregation)
    joint: Tensor = hidden[places]
    return joint


def server_request(server: Server) -> Script[int]:
    """Server column: return the number of requested nodes."""
    if server.requested.privacy.hides_parts:
        yield from server_key_agreement(server)
    scoring = Scoring.of_request(server)
    proposals, (nodes,) = yield from unite(server, scoring.key, 1)
    if len(nodes) == 0:
        raise ProtocolError("no party requested a node; one of them must: glasu join ... --predict ids.csv.")
    requested = [np.isin(nodes, proposal.node_sets[0]) for proposal in proposals]
    _refuse_different_requests(server, requested)
    yield from server_prediction(server, scoring, len(nodes), requested)
    return len(nodes)


def _refuse_different_requests(server: Server, requested: Sequence[Requested]) -> None:
    """Refuse requests that the server cannot answer separately, because it cannot divide ciphertexts."""
    if server.shapes.encodings[PROBABILITIES].separates_rows or server.identity.owner is not None:
        return
    if any(mask.any() and not mask.all() for mask in requested):
        names = [name for name, mask in zip(server.roster, requested, strict=True) if mask.any()]
        raise ProtocolError(
            f"parties {', '.join(names)} requested different nodes. After training with "
            f"{server.config.privacy.secure_aggregation} the server cannot separate the rows of an encrypted sum; "
            "predict for one party at a time, or for the same nodes."
        )


def server_prediction(
    server: Server, scoring: Scoring, num_examples: int, requested: Sequence[Requested] | None = None
) -> Script[None]:
    """Server column: serve a joint inference, then average the scores. The warm ensemble needs no joint inference.

    All clients receive the mean; with `requested`, each client receives the rows that it requested.
    """
    key = scoring.key
    if server.config.train.releases_once:
        yield from server_aggregate(server)
        yield from server_once_scores(server, key.at(server.config.model.num_layers), num_examples, requested)
        return
    if find_method(server.requested).smooths:
        yield from server_average_all(server, key)
        yield from server_average_propagated(server, key, num_examples, requested)
        return
    if not scoring.ensemble:
        yield from _server_forward(server, scoring, num_examples if server.task.examples_are_nodes else None)
    if server.identity.owner is None:
        place = key.at(server.config.model.num_layers)
        yield from server_average(server, place, num_examples, requested, present=scoring.present)


def _server_forward(server: Server, scoring: Scoring, num_nodes: int | None) -> Script[None]:
    """Aggregate the layers, if any, of an exact or sampled inference. `num_nodes` is |S[L]|, or None if unknown."""
    if not server.aggregation_layers:
        return
    num_rows: Mapping[int, int | None]
    if _is_sampled(server.config, scoring.key.phase):
        round_index = server.identity.find_round(scoring.key)
        sizes = yield from server_sampling(server, [round_index], Phase.EVALUATION_SAMPLING)
        num_rows = find_known_rows(server, round_index, sizes)
    else:
        lower = server.aggregation_layers[:-1]
        num_rows = {**dict.fromkeys(lower, server.sizes.num_nodes), server.aggregation_layers[-1]: num_nodes}
    yield from server_inference(server, scoring.key, num_rows, scoring.present)
