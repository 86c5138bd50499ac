"""Algorithms 2 and 5: agree on the node sets S[l] of all rounds in a window.

A window is a group of successive rounds (`train.prefetch`).

In Algorithm 2 the server draws the batch S[L] and broadcasts it. Here every client with labels draws the same batch
from `train.seed`, so it is not sent. In Algorithm 5 the label owner draws the batch and sends it.

Sampling does not depend on weights. So the clients agree on the sets of the next window during the rounds of the
current window. `training.py` interleaves the agreement with the rounds, so it needs no extra exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from glasu.config import RunConfig
from glasu.errors import ProtocolError
from glasu.model.sampler import Sample, draw_batch, find_sampler
from glasu.model.task import Targets, make_task
from glasu.protocol.messages import Agreed, Proposal
from glasu.protocol.receiving import receive_answer
from glasu.protocol.requests import Broadcast, Receive, Script, Send
from glasu.randomness import find_members
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from glasu.model.blocks import Draw, NodeSet
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

# The name of the stream from which neighbours are drawn. Training and evaluation draw from different streams.
PURPOSE = {Phase.SAMPLING: "neighbors", Phase.EVALUATION_SAMPLING: "evaluation neighbors"}


def divide_into_windows(first: int, end: int, prefetch: int) -> Iterator[tuple[range, range]]:
    """Divide the rounds first..end-1 into windows; yield each window and the next window, which is empty at the end."""
    size = max(1, prefetch)
    for start in range(first, end, size):
        middle = min(start + size, end)
        yield range(start, middle), range(middle, min(middle + size, end))


def owner_leads(config: RunConfig) -> bool:
    """Return whether the other parties train with the label owner's gradient; False if parties train alone."""
    return config.train.label_owner is not None and bool(config.model.aggregation_layers)


def owner_sends_batches(config: RunConfig) -> bool:
    """Return whether the label owner sends every batch S[L]."""
    return owner_leads(config) and not owner_publishes_nodes(config)


def owner_publishes_nodes(config: RunConfig) -> bool:
    """Return whether the label owner sends the list of training nodes once, so that no batch needs to be sent."""
    shares_draws = find_sampler(config.train).shares_draws
    return owner_leads(config) and shares_draws and make_task(config.train).examples_are_nodes


def list_agreed_layers(config: RunConfig, phase: Phase) -> list[int]:
    """Return the indices l of the node sets S[l] that the parties agree on, in the order of the agreements."""
    layers = config.model.aggregation_layers
    agreed = [layer + 1 for layer in reversed(layers[:-1])] if find_sampler(config.train).agrees_on_node_sets else []
    if owner_sends_batches(config) and phase is Phase.SAMPLING:
        agreed.insert(0, config.model.num_layers)
    return agreed


def client_training_examples(client: Client) -> Script[NodeSet]:
    """Return the training examples from which batches are drawn.

    With some settings (`owner_publishes_nodes`), the label owner sends them to the other clients, without labels.
    """
    examples = client.data.training_examples()
    if owner_publishes_nodes(client.config):
        key = client.identity.key(Phase.SAMPLING, 0, client.config.model.num_layers)
        (examples,) = yield from adopt_owner_sets(client, key, [examples])
    return examples


def draw_batches(client: Client, examples: NodeSet, rounds: Sequence[int]) -> list[Targets]:
    """Draw the batch of each round: equal at all clients that know the training examples, empty at other clients."""
    return [client.data.find_targets(draw_batch(client.config, examples, index)) for index in rounds]


def client_sampling(
    client: Client,
    rounds: Sequence[int],
    batches: Sequence[Targets],
    phase: Phase = Phase.SAMPLING,
    *,
    alone: bool = False,
) -> Script[list[Sample]]:
    """Client column: return S_m[0..L] for each round.

    S_m[l] consists of S_m[l+1] and sampled neighbours of these nodes. If layer l-1 aggregates, all clients need the
    same S[l]: the union of their sets.

    Args:
        client: the client.
        rounds: the rounds to agree on.
        batches: the batch of each round; empty at a client that receives S[L] from the label owner.
        phase: SAMPLING or EVALUATION_SAMPLING.
        alone: whether no layer aggregates, so that the clients need not agree.
    """
    last, agreed = client.config.model.num_layers, [] if alone else list_agreed_layers(client.config, phase)
    key = client.identity.key(phase, rounds[0])
    targets: Sequence[NodeSet] = [batch.nodes for batch in batches]
    if last in agreed:
        targets = yield from adopt_owner_sets(client, key.at(last), targets)
    nodes: list[list[NodeSet]] = [[each] for each in targets]
    draws: list[list[Draw]] = []
    for layer in reversed(range(last)):
        with client.watch.measure("sampling"):
            pairs = zip(rounds, nodes, strict=True)
            draw, purpose = client.learner.sampler.draw_and_check, PURPOSE[phase]
            drawn = [draw(sets[0], index, layer, purpose) for index, sets in pairs]
        found: Sequence[NodeSet] = [draw.nodes for draw in drawn]
        if layer in agreed:
            found = yield from agree(client, key.at(layer), found)
        draws.insert(0, drawn)
        for sets, united in zip(nodes, found, strict=True):
            sets.insert(0, united)
    return [
        Sample(index, tuple(sets), tuple(drawn[position] for drawn in draws), batch)
        for position, (index, sets, batch) in enumerate(zip(rounds, nodes, batches, strict=True))
    ]


