"""Joint inference over a split or over asked nodes, exact by default -> class probabilities and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from glasu.errors import ProtocolError, TrainingError
from glasu.keys import Phase
from glasu.model import metrics
from glasu.protocol.chunks import answer_rows, exchange_rows, first_row
from glasu.protocol.inference import client_inference, server_inference
from glasu.protocol.messages import (
    NO_NUMBERS,
    Agreed,
    Evaluating,
    Exchange,
    Joint,
    JointScores,
    Message,
    Metrics,
    Partial,
    Proposal,
    Scores,
    Script,
    Verdict,
    exchange,
)
from glasu.protocol.sampling import checked_unions, client_sampling, server_sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from glasu.config import RunConfig
    from glasu.model.blocks import NodeSet
    from glasu.protocol.actor import Client
    from glasu.protocol.server import Server

Mask: TypeAlias = NDArray[np.bool_]  # of the asked nodes: which of them one client asked for


def client_evaluation(
    client: Client, round_index: int, split: str
) -> Exchange[tuple[dict[str, float], Verdict | None]]:
    """Client column: score the model on a split; the server says whether it is the best so far.

    Returns:
        The metrics (empty at a client without labels), and the verdict (None where there is no server).
    """
    nodes = client.evaluation_nodes(split)
    if client.owner >= 0:
        nodes = yield from announce(client, round_index, nodes, Phase.EVALUATION)
    probabilities = yield from client_prediction(client, round_index, nodes, Phase.EVALUATION)
    found: dict[str, float] = {}
    if client.has_labels:
        labels = client.party.labels
        assert labels is not None
        if not np.isfinite(probabilities).all():
            raise TrainingError(
                f"party {client.party.name!r}, after {round_index} rounds: the model's predictions are not numbers; "
                "training diverged. Lower train.learning_rate."
            )
        found = metrics.evaluate(probabilities, labels[nodes], client.config.train.task)
    if client.selection is not None:
        return found, None
    key = client.key(Phase.EVALUATION, round_index, -2)
    losses = client.take_losses(key)
    values = client.release.numbers("metrics", list(found.values()), key)
    verdict = yield from exchange(Metrics(key=key, values=values, losses=losses), Verdict)
    return found, verdict


def announce(client: Client, round_index: int, nodes: NodeSet, phase: Phase) -> Exchange[NodeSet]:
    """Learn which nodes are asked for; whoever asks sends their numbers, nobody else sends any."""
    key = client.key(phase, round_index)
    proposal = Proposal(key=key, node_sets=client.release.node_sets([nodes], key))
    answer = yield from exchange(proposal, Agreed)
    return checked_unions(answer, [nodes], client.party.num_nodes)[0]


def client_prediction(
    client: Client, round_index: int, nodes: NodeSet, phase: Phase, asked: Mask | None = None
) -> Exchange[NDArray[Any]]:
    """Client column: return the class probabilities of the nodes.

    With labels everywhere they are the mean of the clients' own (the client's own where there is no server), of all
    nodes or of those that this client asked for; with labels at one party they are the owner's, and the others return
    an empty array.
    """
    client.model.eval()
    if _is_sampled(client.config, phase):
        joint = yield from _sampled_forward(client, round_index, nodes, phase)
    else:
        joint = yield from _exact_forward(client, round_index, nodes, phase)
    own = client.probabilities(joint) if client.has_labels else None
    client.model.train()
    if own is None:
        return np.empty((0, 0))
    if client.owner >= 0 or client.selection is not None:
        return np.asarray(own.numpy())
    top = client.config.model.num_layers
    key = client.key(phase, round_index, top)
    message = Scores(key=key, value=client.release.tensor("probabilities", own, key).payload)
    answers = yield from exchange_rows(message, len(own), JointScores)
    mean = client.read_rows("probabilities", answers, (len(own), own.shape[1]), asked).numpy()
    if error := metrics.find_probability_error(mean, client.config.train.task):
        raise ProtocolError(f"party {client.party.name!r}, {key}: class probabilities from the server: {error}.")
    return np.asarray(mean)


def _is_sampled(config: RunConfig, phase: Phase) -> bool:
    """Tell whether neighbourhoods are sampled; prediction is always exact."""
    return config.train.sampled_evaluation and phase is Phase.EVALUATION


def _exact_forward(client: Client, round_index: int, nodes: NodeSet, phase: Phase) -> Exchange[Tensor]:
    """Compute H[L] at the nodes: all rows at lower layers, so that no index set travels; the asked ones at the last."""
    everything, last = np.arange(client.party.num_nodes), client.config.model.num_layers - 1
    hidden, initial = client.exact_start()
    total, done = last * len(everything) + len(nodes), 0
    result: Tensor
    for layer in range(last + 1):
        targets = nodes if layer == last else everything
        partial = client.empty_rows(len(targets))
        for rows, computed in client.exact_layer(layer, hidden, initial, targets):
            partial[rows] = computed
            done += len(computed)
            if len(computed) < len(targets):  # a small graph needs one product, and no news of it
                yield Evaluating(client.round, done / total, client.party.name)
        result = partial
        if layer in client.model.aggregation_layers:
            key = client.key(phase, round_index, layer)
            sent = client.release.tensor("representation", partial, key)
            answers = yield from exchange_rows(Partial(key=key, value=sent.payload), len(partial), Joint)
            result = client.read_rows("representation", answers, client.joint_shape(partial))
        hidden = result
    return result


def _sampled_forward(client: Client, round_index: int, nodes: NodeSet, phase: Phase) -> Exchange[Tensor]:
    """Compute H[L] at the nodes on sampled neighbourhoods, as a training round would."""
    distinct, places = np.unique(nodes, return_inverse=True)  # node sets are sorted; the answer has the asked order
    (sample,) = yield from client_sampling(client, [round_index], batches=[distinct], purpose="evaluation neighbors")
    batch = client.gather(sample, to_learn=False)
    hidden, _ = yield from client_inference(client, client.passes(batch, None), round_index, phase)
    joint: Tensor = hidden[places]
    return joint


def server_evaluation(server: Server, round_index: int, num_nodes: int, task: str) -> Exchange[dict[str, float]]:
    """Server column: aggregate chunk by chunk, and return the metrics; the verdict is the caller's to answer."""
    if server.owner >= 0:
        num_nodes = len((yield from server_announcement(server, round_index, Phase.EVALUATION))[1])
    yield from server_prediction(server, round_index, num_nodes, Phase.EVALUATION)
    messages = yield from server.receive((Metrics,), Phase.EVALUATION, round_index, -2)
    return _agreed_metrics(server, messages, metrics.NAMES[task])


