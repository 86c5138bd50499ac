"""Methods whose parties train alone and combine their predictions afterwards; client and server columns.

After training, the parties test their selected models once, together. The server averages the class probabilities of
all parties. If the method smooths, the parties then propagate the averages over their edges with a weight alpha (see
`propagate`). If all parties have labels, each party with edges chooses its alpha on the validation nodes. If one party
has the labels, this owner receives the averages at the validation nodes for every alpha. It chooses one alpha for all
parties, and the server forwards this choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from glasu.data.methods import find_method, keeps_scores
from glasu.errors import ProtocolError
from glasu.model.propagation import ALPHAS, PROPAGATING, choose_alpha, propagate
from glasu.model.task import Targets
from glasu.protocol.averaging import (
    client_average,
    client_average_all,
    client_average_propagated,
    server_average,
    server_average_all,
    server_average_propagated,
)
from glasu.protocol.evaluation import agree_on_targets, compare_metrics, measure
from glasu.protocol.key_agreement import client_key_agreement
from glasu.protocol.messages import Chosen, Metrics
from glasu.protocol.prediction import client_scores
from glasu.protocol.receiving import receive_answer
from glasu.protocol.requests import Broadcast, Evaluated, Receive, Script, Send
from glasu.protocol.sampling import unite
from glasu.protocol.scoring import Scoring
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from glasu.model.blocks import NodeSet
    from glasu.model.task import ScoreRows
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

SCORED_SPLITS = ("validation", "test")  # the order of rows and of messages
# Used as `layer` in message keys.
NODE_LAYERS, METRIC_LAYERS = (-7, -6), (-3, -2)
OWN_LAYER, CHOICE_LAYER = -4, -5


def client_combination(client: Client) -> Script[dict[str, float]]:
    """Client column: return the metrics of the combined prediction on the test split; empty without labels."""
    yield from client_key_agreement(client)
    client.learner.model.load_state_dict(client.progress.best_weights)
    key = client.identity.key(Phase.EVALUATION, client.config.train.num_rounds + 1)
    # In the phase PREDICTION, the scores are computed with every edge.
    exact = Scoring(client.identity.key(Phase.PREDICTION, client.identity.find_round(key)))
    if find_method(client.requested).smooths:
        nodes = yield from _client_nodes(client, key)
        rows = np.concatenate(list(nodes.values()))
        own = yield from client_scores(client, exact, Targets.of_nodes(np.arange(client.data.num_nodes)))
        mean = yield from client_average_all(client, key, own)
        own = None if own is None else own[rows]
        alpha = client.progress.alpha = yield from _client_alpha(client, key, mean, nodes["validation"])
        joint = yield from client_average_propagated(client, key, mean, alpha, rows)
    else:  # every party has labels
        targets = client.data.find_targets(np.concatenate(list(_list_examples(client).values())))
        own = yield from client_scores(client, exact, targets)
        joint = yield from client_average(client, key.at(client.config.model.num_layers), own, targets.examples)
    return (yield from _client_metrics(client, key, own, joint))


def _list_examples(client: Client) -> dict[str, NodeSet]:
    return dict(zip(SCORED_SPLITS, (client.data.validation_examples(), client.data.test_examples()), strict=True))


def _client_nodes(client: Client, key: Key) -> Script[Mapping[str, NodeSet]]:
    """Return the nodes of both splits. A label owner sends these nodes to the other parties, but not their labels."""
    found = {}
    for (split, examples), layer in zip(_list_examples(client).items(), NODE_LAYERS, strict=True):
        targets = client.data.find_targets(examples)
        if client.identity.owner is not None:
            targets = yield from agree_on_targets(client, key.at(layer), targets)
        found[split] = targets.nodes
    return found


def _client_alpha(client: Client, key: Key, mean: ScoreRows, nodes: NodeSet) -> Script[float | None]:
    """Return the alpha of this party: its own choice (None without edges), or the label owner's choice."""
    examples, graph = client.data.validation_examples(), client.party.graph

    def score(scores: ScoreRows) -> float:
        return client.learner.task.selection_score(measure(client, scores, examples))

    if client.identity.owner is None:
        if not graph.num_edges:
            return None
        return choose_alpha(lambda alpha: score(propagate(graph, mean, alpha)[nodes]), ALPHAS)
    candidates = {1.0: mean[nodes]}
    for place, alpha in enumerate(PROPAGATING, 1):
        candidates[alpha] = yield from client_average_propagated(client, key, mean, alpha, nodes, place=place)
    chosen = []
    if client.has_labels:
        chosen = [choose_alpha(lambda alpha: score(candidates[alpha]), ALPHAS)]
    key = key.at(CHOICE_LAYER)
    yield Send(Chosen(key, client.release.numbers("alpha", chosen, key)))
    answer = yield from receive_answer(client, Chosen, key)
    return _read_choice(answer)


