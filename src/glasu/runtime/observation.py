"""Extract what a role can read in its messages: sets of nodes (index sets), gradients and representations.

Every row of a gradient or representation comes with its node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from glasu.data.party import Splits
from glasu.model.sampler import draw_batch
from glasu.privacy.attacks.edges import Draws, NodeIds
from glasu.privacy.attacks.features import subtract_own
from glasu.privacy.attacks.result import Values
from glasu.protocol.messages import Agreed, Gradient, Joint, JointGradient, Partial, Proposal
from glasu.protocol.sampling import owner_publishes_nodes, owner_sends_batches
from glasu.runtime.transcript import RecordedTensor, RoleView
from glasu.wire.message_key import SERVER, Phase

Sets = dict[tuple[int, int], NodeIds]  # by round and layer l


class NodeRows(NamedTuple):
    """Rows of a tensor, and the nodes that they belong to."""

    round: int
    layer: int
    nodes: NodeIds
    rows: Values


class Observation:
    """The view of one role, as arrays."""

    def __init__(self, view: RoleView, splits: Splits | None) -> None:
        """Read the index sets.

        Args:
            view: the messages of the role.
            splits: the nodes of the splits. Parties with labels know them, and often they are public.
        """
        self.view, self.splits = view, splits
        manifest = view.transcript.manifest
        self.num_nodes, self.num_clients = manifest.num_nodes, len(manifest.parties)
        self.config = view.transcript.config
        self.num_layers = self.config.model.num_layers
        self.agreed: Sets = {}
        self.proposed: dict[int, Sets] = defaultdict(dict)
        for entry, message in view.messages(Proposal, Phase.SAMPLING):
            for index, nodes in enumerate(message.node_sets):
                self.proposed[entry.sender][entry.key.round + index, entry.key.layer] = nodes.astype(np.int64)
        for entry, answer in view.messages(Agreed, Phase.SAMPLING):
            for index, nodes in enumerate(answer.node_sets):
                self.agreed[entry.key.round + index, entry.key.layer] = nodes.astype(np.int64)

    @property
    def is_server(self) -> bool:
        return self.view.index == SERVER

    def list_draws(self, target: int) -> list[Draws]:
        """Return what the role knows about the neighbours that a client drew, by layer.

        The server sees each client's proposal. A party sees only the union of all proposals. The nodes of the union
        that are not in the party's own proposal were drawn by other parties.
        """
        found = []
        for layer in sorted({layer for _, layer in self.agreed if layer < self.num_layers}):
            rounds = sorted(index for index, other in self.agreed if other == layer)
            if self.is_server:
                drawn = [self.proposed[target][index, layer] for index in rounds]
            else:
                drawn = [self.agreed[index, layer] for index in rounds]
            above = [self.agreed.get((index, layer + 1)) for index in rounds]
            known = [nodes for nodes in above if nodes is not None]
            found.append(Draws(known if len(known) == len(rounds) else None, drawn))
        return found

    def list_proposals(self) -> list[list[NodeIds]]:
        """Return all clients' proposals for S[l], one list per round.

        l is the highest layer below L at which the parties agree on S[l].
        """
        layers = {layer for _, layer in self.agreed if layer < self.num_layers}
        if not layers or len(self.proposed) < self.num_clients:
            return []
        highest = max(layers)
        rounds = sorted(index for index, layer in self.agreed if layer == highest)
        return [[sets[index, highest] for sets in self.proposed.values()] for index in rounds]

    def list_batches(self) -> dict[int, NodeIds]:
        """Return S[L] by round, if the label owner sent it."""
        return {index: nodes for (index, layer), nodes in self.agreed.items() if layer == self.num_layers}

    def list_gradients(self, owner: int) -> list[NodeRows]:
        """Return the label owner's gradients at H[L], or multiples of these gradients, by round."""
        if self.is_server:
            found = [each for each in self.view.matrices(Gradient, Phase.BACKWARD) if each.sender == owner]
        else:
            found = self.view.matrices(JointGradient, Phase.BACKWARD)
        highest: dict[int, RecordedTensor] = {}
        for each in found:  # with exact gradients, lower layers have such messages as well
            before = highest.get(each.key.round)
            if before is None or each.key.layer > before.key.layer:
                highest[each.key.round] = each
        return [*self._name_rows([highest[index] for index in sorted(highest)])]

    def list_joints(self) -> list[NodeRows]:
        """Return H[L] at the batches, by round."""
        last = self.num_layers - 1
        return [
            *self._name_rows([each for each in self.view.matrices(Joint, Phase.TRAINING) if each.key.layer == last])
        ]

    def find_batch(self, round_index: int) -> NodeIds | None:
        """Return S[L] of a round: as the label owner sent it, or drawn from the public seed; None if unknown.

        A role that knows the training nodes can draw S[L] itself. The role knows them if the label owner sent them once
        or if the splits are public.
        """
        if owner_sends_batches(self.config):
            return self.agreed.get((round_index, self.num_layers))
        if owner_publishes_nodes(self.config):
            examples = self.agreed.get((0, self.num_layers))
        else:
            examples = None if self.splits is None else self.splits.train
        if examples is None or not isinstance(self.config.train.batch_size, int):
            return None
        return draw_batch(self.config, examples, round_index)

    def _name_rows(self, matrices: list[RecordedTensor]) -> Iterator[NodeRows]:
        for each in matrices:
            nodes = self.find_batch(each.key.round)
            if nodes is not None and len(nodes) == len(each.rows):
                yield NodeRows(each.key.round, each.key.layer, nodes, each.rows.astype(np.float64))

    def list_evaluations(self, target: int, *, aggregates: bool = False) -> list[NodeRows]:
        """Return what the role knows about a client's representations in exact evaluations on validation nodes.

        The rows belong to the lowest layer that aggregates. There is a row for every node, or only for the validation
        nodes if a single layer aggregates. The server reads the client's own part. A party reads the
        mean of the parts of all other parties. With `aggregates`, the result is the aggregate of all clients instead.
        """
        found = self.view.matrices(Joint, Phase.EVALUATION)
        if not aggregates:
            found = list(self._list_parts(target, Phase.EVALUATION))
        lowest = min((each.key.layer for each in found), default=0)
        validation = np.empty(0, np.int64) if self.splits is None else self.splits.validation
        result = []
        for each in found:
            nodes = np.arange(self.num_nodes) if len(each.rows) == self.num_nodes else validation
            is_test = each.key.round == self.config.train.num_rounds + 1
            if each.key.layer == lowest and len(nodes) == len(each.rows) and not is_test:
                result.append(NodeRows(each.key.round, each.key.layer, nodes, each.rows.astype(np.float64)))
        return result

    def average_rounds(self, target: int) -> Values:
        """Return for each node the mean of its representations in training rounds; zeros if the role saw none."""
        lowest, total, seen = self.num_layers, np.zeros((self.num_nodes, 0)), np.ones(self.num_nodes)
        for each in self._list_parts(target, Phase.TRAINING):
            nodes = self.agreed.get((each.key.round, each.key.layer + 1))
            if each.key.layer == self.num_layers - 1:
                nodes = self.find_batch(each.key.round)
            if nodes is None and len(each.rows) == self.num_nodes:
                nodes = np.arange(self.num_nodes)
            if nodes is None or len(nodes) != len(each.rows) or each.key.layer > lowest:
                continue
            if each.key.layer < lowest:
                lowest = each.key.layer
                total, seen = np.zeros((self.num_nodes, each.rows.shape[1])), np.zeros(self.num_nodes)
            total[nodes] += each.rows
            seen[nodes] += 1
        mean: Values = total / np.maximum(seen, 1)[:, None]
        return mean

    def _list_parts(self, target: int, phase: Phase) -> Iterator[RecordedTensor]:
        partials = self.view.matrices(Partial, phase)
        if self.is_server:
            yield from (each for each in partials if each.sender == target)
            return
        own = {(each.key.round, each.key.layer): each.rows for each in partials}
        for each in self.view.matrices(Joint, phase):
            part = own.get((each.key.round, each.key.layer))
            if part is not None and part.shape == each.rows.shape:  # the shapes differ after `concat`
                others = subtract_own(each.rows.astype(np.float64), part.astype(np.float64), self.num_clients)
                yield RecordedTensor(target, each.key, others)
