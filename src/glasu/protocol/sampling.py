"""Algorithm 2: agree on the node sets S[l], for a range of rounds at once.

Sampling does not depend on weights, so the sets of coming rounds are agreed while the present ones compute: a step of
the agreement rides on each tensor message, and costs no exchange of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from glasu.config import RunConfig
from glasu.errors import ProtocolError
from glasu.protocol.messages import Agreed, Event, Exchange, Message, Proposal, Result, Script, exchange
from glasu.randomness import contains
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.model.blocks import Draw, NodeSet
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server


SetName = tuple[str, int, int]  # of one node set S[l] of one round: what it is for, the round, l

# Agreements about the same round; the position of each in this list stands as the chunk in its messages' keys.
AGREEMENTS = ("neighbors", "evaluation neighbors", "training nodes")
ROWS_COME = AGREEMENTS[:2]  # of whose sets tensors are sent: in training, in evaluation


@dataclass(frozen=True, eq=False)
class Sample:
    """The node sets S_m[0..L] of one round, agreed, and the edges drawn for each layer."""

    round: int
    nodes: tuple[NodeSet, ...]
    draws: tuple[Draw, ...]


def windows(first: int, config: RunConfig) -> Iterator[range]:
    """Divide the rounds from `first` on into the ranges whose node sets are agreed together."""
    size = max(1, config.train.prefetch)
    for start in range(first, config.train.num_rounds, size):
        yield range(start, min(start + size, config.train.num_rounds))


def owner_draws(config: RunConfig) -> bool:
    """Tell whether the label owner sends every batch S[L]; with "shared" all derive it from a list published once."""
    return config.train.labels != "all" and config.train.sampler != "shared"


def publish_training_nodes(client: Client) -> Exchange[NodeSet]:
    """Tell everyone the training nodes (not their labels), once; afterwards no batch needs to travel."""
    key_layer = client.config.model.num_layers
    chunk = AGREEMENTS.index("training nodes")
    (nodes,) = yield from _agree(client, 0, key_layer, [client.training_nodes], chunk)
    return nodes


def client_sampling(
    client: Client,
    rounds: Sequence[int],
    *,
    batches: Sequence[NodeSet] | None = None,
    purpose: str = "neighbors",
) -> Exchange[list[Sample]]:
    """Client column of Algorithms 2 and 5: return S_m[0..L] for each round.

    S_m[l] is drawn from the neighbours of S_m[l+1] and contains it. Where layer l-1 aggregates, S[l] must be the same
    everywhere: it becomes the union of all clients' sets.

    Args:
        client: who draws.
        rounds: the rounds to agree on.
        batches: S[L] for each round, where it is known already; else it is drawn from the training nodes.
        purpose: what the neighbours are drawn for; training and evaluation draw from streams of their own.
    """
    config, last = client.config, client.config.model.num_layers
    chunk = AGREEMENTS.index(purpose)
    if batches is None:
        batches = [client.batch_nodes(index) for index in rounds]
        if owner_draws(config):
            batches = yield from _agree(client, rounds[0], last, batches, chunk)
    nodes: list[list[NodeSet]] = [[batch] for batch in batches]
    draws: list[list[Draw]] = []
    for layer in reversed(range(last)):
        with client.watch.measure("sampling"):
            pairs = zip(rounds, nodes, strict=True)
            drawn = [client.sampler.draw(sets[0], index, layer, purpose) for index, sets in pairs]
        agreed: Sequence[NodeSet] = [draw.nodes for draw in drawn]
        if layer - 1 in client.model.aggregation_layers and config.train.sampler == "neighbor":
            agreed = yield from _agree(client, rounds[0], layer, agreed, chunk)
        draws.insert(0, drawn)
        for sets, found in zip(nodes, agreed, strict=True):
            sets.insert(0, found)
    return [
        Sample(index, tuple(sets), tuple(drawn[position] for drawn in draws))
        for position, (index, sets) in enumerate(zip(rounds, nodes, strict=True))
    ]


def _agree(
    client: Client, round_index: int, layer: int, node_sets: Sequence[NodeSet], chunk: int
) -> Exchange[list[NodeSet]]:
    """Propose one node set per round and return the unions."""
    key = client.key(Phase.SAMPLING, round_index, layer, chunk)
    proposal = Proposal(key=key, node_sets=client.release.node_sets(node_sets, key))
    answer = yield from exchange(proposal, Agreed)
    return checked_unions(answer, node_sets, client.party.num_nodes)


def checked_unions(answer: Message, proposed: Sequence[NodeSet], num_nodes: int) -> list[NodeSet]:
    """Return the node sets that the server says are agreed, or refuse what cannot be."""
    unions = [union.astype(np.int64) for union in answer.node_sets]
    if len(unions) != len(proposed) or not all(map(_is_union, unions, proposed, [num_nodes] * len(unions))):
        raise ProtocolError(
            f"{answer.key}: an agreed node set must rise within 0..{num_nodes - 1} and contain what this party "
            "proposed, one set per proposal; check that the server and all parties run the same version on the same "
            "id list."
        )
    return unions


def _is_union(union: NodeSet, own: NodeSet, num_nodes: int) -> bool:
    """Tell whether a set that arrived can be what it must be; the loops that read it check nothing."""
    if len(union) and not 0 <= union[0] <= union[-1] < num_nodes:
        return False
    return bool((union[1:] > union[:-1]).all() and contains(union, own).all())


def agreement_steps(config: RunConfig, rounds: Sequence[int], purpose: str = "neighbors") -> list[list[SetName]]:
    """Return the steps of an agreement, each by the sets that it agrees on: one S[l] per round."""
    unions, layers = config.train.sampler == "neighbor", config.model.aggregation_layers
    agreed = [layer + 1 for layer in reversed(layers[:-1])] if unions else []
    if owner_draws(config) and purpose == "neighbors":
        agreed.insert(0, config.model.num_layers)
    return [[(purpose, index, layer) for index in rounds] for layer in agreed]


def server_sampling(server: Server, rounds: Sequence[int], purpose: str = "neighbors") -> Script:
    """Server column of an agreement that does not ride on other messages; the answers are the unions."""
    for step in agreement_steps(server.config, rounds, purpose):
        layer, chunk = step[0][2], AGREEMENTS.index(purpose)
        yield from server.receive((Proposal,), Phase.SAMPLING, rounds[0], layer, chunk, proposed=step)
        server.answer(Agreed)


def server_publication(server: Server) -> Script:
    """Server column of `publish_training_nodes`."""
    purpose, last = "training nodes", server.config.model.num_layers
    published = [(purpose, 0, last)]
    yield from server.receive((Proposal,), Phase.SAMPLING, 0, last, AGREEMENTS.index(purpose), proposed=published)
    server.answer(Agreed)


def unite(messages: Sequence[Message]) -> tuple[NDArray[np.int32], ...]:
    """Server column: S[l] is the union over the clients, for each round that is being agreed; nothing is kept."""
    return tuple(np.unique(np.concatenate(sets)) for sets in zip(*(item.node_sets for item in messages), strict=True))


class Agreement:
    """An agreement on coming rounds that has no exchanges of its own: it rides on the messages of another script."""

    def __init__(self, script: Exchange[list[Sample]]) -> None:
        self._script = script
        self.samples: list[Sample] = []
        self.proposal: Message | None = None
        self._advance(None)

    def _advance(self, answers: Sequence[Message] | None) -> None:
        try:
            item = next(self._script) if answers is None else self._script.send(answers)
        except StopIteration as stop:
            self.proposal, self.samples = None, stop.value
        else:
            assert not isinstance(item, Event)
            self.proposal = item[0]

    def accept(self, carrier: Message) -> None:
        """Read the unions off the answer to the message that carried the proposal."""
        assert self.proposal is not None
        self._advance((Agreed(key=self.proposal.key, node_sets=carrier.node_sets),))


def ride_along(script: Exchange[Result], agreement: Agreement | None) -> Exchange[Result]:
    """Drive `script`, attaching a step of the agreement to each of its exchanges until it is reached.

    Of messages that are sent together the first carries it.
    """
    answers: Sequence[Message] | None = None
    while True:
        try:
            item = next(script) if answers is None else script.send(answers)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        if isinstance(item, Event) or agreement is None or agreement.proposal is None:
            answers = yield item
            continue
        carrier = dataclasses.replace(item[0], node_sets=agreement.proposal.node_sets)
        answers = yield (carrier, *item[1:])
        agreement.accept(answers[0])
