"""Joint inference over a split or over requested nodes, exact by default: class probabilities and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from glasu.config import RunConfig
from glasu.errors import ProtocolError, TrainingError
from glasu.model.aggregation import Mean
from glasu.protocol.chunks import answer_rows, receive_rows, send_rows
from glasu.protocol.inference import client_inference, exchange_partial, server_inference
from glasu.protocol.messages import JointScores, Metrics, Scores, TensorMessage, Verdict
from glasu.protocol.requests import Broadcast, Receive, Scatter, Script, Send
from glasu.protocol.sampling import agree, client_sampling, server_sampling, unite
from glasu.protocol.walk import walk_forward
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.blocks import NodeSet
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

Mask: TypeAlias = NDArray[np.bool_]  # over the requested nodes: those that one client requested
METRICS_LAYER = -2  # stands for the layer in the keys of metrics and verdicts


def client_evaluation(client: Client, round_index: int, split: str) -> Script[tuple[dict[str, float], Verdict | None]]:
    """Client column: score the model on a split; the server decides whether it is the best so far.

    Returns:
        The metrics (empty at a client without labels), and the verdict (None where there is no server).
    """
    key = client.identity.key(Phase.EVALUATION, round_index)
    nodes = client.data.evaluation_nodes(split)
    if client.identity.owner >= 0:
        (nodes,) = yield from agree(client, key, [nodes])
    probabilities = yield from client_prediction(client, key, nodes)
    found: dict[str, float] = {}
    if client.has_labels:
        labels = client.party.labels
        assert labels is not None
        if not np.isfinite(probabilities).all():
            raise TrainingError(
                f"party {client.name!r}, after {round_index} rounds: the predictions are not finite; training "
                "diverged. Lower train.learning_rate."
            )
        found = client.learner.task.evaluate(probabilities, labels[nodes])
    if client.progress.selection is not None:
        return found, None
    key = key.at(METRICS_LAYER)
    yield Send(Metrics(key, client.release.numbers("metrics", list(found.values()), key)))
    verdict: Verdict = yield Receive((Verdict,), key)
    return found, verdict


def client_prediction(client: Client, key: Key, nodes: NodeSet, requested: Mask | None = None) -> Script[NDArray[Any]]:
    """Client column: return the class probabilities of the nodes.

    With labels at all clients they are the mean of the clients' own (the client's own where there is no server), of all
    nodes or of those that this client requested. With labels at one party they are the owner's; the other clients
    return an empty array.
    """
    model = client.learner.model
    model.eval()
    if _is_sampled(client.config, key.phase):
        joint = yield from _sampled_forward(client, key, nodes)
    else:
        joint = yield from _exact_forward(client, key, nodes)
    own = client.learner.probabilities(joint) if client.has_labels else None
    model.train()
    if own is None:
        return np.empty((0, 0))
    if client.identity.owner >= 0 or client.progress.selection is not None:
        return np.asarray(own.numpy())
    key = key.at(client.config.model.num_layers)
    rows, columns = own.shape
    yield from send_rows(client, Scores, key, client.release.tensor("probabilities", own, key).payload)
    answers = yield from receive_rows(client, JointScores, key, rows)
    mean = client.read_rows("probabilities", answers, (rows, columns), requested).numpy()
    if error := client.learner.task.find_score_error(mean):
        raise ProtocolError(f"party {client.name!r}, {key}: class probabilities from the server: {error}.")
    return np.asarray(mean)


def _is_sampled(config: RunConfig, phase: Phase) -> bool:
    """Return whether neighbourhoods are sampled. Prediction is always exact."""
    return config.train.sampled_evaluation and phase is Phase.EVALUATION


def _exact_forward(client: Client, key: Key, nodes: NodeSet) -> Script[Tensor]:
    """Compute H[L] at the nodes with every edge.

    Lower layers are computed at all nodes, so that no index set is sent; the last one at the requested nodes.
    """

    def combine(layer: int, partial: Tensor) -> Script[Tensor]:
        joint, _ = yield from exchange_partial(client, key.at(layer), partial)
        return joint

    return (yield from walk_forward(client, client.learner.exact_inference(nodes), combine))


def _sampled_forward(client: Client, key: Key, nodes: NodeSet) -> Script[Tensor]:
    """Compute H[L] at the nodes on sampled neighbourhoods, as a training round does."""
    distinct, places = np.unique(nodes, return_inverse=True)  # node sets are sorted; the result has the given order
    (sample,) = yield from client_sampling(client, [key.round], [distinct], Phase.EVALUATION_SAMPLING)
    batch = client.learner.gather(sample, with_labels=False)
    hidden, _ = yield from client_inference(client, client.learner.step(batch, None), key)
    joint: Tensor = hidden[places]
    return joint


def server_evaluation(server: Server, round_index: int, num_nodes: int) -> Script[dict[str, float]]:
    """Server column: aggregate, and return the metrics. The caller broadcasts the verdict."""
    key = server.key(Phase.EVALUATION, round_index)
    if server.owner >= 0:
        _, (nodes,) = yield from unite(server, key, 1)
        num_nodes = len(nodes)
    yield from server_prediction(server, key, num_nodes)
    found = yield Receive((Metrics,), key.at(METRICS_LAYER))
    return _compare_metrics(server, found)


def _compare_metrics(server: Server, messages: Sequence[Metrics]) -> dict[str, float]:
    """Return the metrics, which must be equal at all parties with labels."""
    names = [metric.name for metric in server.task.metrics]
    found: dict[str, NDArray[Any]] = {}
    for client, message in enumerate(messages):
        expected = names if server.owner in (-1, client) else ()
        values = message.values
        if len(values) != len(expected):
            listed = ", ".join(expected) or "none"
            server.refuse(message, f"expected the metrics {listed}, got {len(values)} values.")
        if not (np.isfinite(values).all() or np.isnan(values).all()):  # all NaN: no label was known
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
                f"{messages[0].key}: parties found different metrics, so their labels or splits differ: {apart}."
            )
    return dict(zip(names, agreed.tolist(), strict=True))


def server_prediction(
    server: Server, key: Key, num_nodes: int, requested: Sequence[Mask] | None = None
) -> Script[None]:
    """Server column of a joint inference and of the mean of the class probabilities.

    All clients receive the mean; with `requested`, each client receives the rows that it requested.
    """
    num_rows: Mapping[int, int | None]
    if _is_sampled(server.config, key.phase):
        sizes = yield from server_sampling(server, [key.round], Phase.EVALUATION_SAMPLING)
        num_rows = server.known_rows(key.round, sizes)
    else:
        lower = server.aggregation_layers[:-1]
        num_rows = {**dict.fromkeys(lower, server.sizes.num_nodes), server.aggregation_layers[-1]: num_nodes}
    yield from server_inference(server, key, num_rows)
    if server.owner >= 0:
        return
    mean = Mean(server.num_clients)  # whatever the layers' aggregation is

    def respond(scores: Sequence[TensorMessage], answer: Key, first_row: int) -> Broadcast | Scatter:
        rows = server.aggregate(scores, answer, first_row, mean)
        if requested is None:
            return Broadcast(JointScores(answer, rows))
        own = [rows[mask[first_row : first_row + len(rows)]] for mask in requested]
        pairs = zip(server.keys_to_each(answer), own, strict=True)
        return Scatter(tuple(JointScores(key, part) for key, part in pairs))

    yield from answer_rows(server, (Scores,), key.at(server.config.model.num_layers), respond, num_nodes)