def _read_choice(message: Chosen) -> float:
    values = message.values.tolist()
    if len(values) != 1 or values[0] not in ALPHAS:
        raise ProtocolError(f"{message.key}: expected one alpha of {', '.join(map(str, ALPHAS))}, got {values}.")
    return float(values[0])


def _client_metrics(client: Client, key: Key, own: ScoreRows | None, joint: ScoreRows) -> Script[dict[str, float]]:
    """Send the metrics of the combined prediction, and the first metric of this party's own prediction.

    Without labels, these messages contain no values. With hidden sums, no message is sent: this party reports the
    metrics itself.
    """
    combined: dict[str, dict[str, float]] = {}
    alone: list[float] = []
    if own is not None:
        start = 0
        for split, examples in _list_examples(client).items():
            rows = slice(start, start + len(examples))
            combined[split] = measure(client, joint[rows], examples)
            alone.append(next(iter(measure(client, own[rows], examples).values())))
            start = rows.stop
    if keeps_scores(client.config):
        num_rounds, selected_by = client.config.train.num_rounds, client.learner.task.selected_by
        for split, found in combined.items():
            yield Evaluated(num_rounds, split, found, selected_by, improved=True, last=True)
        return combined.get("test", {})
    for split, layer in zip(SCORED_SPLITS, METRIC_LAYERS, strict=True):
        values = list(combined.get(split, {}).values())
        yield Send(Metrics(key.at(layer), client.release.numbers("metrics", values, key.at(layer))))
    key = key.at(OWN_LAYER)
    yield Send(Metrics(key, client.release.numbers("metrics", alone, key)))
    return combined.get("test", {})


def server_combination(server: Server) -> Script[None]:
    """Server column: average the scores, and report the metrics of the combined prediction on both splits."""
    key = server.identity.key(Phase.EVALUATION, server.config.train.num_rounds + 1)
    num_validation, num_test = server.sizes.num_validation, server.sizes.num_test
    if server.identity.owner is not None:
        _, (validation,) = yield from unite(server, key.at(NODE_LAYERS[0]), 1)
        _, (test,) = yield from unite(server, key.at(NODE_LAYERS[1]), 1)
        num_validation, num_test = len(validation), len(test)
    if find_method(server.requested).smooths:
        yield from server_average_all(server, key)
        if server.identity.owner is not None:
            yield from _server_alpha(server, key, num_validation)
        yield from server_average_propagated(server, key, num_validation + num_test)
    else:
        yield from server_average(server, key.at(server.config.model.num_layers), num_validation + num_test)
    if keeps_scores(server.config):
        return
    combined = []
    for layer in METRIC_LAYERS:
        combined.append(compare_metrics(server, (yield Receive((Metrics,), key.at(layer)))))
    alone = _read_own(server, (yield Receive((Metrics,), key.at(OWN_LAYER))))
    selected_by, num_rounds = server.task.selected_by, server.config.train.num_rounds
    for split, metrics, own in zip(SCORED_SPLITS, combined, alone, strict=True):
        yield Evaluated(num_rounds, split, metrics, selected_by, improved=True, last=True, per_client=own)


def _server_alpha(server: Server, key: Key, num_validation: int) -> Script[None]:
    """Send the label owner the average of the propagated scores for every alpha; forward its choice to all clients."""
    for place in range(1, len(PROPAGATING) + 1):
        yield from server_average_propagated(server, key, num_validation, place=place)
    key = key.at(CHOICE_LAYER)
    messages: Sequence[Chosen] = yield Receive((Chosen,), key)
    for client, message in enumerate(messages):
        if len(message.values) != server.identity.has_labels(client):
            server.refuse(message, f"expected an alpha from the label owner only, got {len(message.values)} values.")
    chosen = next(message for message in messages if len(message.values))
    yield Broadcast(Chosen(key, np.array([_read_choice(chosen)])))


def _read_own(server: Server, messages: Sequence[Metrics]) -> list[tuple[float | None, ...]]:
    """Return for each split the first metric of every party's own prediction; None for a party without labels."""
    found: list[list[float | None]] = []
    for client, message in enumerate(messages):
        expected = len(SCORED_SPLITS) if server.identity.has_labels(client) else 0
        if len(message.values) != expected or np.isinf(message.values).any():
            server.refuse(message, f"expected {expected} metrics that are not infinite, got {message.values.tolist()}.")
        found.append(message.values.tolist() or [None] * len(SCORED_SPLITS))
    return list(zip(*found, strict=True))
