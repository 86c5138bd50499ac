"""Averages of class probabilities, and their propagation over the parties' edges; client and server columns.

An average takes one exchange: clients send probabilities for the same rows, and the server returns the mean of what it
received. If one party has the labels, only this owner sends probabilities, and the mean equals them.

A smoothed prediction takes two exchanges. The first averages the probabilities at all nodes. Then every party with
edges propagates this average, and the second exchange averages the propagated rows. A party without edges contributes
nothing to the second exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glasu.errors import ProtocolError
from glasu.model.aggregation import Mean
from glasu.model.propagation import propagate
from glasu.privacy.masking import Requested
from glasu.protocol.chunks import Chunk, exchange_rows, receive_chunk
from glasu.protocol.messages import JointScores, Scores
from glasu.protocol.requests import Broadcast, Scatter, Script
from glasu.wire.message_key import Key
from glasu.wire.tensor_kinds import PROBABILITIES

if TYPE_CHECKING:
    from glasu.model.blocks import NodeSet
    from glasu.model.task import ScoreRows
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server
    from glasu.protocol.state import Identity


def client_average(
    client: Client,
    key: Key,
    own: ScoreRows | None,
    nodes: NodeSet,
    *,
    num_columns: int | None = None,
    requested: Requested | None = None,
) -> Script[ScoreRows]:
    """Client column: return the mean of the class probabilities that clients send.

    Args:
        client: the client.
        key: the key of the exchange.
        own: this client's probabilities; None: it contributes nothing.
        nodes: the nodes of the rows, or the examples of a task whose examples are not nodes.
        num_columns: the number of classes, if `own` is None and this client knows it.
        requested: the rows that this client receives; None: all.
    """
    import torch

    task, sent = client.learner.task, None
    if own is not None:
        known = nodes if task.examples_are_nodes else None  # the ledger counts releases per node
        sent = client.release_tensor(PROBABILITIES, torch.from_numpy(own), key, known)
    shape = len(nodes), num_columns if own is None else own.shape[1]
    mean = (yield from exchange_rows(client, key, (Scores, JointScores), sent, shape, requested=requested)).numpy()
    if error := task.find_score_error(mean):
        raise ProtocolError(f"party {client.name!r}, {key}: {task.scores_name} from the server: {error}.")
    return np.asarray(mean)


def server_average(
    server: Server,
    key: Key,
    num_rows: int,
    requested: Sequence[Requested] | None = None,
    *,
    present: Sequence[int] | None = None,
    from_any: bool = False,
) -> Script[None]:
    """Server column: send the mean to all clients, or send each client the rows that it requested.

    Args:
        server: the server.
        key: the key of the exchange.
        num_rows: the number of rows in the exchange.
        requested: for each client, the rows that it receives; None: all.
        present: the clients that send probabilities if all parties have labels; None: all clients.
        from_any: whether any client may contribute nothing; otherwise every client with labels sends probabilities.
    """
    encoding = server.shapes.encodings[PROBABILITIES]
    senders = present if server.identity.owner is None else [server.identity.owner]
    scores: Chunk | None = None
    while scores is None or not scores.is_last:
        scores = yield from receive_chunk(server, Scores, key, scores, num_rows, senders, from_any=from_any)
        aggregation = Mean(len(scores.tensors))  # scores are averaged even if layers concatenate
        mean = aggregation.combine_partials(encoding, scores.payloads, scores.key, scores.first_row)
        scores.check_answer(mean)
        if requested is None:
            yield Broadcast(JointScores(scores.key, mean))
            continue
        masks = [mask[scores.first_row : scores.end] for mask in requested]
        pairs = zip(server.make_client_keys(scores.key), masks, strict=True)
        yield Scatter(tuple(JointScores(own, encoding.answer.select_rows(mean, mask)) for own, mask in pairs))


def client_average_all(client: Client, key: Key, own: ScoreRows | None) -> Script[ScoreRows]:
    """Client column: return the mean at all nodes, given this client's class probabilities at all nodes."""
    return (yield from client_average(client, _make_first_key(client, key), own, np.arange(client.data.num_nodes)))


def server_average_all(server: Server, key: Key) -> Script[None]:
    """Server column of `client_average_all`."""
    yield from server_average(server, _make_first_key(server, key), server.sizes.num_nodes)


def client_average_propagated(
    client: Client,
    key: Key,
    mean: ScoreRows,
    alpha: float | None,
    nodes: NodeSet,
    *,
    requested: Requested | None = None,
    place: int = 0,
) -> Script[ScoreRows]:
    """Client column: propagate the mean over this client's edges; return the average of all clients' results.

    Args:
        client: the client.
        key: phase and round.
        mean: the mean class probabilities at all nodes.
        alpha: the weight of the mean, see `propagate`; None at a party that had no edges in training.
        nodes: the nodes whose rows are averaged.
        requested: the rows that this client receives; None: all. If one party has the labels, `find_receivers` decides.
        place: distinguishes several exchanges of this kind with the same key.
    """
    own = None
    if alpha is not None and client.party.graph.num_edges:
        own = propagate(client.party.graph, mean, alpha)[nodes]
    if client.identity.owner is not None:
        requested = find_receivers(client.identity, len(nodes))[client.identity.index]
    key = _make_second_key(client, key, place)
    average = client_average(client, key, own, nodes, num_columns=mean.shape[1], requested=requested)
    return (yield from average)


def server_average_propagated(
    server: Server, key: Key, num_rows: int, requested: Sequence[Requested] | None = None, place: int = 0
) -> Script[None]:
    """Server column of `client_average_propagated`."""
    if server.identity.owner is not None:
        requested = find_receivers(server.identity, num_rows)
    yield from server_average(server, _make_second_key(server, key, place), num_rows, requested, from_any=True)


def find_receivers(identity: Identity, num_rows: int) -> list[Requested]:
    """Return for each client the rows of a smoothed prediction that it receives: all at the label owner, else none."""
    return [np.full(num_rows, identity.has_labels(client)) for client in range(identity.num_clients)]


def _make_first_key(role: Client | Server, key: Key) -> Key:
    return key.at(role.config.model.num_layers)


def _make_second_key(role: Client | Server, key: Key, place: int) -> Key:
    return key.at(role.config.model.num_layers + 1 + place)
