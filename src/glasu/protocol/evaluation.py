"""Evaluation: metrics on a split, selection of the model on validation nodes, and the test of the selected model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from glasu.data.methods import find_method, keeps_scores
from glasu.errors import ProtocolError, TrainingError
from glasu.model.propagation import PROPAGATING, choose_alpha, propagate, start_from_labels
from glasu.model.task import Targets
from glasu.protocol.masked import client_decision, server_decision
from glasu.protocol.messages import Metrics, Verdict
from glasu.protocol.prediction import client_prediction, client_scores, server_prediction
from glasu.protocol.presence import list_subsets
from glasu.protocol.requests import (
    Broadcast,
    CandidateDiverged,
    Collapsed,
    Evaluated,
    Propagated,
    Receive,
    Script,
    Send,
    SubsetScored,
    Timed,
)
from glasu.protocol.sampling import adopt_owner_sets, owner_leads, unite
from glasu.protocol.scoring import TEST, VALIDATION, Scoring
from glasu.protocol.state import DIVERGED
from glasu.wire.message_key import Key

if TYPE_CHECKING:
    from glasu.model.blocks import NodeSet
    from glasu.model.task import ScoreRows
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

COLLAPSED, SOUND = 1.0, 0.0  # a flag after the test metrics: COLLAPSED if the selected model has learned nothing


class ClientEvaluation(NamedTuple):
    """The result of an evaluation at a client."""

    metrics: dict[str, float]  # empty at a client without labels
    is_collapsed: bool  # whether the model has learned nothing (`Task.is_collapsed`); False without labels
    verdict: Verdict | None  # the server's verdict; None if the clients decide


def client_selection(client: Client, scoring: Scoring, loss: float | None = None) -> Script[None]:
    """Client column: evaluate a model on validation nodes; keep the weights if they are the best so far."""
    progress, task = client.progress, client.learner.task
    metrics, is_collapsed, verdict = yield Timed(client_evaluation(client, scoring), "evaluation")
    if verdict is not None:
        improved, progress.stopped = verdict.improved, verdict.stop
    else:
        improved = last = False
        if client.has_labels:
            improved, last = progress.judge(task.selection_score(metrics), client.config.train)
        if not client.is_alone:
            improved, progress.stopped = yield from client_decision(client, scoring, metrics, improved=improved)
        if client.has_labels:
            party = client.name if client.is_alone else None
            found = progress.position, VALIDATION, metrics, task.selected_by, loss, improved, party, last
            yield Evaluated(*found, ensemble=scoring.ensemble)
    if improved:
        progress.best_weights, progress.ensemble = client.learner.weights(), scoring.ensemble
        progress.best_is_collapsed = is_collapsed


def client_test(client: Client) -> Script[dict[str, float]]:
    """Client column: test the selected weights; return the metrics."""
    client.learner.model.load_state_dict(client.progress.best_weights)
    propagated = None
    can_propagate = client.has_labels and client.party.graph.num_edges > 0 and client.learner.task.examples_are_nodes
    if client.is_alone and can_propagate and not find_method(client.requested).one_party:
        propagated = propagate_labels(client)
    progress = client.progress
    metrics, _, verdict = yield Timed(client_evaluation(client, Scoring.of_test(client)), "evaluation")
    if progress.best_is_collapsed:
        yield Collapsed(client.name if client.is_alone else None)
    if verdict is None and client.has_labels:
        best, selected_by = progress.selection.best_round, client.learner.task.selected_by
        party = client.name if client.is_alone else None
        yield Evaluated(best, TEST, metrics, selected_by, party=party, ensemble=progress.ensemble)
    if propagated is not None:
        yield score_propagation(client, *propagated)
    return dict(metrics)


def client_subsets(client: Client) -> Script[None]:
    """Client column: score the selected model on validation nodes for every subset of `list_subsets`."""
    examples = client.data.validation_examples()
    targets = client.data.find_targets(examples)
    for index, present in enumerate(list_subsets(client.config, client.identity)):
        scoring = Scoring.of_subset(client, index, present)
        if client.identity.owner is not None:
            targets = yield from agree_on_targets(client, scoring.key, targets)
        predicted = yield from client_prediction(client, scoring, targets)
        found = evaluate(client, predicted, examples)[0] if client.has_labels else {}
        if found:
            names = tuple(client.identity.names[each] for each in present)
            client.progress.subsets = {**client.progress.subsets, names: found}
        key = scoring.metrics_key
        yield Send(Metrics(key, client.release.numbers("metrics", list(found.values()), key)))


def server_subsets(server: Server) -> Script[None]:
    """Server column of `client_subsets`."""
    for index, present in enumerate(list_subsets(server.config, server.identity)):
        scoring = Scoring.of_subset(server, index, present)
        yield from _server_scores(server, scoring)
        metrics = compare_metrics(server, (yield Receive((Metrics,), scoring.metrics_key)))
        yield SubsetScored(tuple(server.roster[each] for each in present), metrics)


def propagate_labels(client: Client) -> tuple[ScoreRows, dict[str, float]]:
    """Propagate the training labels over the party's edges, with the alpha that is best on the validation nodes.

    Returns:
        The scores of all nodes, and the metrics on the validation nodes.
    """
    task, graph, start = (
        client.learner.task,
        client.party.graph,
        start_from_labels(client.learner.task, client.data.party),
    )
    examples = client.data.validation_examples()
    nodes = client.data.find_targets(examples).nodes

    def score(alpha: float) -> dict[str, float]:
        return measure(client, propagate(graph, start, alpha)[nodes], examples)

    alpha = choose_alpha(lambda alpha: task.selection_score(score(alpha)), PROPAGATING)
    return propagate(graph, start, alpha), score(alpha)


def score_propagation(client: Client, scores: ScoreRows, validation: dict[str, float]) -> Propagated:
    """Test propagated labels, and compare them with the selected model on the validation nodes."""
    examples, best = client.data.test_examples(), client.progress.selection.best
    test = measure(client, scores[client.data.find_targets(examples).nodes], examples)
    is_better = best is not None and client.learner.task.selection_score(validation) > best
    return Propagated(client.name, {"validation": validation, "test": test}, is_better)


def client_evaluation(client: Client, scoring: Scoring) -> Script[ClientEvaluation]:
    """Client column: score the model on a split. If the server gets metrics, it decides whether this model is best."""
    is_test = scoring.split == TEST
    examples = client.data.test_examples() if is_test else client.data.validation_examples()
    targets = client.data.find_targets(examples)
    if owner_leads(client.config):
        targets = yield from agree_on_targets(client, scoring.key, targets)
    if client.is_alone:  # also if the parties average predictions after training
        own = yield from client_scores(client, scoring, targets)
        predictions = None if own is None else client.learner.task.convert_scores(own)
    else:
        predictions = yield from client_prediction(client, scoring, targets)
    found: dict[str, float] = {}
    is_collapsed = False
    if client.has_labels:
        assert predictions is not None
        found, is_collapsed = evaluate(client, predictions, examples)
    if client.is_alone or keeps_scores(client.config):
        return ClientEvaluation(found, is_collapsed, None)
    key, values = scoring.metrics_key, [DIVERGED] if client.progress.diverged else list(found.values())
    if is_test and client.has_labels:
        values.append(COLLAPSED if client.progress.best_is_collapsed else SOUND)
    yield Send(Metrics(key, client.release.numbers("metrics", values, key)))
    verdict: Verdict = yield Receive((Verdict,), key)
    return ClientEvaluation(found, is_collapsed, verdict)


def agree_on_targets(client: Client, key: Key, targets: Targets) -> Script[Targets]:
    """Return the label owner's targets. The owner sends their nodes to the other clients, but no labels or examples."""
    (nodes,) = yield from adopt_owner_sets(client, key, [targets.nodes])
    return targets if client.has_labels else Targets.of_nodes(nodes)