def adopt_owner_sets(client: Client, key: Key, node_sets: Sequence[NodeSet]) -> Script[list[NodeSet]]:
    """Return the node sets of the label owner, which sends them to the other clients.

    Args:
        client: the client.
        key: the key of the exchange.
        node_sets: the sets of the label owner; empty sets at the other clients.

    Raises:
        ProtocolError: this client is the label owner, and the agreed sets contain nodes that only other clients
            proposed. Without this check, others could make the owner use its labels of nodes that it did not
            choose.
    """
    agreed = yield from agree(client, key, node_sets)
    if client.has_labels and [len(nodes) for nodes in agreed] != [len(nodes) for nodes in node_sets]:
        raise ProtocolError(
            f"party {client.name!r}, {key}: the agreed sets contain nodes that this party did not propose. Only the "
            "label owner chooses these nodes; check the other parties and the server."
        )
    return agreed


def agree(client: Client, key: Key, node_sets: Sequence[NodeSet]) -> Script[list[NodeSet]]:
    """Propose node sets and return the unions of all clients' proposals."""
    yield Send(Proposal(key, client.release.node_sets(node_sets, key)))
    answer = yield from receive_answer(client, Agreed, key)
    return _check_unions(answer, node_sets, client.data.num_nodes)


def _check_unions(answer: Agreed, proposed: Sequence[NodeSet], num_nodes: int) -> list[NodeSet]:
    """Refuse agreed sets that are not sorted, contain unknown nodes, or lack a proposed node.

    The compiled loops that read these sets do not check them.
    """

    def is_union(union: NodeSet, own: NodeSet) -> bool:
        inside = len(union) == 0 or 0 <= union[0] <= union[-1] < num_nodes
        return inside and bool((union[1:] > union[:-1]).all() and find_members(union, own).all())

    unions = [union.astype(np.int64) for union in answer.node_sets]
    if len(unions) != len(proposed) or not all(map(is_union, unions, proposed)):
        raise ProtocolError(
            f"{answer.key}: an agreed node set must be sorted, lie in 0..{num_nodes - 1} and contain this party's "
            "proposal, with one set per proposal. Check that the server and all parties run the same version on the "
            "same id list."
        )
    return unions


def server_training_examples(server: Server) -> Script[None]:
    """Server column of `client_training_examples`."""
    if owner_publishes_nodes(server.config):
        yield from unite(server, server.identity.key(Phase.SAMPLING, 0, server.config.model.num_layers), 1)


def server_sampling(
    server: Server, rounds: Sequence[int], phase: Phase = Phase.SAMPLING
) -> Script[dict[tuple[int, int], int]]:
    """Server column: unite the clients' sets; return {(round, l): |S[l]|} of the agreed sets. The sets are not kept."""
    sizes: dict[tuple[int, int], int] = {}
    for layer in list_agreed_layers(server.config, phase):
        _, unions = yield from unite(server, server.identity.key(phase, rounds[0], layer), len(rounds))
        sizes |= {(index, layer): len(nodes) for index, nodes in zip(rounds, unions, strict=True)}
    return sizes


def find_known_rows(server: Server, round_index: int, sizes: Mapping[tuple[int, int], int]) -> dict[int, int | None]:
    """Return |S[l+1]| for every aggregation layer l; None if the server does not know it.

    Args:
        server: the server.
        round_index: t.
        sizes: {(round, l): |S[l]|} of the agreed node sets.
    """
    layers = server.aggregation_layers
    known: dict[int, int | None] = {layer: sizes.get((round_index, layer + 1)) for layer in layers}
    if server.sampler.reads_whole_graph:
        known |= dict.fromkeys(layers[:-1], server.sizes.num_nodes)
    return known


def unite(server: Server, key: Key, count: int) -> Script[tuple[Sequence[Proposal], tuple[NDArray[np.int32], ...]]]:
    """Receive `count` node sets from every client and broadcast their unions. Return the proposals and the unions."""
    proposals: Sequence[Proposal] = yield Receive((Proposal,), key)
    last = server.sizes.num_nodes - 1
    for proposal in proposals:
        if len(proposal.node_sets) != count:
            server.refuse(proposal, f"expected node sets of {count} rounds, got {len(proposal.node_sets)}.")
        for nodes in proposal.node_sets:
            if len(nodes) and nodes[-1] > last:  # sets are sorted
                server.refuse(proposal, f"expected nodes 0..{last} in its node sets, got {nodes[-1]}.")
    by_round = zip(*(proposal.node_sets for proposal in proposals), strict=True)
    unions = tuple(np.unique(np.concatenate(sets)) for sets in by_round)
    yield Broadcast(Agreed(key, unions))
    return proposals, unions
