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
from glasu.protocol.state import DIVERGED
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from glasu.model.blocks import NodeSet
    from glasu.model.task import ScoreRows
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

METRICS_LAYER = -2  # used as `layer` in the keys of metrics and verdicts
COLLAPSED, SOUND = 1.0, 0.0  # a flag after the test metrics: COLLAPSED if the selected model has learned nothing


class ClientEvaluation(NamedTuple):
    """The result of an evaluation at a client."""

    metrics: dict[str, float]  # empty at a client without labels
    is_collapsed: bool  # whether the model has learned nothing (`Task.is_collapsed`); False without labels
    verdict: Verdict | None  # the server's verdict; None if the clients decide


def client_selection(client: Client, loss: float | None, *, ensemble: bool = False) -> Script[None]:
    """Client column: evaluate on validation nodes; keep the weights if they are the best so far.

    With `ensemble`, the mean of the scores that the clients compute alone is evaluated instead of the joint model.
    """
    progress, task, round_index = client.progress, client.learner.task, _find_key_round(client, ensemble)
    evaluation = client_evaluation(client, round_index, ensemble=ensemble)
    metrics, is_collapsed, verdict = yield Timed(evaluation, "evaluation")
    if verdict is not None:
        improved, progress.stopped = verdict.improved, verdict.stop
    else:
        improved = last = False
        if client.has_labels:
            improved, last = progress.judge(task.selection_score(metrics), client.config.train)
        if not client.is_alone:
            key = client.identity.key(Phase.EVALUATION, round_index, METRICS_LAYER)
            best = ensemble if improved else progress.ensemble
            improved, progress.stopped = yield from client_decision(
                client, key, metrics, improved=improved, stop=progress.stopped, ensemble=best
            )
        if client.has_labels:
            party = client.name if client.is_alone else None
            found = progress.position, "validation", metrics, task.selected_by, loss, improved, party, last
            yield Evaluated(*found, ensemble=ensemble)
    if improved:
        progress.best_weights, progress.ensemble = client.learner.weights(), ensemble
        progress.best_is_collapsed = is_collapsed


def _find_key_round(role: Client | Server, ensemble: bool) -> int:
    """Return the `round` in the keys of an evaluation on validation nodes.

    For the ensemble, it is T+2 because smaller numbers have other uses.
    """
    return role.config.train.num_rounds + 2 if ensemble else role.progress.round


def client_test(client: Client) -> Script[dict[str, float]]:
    """Client column: test the selected weights; return the metrics."""
    client.learner.model.load_state_dict(client.progress.best_weights)
    propagated = None
    can_propagate = client.has_labels and client.party.graph.num_edges > 0 and client.learner.task.examples_are_nodes
    if client.is_alone and can_propagate and not find_method(client.requested).one_party:
        propagated = propagate_labels(client)
    progress, round_index = client.progress, client.config.train.num_rounds + 1
    evaluation = client_evaluation(client, round_index, is_test=True, ensemble=progress.ensemble)
    metrics, _, verdict = yield Timed(evaluation, "evaluation")
    if progress.best_is_collapsed:
        yield Collapsed(client.name if client.is_alone else None)
    if verdict is None and client.has_labels:
        best, selected_by = progress.selection.best_round, client.learner.task.selected_by
        party = client.name if client.is_alone else None
        yield Evaluated(best, "test", metrics, selected_by, party=party, ensemble=progress.ensemble)
    if propagated is not None:
        yield score_propagation(client, *propagated)
    return dict(metrics)


def client_subsets(client: Client) -> Script[None]:
    """Client column: score the selected model on validation nodes for every subset of `list_subsets`."""
    examples = client.data.validation_examples()
    targets = client.data.find_targets(examples)
    for index, present in enumerate(list_subsets(client.config, client.identity)):
        key = _make_subset_key(client, index)
        if client.identity.owner is not None:
            targets = yield from agree_on_targets(client, key, targets)
        ensemble = client.progress.ensemble
        predicted = yield from client_prediction(client, key, targets, present=present, ensemble=ensemble)
        found = evaluate(client, predicted, examples)[0] if client.has_labels else {}
        if found:
            names = tuple(client.identity.names[each] for each in present)
            client.progress.subsets = {**client.progress.subsets, names: found}
        key = key.at(METRICS_LAYER)
        yield Send(Metrics(key, client.release.numbers("metrics", list(found.values()), key)))


def server_subsets(server: Server) -> Script[None]:
    """Server column of `client_subsets`."""
    for index, present in enumerate(list_subsets(server.config, server.identity)):
        key, num_nodes = _make_subset_key(server, index), server.sizes.num_validation
        if server.identity.owner is not None:
            _, (nodes,) = yield from unite(server, key, 1)
            num_nodes = len(nodes)
        yield from server_prediction(server, key, num_nodes, present=present, ensemble=server.progress.ensemble)
        metrics = compare_metrics(server, (yield Receive((Metrics,), key.at(METRICS_LAYER))))
        yield SubsetScored(tuple(server.roster[each] for each in present), metrics)