def measure(client: Client, scores: ScoreRows, examples: NodeSet) -> dict[str, float]:
    """Return the metrics of released scores, or of their mean, at a client with labels."""
    return evaluate(client, client.learner.task.convert_scores(scores), examples)[0]


def evaluate(client: Client, predictions: ScoreRows, examples: NodeSet) -> tuple[dict[str, float], bool]:
    """Return the metrics of predictions in the unit of the labels, and whether the model has learned nothing.

    If a prediction is not finite, training ends with an error. In a race, the candidate loses instead, and there are no
    metrics.
    """
    assert client.party.labels is not None
    labels, task = client.party.labels[examples], client.learner.task
    if not np.isfinite(predictions).all():
        if client.progress.mark_divergence():
            return {}, False
        raise TrainingError(
            f"party {client.name!r}, after {client.progress.round} rounds: the predictions are not finite; training "
            "diverged. Lower train.learning_rate."
        )
    metrics = task.evaluate(predictions, labels)
    return metrics, task.is_collapsed(metrics, labels, client.party.classes)


def server_selection(server: Server, scoring: Scoring, loss: float | None = None) -> Script[None]:
    """Server column: evaluate a model on validation nodes, and broadcast whether it is the best so far."""
    progress, task = server.progress, server.task
    metrics = yield from server_evaluation(server, scoring)
    if keeps_scores(server.config):
        decision = yield from server_decision(server, scoring.metrics_key)
        progress.stopped, progress.ensemble = decision.stop, decision.ensemble
        return
    improved = False
    if progress.diverged:
        progress.stopped = True
        yield CandidateDiverged(progress.round)
    else:
        improved, last = progress.judge(task.selection_score(metrics), server.config.train)
        if improved:
            progress.ensemble = scoring.ensemble
        found = progress.round, VALIDATION, metrics, task.selected_by, loss, improved
        yield Evaluated(*found, last=last, ensemble=scoring.ensemble)
    yield Broadcast(Verdict(scoring.metrics_key, improved=improved, stop=progress.stopped))


