"""The server: it aggregates, unites node sets and selects the model. It holds no parameters and no data.

Neither torch nor PyG is imported here or in anything that this module imports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from glasu.config import RunConfig
from glasu.errors import ConfigError, GlasuError, ProtocolError, TrainingError
from glasu.model.aggregation import Aggregation, aggregation_of
from glasu.model.sampler import sampler_class
from glasu.model.task import task_of
from glasu.protocol.fields import Array, Shapes, TensorField
from glasu.protocol.messages import Losses, Message, TensorMessage
from glasu.protocol.state import Selection, ServerState
from glasu.wire.encodings import Encoding, Kind, encodings_of
from glasu.wire.message_key import SERVER, TO_ONE, Key, Phase

NO_OWNER = -1  # the label owner's index when all clients have the labels


@dataclass(frozen=True)
class Sizes:
    """The counts that the server must know about the data."""

    num_nodes: int
    num_validation: int  # nodes of one evaluation
    num_test: int


@dataclass
class ServerProgress:
    """The part of the server that changes from round to round."""

    round: int = 0  # the next round
    selection: Selection = field(default_factory=Selection)
    stopped: bool = False
    losses: list[float] = field(default_factory=list)  # the mean loss of every round


class Server:
    """The server in a training, a prediction or a dry run."""

    def __init__(self, config: RunConfig, roster: Sequence[str], sizes: Sizes, run: bytes) -> None:
        """Start at round 0.

        Args:
            config: the run's settings, resolved.
            roster: the parties' names in client order.
            sizes: counts of nodes.
            run: the identity of the run.
        """
        self.config, self.roster, self.sizes, self.run = config, tuple(roster), sizes, run
        self.aggregation = aggregation_of(config.model, len(roster))
        self.encodings = encodings_of(config)
        self.task = task_of(config.train)
        self.progress = ServerProgress()

    @property
    def num_clients(self) -> int:
        return len(self.roster)

    @property
    def owner(self) -> int:
        """The index of the label owner, or NO_OWNER."""
        labels = self.config.train.labels
        return NO_OWNER if labels == "all" else self.roster.index(labels)

    @property
    def aggregation_layers(self) -> tuple[int, ...]:
        return self.config.model.aggregation_layers

    def key(self, phase: Phase, round_index: int, layer: int = -1) -> Key:
        """Return the key of a message to all clients."""
        return Key(self.run, phase, SERVER, round_index, layer)

    def keys_to_each(self, key: Key) -> list[Key]:
        """Return the keys of messages to single clients, in client order."""
        return [key._replace(client=TO_ONE + client) for client in range(self.num_clients)]

    def known_rows(self, round_index: int, sizes: Mapping[tuple[int, int], int]) -> dict[int, int | None]:
        """Return |S[l+1]| for every aggregation layer l; None where the clients know it without the server.

        Args:
            round_index: t.
            sizes: {(round, l): |S[l]|} of the agreed node sets.
        """
        known: dict[int, int | None] = {layer: sizes.get((round_index, layer + 1)) for layer in self.aggregation_layers}
        if sampler_class(self.config.train).reads_whole_graph:
            known |= dict.fromkeys(self.aggregation_layers[:-1], self.sizes.num_nodes)
        return known

    def refuse(self, message: Message, why: str, error: type[GlasuError] = ProtocolError) -> NoReturn:
        """Raise an error that names the sender of a message."""
        party = self.roster[message.key.client]
        raise error(f"party {party!r}, {message.key}: {why}", party=party)

    def check_tensors(self, tensors: Sequence[TensorMessage], key: Key, rows_left: int | None) -> int:
        """Check the tensors of one chunk; return the number of their rows.

        Args:
            tensors: the tensors that clients sent, in client order.
            key: the key of the exchange.
            rows_left: the rows that this chunk and the later ones must have, if the server knows them.
        """
        if not tensors:
            raise ProtocolError(f"{key}: no party sent a tensor.")
        content = tensors[0].contents()["value"]
        assert isinstance(content, TensorField)
        encoding, columns = self.encodings[content.kind], content.columns(self._shapes()) or None
        most = self.config.wire.chunk_rows
        most = most if rows_left is None else max(0, min(most, rows_left))
        for message in tensors:
            if error := encoding.find_error(message.value, columns):
                self.refuse(message, f"{content.kind}: {error}.")
            # A known number of rows comes before the majority's shape, which could blame the only correct party.
            rows = len(message.value)
            if rows > most or (rows_left is not None and rows < most):
                wanted = f"at most {most}" if rows_left is None else str(most)
                self.refuse(message, f"expected {wanted} rows, got {rows}.")
        self._check_shapes(content.kind, tensors, key)
        if content.kind == "probabilities":
            self._check_probabilities(encoding, tensors)
        return len(tensors[0].value)

    def _shapes(self) -> Shapes:
        hidden, train = self.config.model.hidden, self.config.train
        return Shapes(
            num_nodes=self.sizes.num_nodes,
            num_classes=0,  # unknown to the server
            hidden=hidden,
            joint_width=hidden * self.aggregation.widening,
            num_local_steps=train.num_local_steps,
            prefetch=train.prefetch,
            chunk_rows=self.config.wire.chunk_rows,
            encodings=self.encodings,
        )

    def _check_shapes(self, kind: Kind, tensors: Sequence[TensorMessage], key: Key) -> None:
        """Refuse tensors of different shapes; blame the minority, or no single party if there is no majority."""
        shapes = [message.value.shape for message in tensors]
        if len(set(shapes)) == 1:
            return
        usual, count = Counter(shapes).most_common(1)[0]
        if 2 * count <= len(tensors):
            listed = "; ".join(f"party {self.roster[each.key.client]!r} {each.value.shape}" for each in tensors)
            raise ProtocolError(
                f"{key}: {kind}: expected the same shape from all parties, got {listed}. The server cannot decide "
                "which one is right."
            )
        for message in tensors:
            if message.value.shape != usual:
                self.refuse(message, f"{kind}: expected shape {usual} as from most parties, got {message.value.shape}.")

    def _check_probabilities(self, encoding: Encoding, tensors: Sequence[TensorMessage]) -> None:
        """Refuse values that are not class probabilities.

        A party that sent 1e30 or -5 would otherwise decide every prediction and which model is selected.
        """
        for message in tensors:
            if error := self.task.find_score_error(encoding.decode(message.value)):
                self.refuse(message, f"class probabilities: {error}; they were not aggregated.")

    def check_owner_alone(self, messages: Sequence[Message]) -> None:
        """Refuse a gradient at H[L] from a client without labels, and a label owner that sends none."""
        for client, message in enumerate(messages):
            if isinstance(message, TensorMessage) != (client == self.owner):
                owner = self.roster[self.owner]
                self.refuse(
                    message,
                    f"expected a gradient from the label owner {owner!r} alone, got a {type(message).__name__} from "
                    f"party {self.roster[client]!r}.",
                )

    def aggregate(
        self, tensors: Sequence[TensorMessage], key: Key, first_row: int, aggregation: Aggregation | None = None
    ) -> Array:
        """Return the encoded aggregate of the clients' tensors.

        Args:
            tensors: one tensor per client, checked, in client order.
            key: the key of the answer.
            first_row: the position of the chunk in the tensor.
            aggregation: by default that of the model's layers.
        """
        kind, payloads = _kind(tensors), [message.value for message in tensors]
        result = (aggregation or self.aggregation).combine_partials(self.encodings[kind], payloads, key, first_row)
        self.check_finite(kind, tensors, [result], key)
        return result

    def backpropagate(self, tensors: Sequence[TensorMessage], key: Key, first_row: int) -> list[Array]:
        """Return for every client the encoded gradient at its partial, given the gradients at H[l+1]."""
        kind, payloads = _kind(tensors), [message.value for message in tensors]
        keys = self.keys_to_each(key)
        results = self.aggregation.combine_gradients(self.encodings[kind], payloads, keys, first_row)
        self.check_finite(kind, tensors, results, key)
        return results

    def check_finite(self, kind: Kind, tensors: Sequence[TensorMessage], results: Sequence[Array], key: Key) -> None:
        """Refuse NaN and infinity in an aggregate; blame the party that sent them, if one did.

        A value that is not finite in one tensor is not finite in the sum, so one look at the sum is enough.
        """
        encoding = self.encodings[kind]
        if all(encoding.is_finite(result) for result in {id(result): result for result in results}.values()):
            return
        for message in tensors:
            if not encoding.is_finite(message.value):
                why = "expected finite values, got NaN or infinity. They were not sent on. Training diverged"
                self.refuse(message, f"{kind}: {why} there: lower train.learning_rate.", TrainingError)
        raise TrainingError(
            f"{key}: {kind}: all parties sent finite values, but their sum is not finite. Training diverged, and "
            "nothing was sent on. Lower train.learning_rate."
        )

    def record_losses(self, messages: Sequence[Losses]) -> float:
        """Add the mean loss of a round, over the clients with labels, and return it."""
        means = []
        for message in messages:
            values = np.asarray(message.values)
            if len(values) and not np.isfinite(values).all():
                self.refuse(
                    message, "its loss is not finite; training diverged. Lower train.learning_rate.", TrainingError
                )
            if len(values):
                means.append(float(values.mean()))
        if not means:
            raise ProtocolError(f"{messages[0].key}: no party sent a loss.")
        loss = sum(means) / len(means)
        self.progress.losses.append(loss)
        return loss

    def state(self, traffic: Mapping[str, Any] | None = None) -> ServerState:
        """Return the state for a checkpoint. The runtime supplies the traffic counted so far."""
        progress = self.progress
        return ServerState(
            run=self.run,
            config_digest=self.config.digest(),
            roster=self.roster,
            round=progress.round,
            selection=progress.selection,
            stopped=progress.stopped,
            losses=tuple(progress.losses),
            traffic=dict(traffic or {}),
        )

    def restore(self, state: ServerState) -> None:
        """Continue from a saved state."""
        if (state.run, state.config_digest, state.roster) != (self.run, self.config.digest(), self.roster):
            raise ConfigError("the saved state belongs to a run with other settings or parties; start over.")
        self.progress = ServerProgress(state.round, state.selection, state.stopped, list(state.losses))


def _kind(tensors: Sequence[TensorMessage]) -> Kind:
    content = tensors[0].contents()["value"]
    assert isinstance(content, TensorField)
    return content.kind
