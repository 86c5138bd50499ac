"""Joint inference over a split or over asked nodes, exact by default -> class probabilities and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from glasu.errors import ProtocolError, TrainingError
from glasu.keys import Phase
from glasu.model import metrics
from glasu.protocol.inference import client_inference, server_inference
from glasu.protocol.messages import (
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
    TensorMessage,
    Verdict,
    checked,
    exchange,
)
from glasu.protocol.sampling import checked_unions, client_sampling, server_sampling, unite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from glasu.codec.tensors import Kind
    from glasu.config import RunConfig
    from glasu.model.blocks import NodeSet
    from glasu.protocol.actor import Client
    from glasu.protocol.server import Server

Mask: TypeAlias = NDArray[np.bool_]  # of the asked nodes: which of them one client asked for
CHUNK_ROWS = 8192  # rows per message


def message_chunks(num_rows: int) -> list[slice]:
    """Divide rows into the chunks that travel in one message each; at least one, so that no exchange is empty."""
    return [slice(start, min(start + CHUNK_ROWS, num_rows)) for start in range(0, max(1, num_rows), CHUNK_ROWS)]


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
    mean = yield from _exchange_rows(client, own, Scores, JointScores, phase, round_index, top, asked)
    return np.asarray(mean.numpy())


def _is_sampled(config: RunConfig, phase: Phase) -> bool:
    """Tell whether neighbourhoods are sampled; prediction is always exact."""
    return config.train.sampled_evaluation and phase is Phase.EVALUATION


def _exchange_rows(
    client: Client,
    value: Tensor,
    kind: type[TensorMessage],
    answer_kind: type[TensorMessage],
    phase: Phase,
    round_index: int,
    layer: int,
    asked: Mask | None = None,
) -> Exchange[Tensor]:
    """Send a tensor in chunks of rows, all together, and return what the server made of it, or of the asked rows."""
    what: Kind = "probabilities" if kind is Scores else "representation"
    chunks, messages = message_chunks(len(value)), []
    for chunk, rows in enumerate(chunks):
        key = client.key(phase, round_index, layer, chunk)
        messages.append(kind(key=key, value=client.release.tensor(what, value[rows], key).payload))
    answers = yield messages
    _, columns = value.shape if kind is Scores else client.joint_shape(value)
    parts = []
    for answer, message, rows in zip(answers, messages, chunks, strict=True):
        expected = rows.stop - rows.start if asked is None else np.count_nonzero(asked[rows])
        shape = (int(expected), columns)
        parts.append(client.read(what, checked(answer, message.key, answer_kind), shape))
    return client.joined(parts)


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
            result = yield from _exchange_rows(client, partial, Partial, Joint, phase, round_index, layer)
        hidden = result
    return result


def _sampled_forward(client: Client, round_index: int, nodes: NodeSet, phase: Phase) -> Exchange[Tensor]:
    """Compute H[L] at the nodes on sampled neighbourhoods, as a training round would."""
    distinct, places = np.unique(nodes, return_inverse=True)  # node sets are sorted; the answer has the asked order
    (sample,) = yield from client_sampling(client, [round_index], batches=[distinct], purpose="evaluation neighbors")
    batch = client.batch(sample, to_learn=False)
    hidden, _ = yield from client_inference(client, client.passes(batch, None), round_index, phase)
    joint: Tensor = hidden[places]
    return joint


def server_evaluation(server: Server, round_index: int, num_nodes: int, task: str) -> Exchange[dict[str, float]]:
    """Server column: aggregate chunk by chunk, and return the metrics; the verdict is the caller's to answer."""
    if server.owner >= 0:
        messages = yield from server.receive((Proposal,), Phase.EVALUATION, round_index, -1)
        server.answer(Agreed)
        num_nodes = len(unite(messages)[0])
    yield from server_prediction(server, round_index, num_nodes, Phase.EVALUATION)
    messages = yield from server.receive((Metrics,), Phase.EVALUATION, round_index, -2)
    names = metrics.NAMES[task]
    return dict(zip(names, _common_metrics(server, messages, names).tolist(), strict=True))


def _common_metrics(server: Server, messages: Sequence[Message], names: Sequence[str]) -> NDArray[np.float64]:
    """Return what all parties with labels found, or refuse what cannot be; all NaN: no label was known."""
    found: dict[str, NDArray[np.float64]] = {}
    for client, message in enumerate(messages):
        assert isinstance(message, Metrics)
        party, values = server.roster[client], message.values
        wanted = len(names) if server.owner in (-1, client) else 0
        where = f"party {party!r}, {message.key}"
        if len(values) != wanted:
            raise ProtocolError(f"{where}: expected {wanted} of the metrics {', '.join(names)}, got {len(values)}.")
        if not (np.isfinite(values).all() or np.isnan(values).all()):
            raise ProtocolError(f"{where}: expected metrics that are numbers, got NaN or infinity.")
        if wanted:
            found[party] = values
            first, common = next(iter(found.items()))
            if not np.array_equal(values, common, equal_nan=True):
                raise ProtocolError(
                    f"{where}: found other metrics than party {first!r}; their labels, splits or versions differ."
                )
    return next(iter(found.values()))


def server_prediction(
    server: Server, round_index: int, num_nodes: int, phase: Phase, asked: Sequence[Mask] | None = None
) -> Script:
    """Server column of an exact or sampled joint inference, and of the mean of the class probabilities.

    All clients receive the mean or, where `asked` tells which rows each of them asked for, each its own rows.
    """
    if _is_sampled(server.config, phase):
        yield from server_sampling(server, round_index, "evaluation neighbors")
        yield from server_inference(server, round_index, phase)
    else:
        for layer in server.layers:
            rows = num_nodes if layer == server.layers[-1] else server.sizes.num_nodes
            for chunk in range(len(message_chunks(rows))):
                messages = yield from server.receive((Partial,), phase, round_index, layer, chunk)
                server.answer(Joint, server.aggregated("representation", messages))
    if server.owner < 0:
        for chunk, part in enumerate(message_chunks(num_nodes)):
            messages = yield from server.receive((Scores,), phase, round_index, server.config.model.num_layers, chunk)
            mean = server.aggregated("probabilities", messages, server.mean)
            if asked is None:
                server.answer(JointScores, mean)
            else:
                server.answer_each(JointScores, [mean[own[part]] for own in asked])