def _make_subset_key(role: Client | Server, index: int) -> Key:
    """Return the key of the inference with a subset. In the phase PREDICTION, an inference uses every edge."""
    return role.identity.key(Phase.PREDICTION, role.config.train.num_rounds + 2 + index)


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


def client_evaluation(
    client: Client, round_index: int, *, is_test: bool = False, ensemble: bool = False
) -> Script[ClientEvaluation]:
    """Client column: score the model on a split. If the server gets metrics, it decides whether this model is best."""
    key = client.identity.key(Phase.EVALUATION, round_index)
    examples = client.data.test_examples() if is_test else client.data.validation_examples()
    targets = client.data.find_targets(examples)
    if owner_leads(client.config):
        targets = yield from agree_on_targets(client, key, targets)
    if client.is_alone:  # also if the parties average predictions after training
        own = yield from client_scores(client, key, targets)
        predictions = None if own is None else client.learner.task.convert_scores(own)
    else:
        predictions = yield from client_prediction(client, key, targets, ensemble=ensemble)
    found: dict[str, float] = {}
    is_collapsed = False
    if client.has_labels:
        assert predictions is not None
        found, is_collapsed = evaluate(client, predictions, examples)
    if client.is_alone or keeps_scores(client.config):
        return ClientEvaluation(found, is_collapsed, None)
    key, values = key.at(METRICS_LAYER), [DIVERGED] if client.progress.diverged else list(found.values())
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


def server_selection(server: Server, loss: float | None, *, ensemble: bool = False) -> Script[None]:
    """Server column: evaluate on validation nodes, and broadcast whether the model is the best so far."""
    progress, task, round_index = server.progress, server.task, _find_key_round(server, ensemble)
    key = server.identity.key(Phase.EVALUATION, round_index, METRICS_LAYER)
    metrics = yield from server_evaluation(server, round_index, server.sizes.num_validation, ensemble=ensemble)
    if keeps_scores(server.config):
        decision = yield from server_decision(server, key)
        progress.stopped, progress.ensemble = decision.stop, decision.ensemble
        return
    improved = False
    if progress.diverged:
        progress.stopped = True
        yield CandidateDiverged(progress.round)
    else:
        improved, last = progress.judge(task.selection_score(metrics), server.config.train)
        if improved:
            progress.ensemble = ensemble
        found = progress.round, "validation", metrics, task.selected_by, loss, improved
        yield Evaluated(*found, last=last, ensemble=ensemble)
    yield Broadcast(Verdict(key, improved=improved, stop=progress.stopped))


def server_test(server: Server) -> Script[None]:
    """Server column: serve the test of the selected model."""
    round_index, progress = server.config.train.num_rounds + 1, server.progress
    metrics = yield from server_evaluation(
        server, round_index, server.sizes.num_test, is_test=True, ensemble=progress.ensemble
    )
    if keeps_scores(server.config):
        return
    best, selected_by = progress.selection.best_round, server.task.selected_by
    yield Evaluated(best, "test", metrics, selected_by, ensemble=progress.ensemble)
    key = server.identity.key(Phase.EVALUATION, round_index, METRICS_LAYER)
    yield Broadcast(Verdict(key, improved=False, stop=True))


def server_evaluation(
    server: Server, round_index: int, num_nodes: int, *, is_test: bool = False, ensemble: bool = False
) -> Script[dict[str, float]]:
    """Server column: aggregate; return the metrics, or {} if parties do not send them. The caller sends the verdict.

    In a race, a client can report that the candidate diverged; the result is then {}. With the metrics of the test, a
    client with labels also reports whether the selected model has learned nothing.
    """
    key = server.identity.key(Phase.EVALUATION, round_index)
    if server.identity.owner is not None:
        _, (nodes,) = yield from unite(server, key, 1)
        num_nodes = len(nodes)
    yield from server_prediction(server, key, num_nodes, ensemble=ensemble)
    if keeps_scores(server.config):
        return {}
    found = yield Receive((Metrics,), key.at(METRICS_LAYER))
    if server.progress.is_racing and any(message.values.tolist() == [DIVERGED] for message in found):
        server.progress.diverged = True
        return {}
    if is_test:
        count = len(server.task.metrics)
        flags = [message.values[count:].tolist() for message in found]
        for client, (message, flag) in enumerate(zip(found, flags, strict=True)):
            if server.identity.has_labels(client) and flag not in ([COLLAPSED], [SOUND]):
                server.refuse(message, f"expected {count} metrics and one flag, got {message.values.tolist()}.")
        if [COLLAPSED] in flags:
            yield Collapsed()
        found = [Metrics(each.key, each.values[:count]) for each in found]
    return compare_metrics(server, found)


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