def server_announcement(
    server: Server, round_index: int, phase: Phase
) -> Exchange[tuple[Sequence[Message], NDArray[np.int32]]]:
    """Server column of `announce`: return who asked for what, and all nodes that are asked for."""
    asked = ("asked nodes", round_index, server.config.model.num_layers)
    messages = yield from server.receive((Proposal,), phase, round_index, -1, proposed=[asked])
    server.answer(Agreed)
    return messages, server.answers[0].node_sets[0]


def _agreed_metrics(server: Server, messages: Sequence[Message], names: Sequence[str]) -> dict[str, float]:
    """Return what every party with labels found, or refuse: who sent other metrics than expected, who differs."""
    found: dict[str, NDArray[Any]] = {}
    for client, message in enumerate(messages):
        party, values = server.roster[client], message.values if isinstance(message, Metrics) else NO_NUMBERS
        expected = names if server.owner in (-1, client) else ()
        if len(values) != len(expected):
            listed = ", ".join(expected) or "none"
            raise ProtocolError(
                f"party {party!r}, {message.key}: expected the metrics {listed}, got {len(values)} values.", party=party
            )
        if not (np.isfinite(values).all() or np.isnan(values).all()):  # all NaN: no label was known
            raise ProtocolError(
                f"party {party!r}, {message.key}: expected metrics that are numbers, got NaN or infinity.", party=party
            )
        if expected:
            found[party] = values
    (first, agreed), *others = found.items()
    for party, values in others:
        if not np.array_equal(values, agreed, equal_nan=True):
            apart = "; ".join(
                f"{name}: party {first!r} {one}, party {party!r} {other}"
                for name, one, other in zip(names, agreed.tolist(), values.tolist(), strict=True)
                if one != other
            )
            raise ProtocolError(
                f"{messages[0].key}: parties found different metrics; their labels or splits differ: {apart}."
            )
    return dict(zip(names, agreed.tolist(), strict=True))


def server_prediction(
    server: Server, round_index: int, num_nodes: int, phase: Phase, asked: Sequence[Mask] | None = None
) -> Script:
    """Server column of an exact or sampled joint inference, and of the mean of the class probabilities.

    All clients receive the mean or, where `asked` tells which rows each of them asked for, each its own rows.
    """
    if _is_sampled(server.config, phase):
        yield from server_sampling(server, [round_index], "evaluation neighbors")
        yield from server_inference(server, round_index, phase)
    else:
        rows = [server.sizes.num_nodes] * (len(server.layers) - 1) + [num_nodes]
        yield from server_inference(server, round_index, phase, rows)

    def respond(messages: Sequence[Message]) -> None:
        mean = server.aggregated("probabilities", messages, server.mean)
        if asked is None:
            server.answer(JointScores, mean)
        else:
            start = first_row(messages[0].key.chunk)
            server.answer_each(JointScores, [mean[own[start : start + len(mean)]] for own in asked])

    if server.owner < 0:
        top = server.config.model.num_layers
        yield from answer_rows(server, (Scores,), phase, round_index, top, respond, num_nodes)