def server_test(server: Server) -> Script[None]:
    """Server column: serve the test of the selected model."""
    scoring, progress = Scoring.of_test(server), server.progress
    metrics = yield from server_evaluation(server, scoring)
    if keeps_scores(server.config):
        return
    best, selected_by = progress.selection.best_round, server.task.selected_by
    yield Evaluated(best, TEST, metrics, selected_by, ensemble=scoring.ensemble)
    yield Broadcast(Verdict(scoring.metrics_key, improved=False, stop=True))


def server_evaluation(server: Server, scoring: Scoring) -> Script[dict[str, float]]:
    """Server column: aggregate; return the metrics, or {} if parties do not send them. The caller sends the verdict.

    In a race, a client can report that the candidate diverged; the result is then {}. With the metrics of the test, a
    client with labels also reports whether the selected model has learned nothing.
    """
    yield from _server_scores(server, scoring)
    if keeps_scores(server.config):
        return {}
    found = yield Receive((Metrics,), scoring.metrics_key)
    if server.progress.is_racing and any(message.values.tolist() == [DIVERGED] for message in found):
        server.progress.diverged = True
        return {}
    if scoring.split == TEST:
        count = len(server.task.metrics)
        flags = [message.values[count:].tolist() for message in found]
        for client, (message, flag) in enumerate(zip(found, flags, strict=True)):
            if server.identity.has_labels(client) and flag not in ([COLLAPSED], [SOUND]):
                server.refuse(message, f"expected {count} metrics and one flag, got {message.values.tolist()}.")
        if [COLLAPSED] in flags:
            yield Collapsed()
        found = [Metrics(each.key, each.values[:count]) for each in found]
    return compare_metrics(server, found)


def _server_scores(server: Server, scoring: Scoring) -> Script[None]:
    """Serve the scores of a split. The label owner, if there is one, first sends the nodes to the other clients."""
    num_examples = server.sizes.num_test if scoring.split == TEST else server.sizes.num_validation
    if server.identity.owner is not None:
        _, (nodes,) = yield from unite(server, scoring.key, 1)
        num_examples = len(nodes)
    yield from server_prediction(server, scoring, num_examples)


def compare_metrics(server: Server, messages: Sequence[Metrics]) -> dict[str, float]:
    """Return the metrics, which must be equal at all parties with labels."""
    names = [metric.name for metric in server.task.metrics]
    definable = np.array([not metric.can_be_undefined for metric in server.task.metrics])
    found: dict[str, NDArray[Any]] = {}
    for client, message in enumerate(messages):
        expected = names if server.identity.has_labels(client) else ()
        values = message.values
        if len(values) != len(expected):
            listed = ", ".join(expected) or "none"
            server.refuse(message, f"expected the metrics {listed}, got {len(values)} values.")
        undefined = np.isnan(values)
        # Without a known label all values are NaN, which is valid.
        if np.isinf(values).any() or not (undefined.all() or not undefined[definable].any()):
            server.refuse(message, "expected finite metrics, got NaN or infinity.")
        if expected:
            found[server.roster[client]] = values
    (first, agreed), *others = found.items()
    for party, values in others:
        if not np.array_equal(values, agreed, equal_nan=True):
            apart = "; ".join(
                f"{name}: party {first!r} {one}, party {party!r} {other}"
                for name, one, other in zip(names, agreed.tolist(), values.tolist(), strict=True)
                if one != other
            )
            raise ProtocolError(
                f"{messages[0].key}: parties computed different metrics, so their labels or splits differ: {apart}."
            )
    return dict(zip(names, agreed.tolist(), strict=True))
