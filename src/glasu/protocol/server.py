"""Algorithm 1 in the role of the server: it aggregates, unites and selects, and holds no parameters and no data.

Neither torch nor PyG is loaded here or in anything this module imports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from glasu.codec.tensors import Kind, encodings_of
from glasu.config import RunConfig
from glasu.errors import ConfigError, GlasuError, ProtocolError, TrainingError
from glasu.keys import SERVER, TO_ONE, Key, Phase
from glasu.model.aggregation import Aggregation, Mean, add, aggregation_of
from glasu.model.metrics import SELECTED_BY, find_probability_error
from glasu.protocol.backward import server_backward
from glasu.protocol.chunks import first_row
from glasu.protocol.evaluation import server_evaluation
from glasu.protocol.inference import server_inference
from glasu.protocol.label_owner import server_gradient
from glasu.protocol.messages import (
    Array,
    Awaited,
    Evaluated,
    Exchange,
    Message,
    RoundDone,
    Script,
    TensorMessage,
    Verdict,
)
from glasu.protocol.sampling import (
    ROWS_COME,
    SetName,
    agreement_steps,
    server_publication,
    server_sampling,
    unite,
    windows,
)
from glasu.protocol.state import Selection, ServerState

ROWS_AT_ONCE = 4096  # what the server computes with has at most so many rows, whatever arrives


@dataclass(frozen=True)
class Sizes:
    """What the server must know of the data: counts."""

    num_nodes: int
    num_validation: int  # as far as evaluation asks for them
    num_test: int


class Server:
    """The server in a training; `receive` and `answer` are its side of every exchange."""

    def __init__(self, config: RunConfig, roster: Sequence[str], sizes: Sizes, run: bytes) -> None:
        """Start at round 0.

        Args:
            config: the run's settings, resolved.
            roster: the parties' names in client order.
            sizes: counts of nodes.
            run: the identity of the run.
        """
        self.config, self.roster, self.sizes, self.run = config, tuple(roster), sizes, run
        self.layers = config.model.aggregation_layers
        self.aggregation = aggregation_of(config.model, len(roster))
        self.encodings = encodings_of(config)
        self.mean = Mean(len(roster))  # of class probabilities, whatever the layers' aggregation is
        self.owner = -1 if config.train.labels == "all" else self.roster.index(config.train.labels)
        self.round, self.selection, self.stopped = 0, Selection(), False
        self.losses: list[float] = []
        self.history: list[dict[str, Any]] = []
        self.answers: tuple[Message, ...] = ()
        self.awaited: Awaited | None = None  # what every client is to send now
        self._received: Sequence[Message] = ()
        self.rows: dict[int, int] = {}  # |S[l+1]| of the last H[l+1]: a gradient there has as many rows
        self.riding: list[list[SetName]] = []  # steps of an agreement: one on each coming exchange of a round
        self._proposed: Sequence[SetName] = ()  # the node sets of the last messages
        self._agreed: dict[SetName, int] = {}  # |S[l]|, until H[l] comes

    def receive(
        self,
        kinds: tuple[type[Message], ...],
        phase: Phase,
        round_index: int,
        layer: int,
        chunk: int = 0,
        proposed: Sequence[SetName] = (),
    ) -> Exchange[Sequence[Message]]:
        """Send the answers that are ready and return the next message of every client, in client order.

        Args:
            kinds: what may come.
            phase: what it is for.
            round_index: t.
            layer: l.
            chunk: which part of a tensor.
            proposed: the node sets that each of them must carry, besides those that ride along.
        """
        self.awaited = Awaited(kinds, self.run, phase, round_index, layer, chunk)
        if self.riding and phase in (Phase.TRAINING, Phase.BACKWARD) and chunk == 0:
            proposed = self.riding.pop(0)
        self._proposed = proposed
        messages = yield self.answers
        expected = (self.run, phase, round_index, layer, chunk)
        for client, message in enumerate(messages):
            key = message.key
            got = (key.run, key.phase, key.round, key.layer, key.chunk)
            if got != expected or key.client != client or not isinstance(message, kinds):
                names = " or ".join(kind.__name__ for kind in kinds)
                wanted = Key(run=self.run, phase=phase, round=round_index, layer=layer, chunk=chunk, client=client)
                raise ProtocolError(
                    f"party {self.roster[client]!r}: expected {names} for {wanted}, "
                    f"got {type(message).__name__} for {key}.",
                    party=self.roster[client],
                )
            self._check_riders(message)
            if len(message.node_sets) != len(proposed):
                self._refuse(message, f"expected node sets of {len(proposed)} rounds, got {len(message.node_sets)}.")
        self._received = messages
        self._note_losses(messages)
        return messages

    def _check_riders(self, message: Message) -> None:
        """Refuse node sets and losses that cannot be; both ride on any message."""
        last = self.sizes.num_nodes - 1
        for nodes in message.node_sets:
            if len(nodes) and nodes[-1] > last:  # sets travel in rising order
                self._refuse(message, f"expected nodes 0..{last} in its node sets, got {nodes[-1]}.")
        if len(message.losses) and not np.isfinite(message.losses).all():
            why = "its loss is not finite; training diverged. Lower train.learning_rate."
            self._refuse(message, why, TrainingError)

    def _refuse(self, message: Message, why: str, error: type[GlasuError] = ProtocolError) -> NoReturn:
        party = self.roster[message.key.client]
        raise error(f"party {party!r}, {message.key}: {why}", party=party)

    def answer(self, kind: type[Message], value: Array | None = None, **fields: Any) -> None:
        """Prepare one answer for all clients, with the unions of the node sets that they proposed."""
        if value is not None:
            fields["value"] = value
        message = kind(key=self._key(SERVER), node_sets=self._unions(), **fields)
        self.answers = (message,) * len(self.roster)

    def answer_each(self, kind: type[TensorMessage], values: Sequence[Array]) -> None:
        """Prepare one answer for each client."""
        unions = self._unions()
        self.answers = tuple(
            kind(key=self._key(TO_ONE + client), node_sets=unions, value=value) for client, value in enumerate(values)
        )

    def _unions(self) -> tuple[NDArray[np.int32], ...]:
        """Unite the node sets that were proposed; only how large the unions are is remembered."""
        if not self._proposed:
            return ()
        unions = unite(self._received)
        sizes = zip(self._proposed, map(len, unions), strict=True)
        self._agreed |= {name: size for name, size in sizes if name[0] in ROWS_COME}
        return unions

    def known_rows(self, phase: Phase, round_index: int, layer: int) -> int | None:
        """Return |S[l+1]|, where it was agreed here or is all nodes; None: the clients know it without the server."""
        purpose = "evaluation neighbors" if phase is Phase.EVALUATION else "neighbors"
        if self.config.train.sampler == "full" and layer != self.layers[-1]:
            return self.sizes.num_nodes
        return self._agreed.pop((purpose, round_index, layer + 1), None)

    def _key(self, sender: int) -> Key:
        """Name the answer to what was received."""
        _, phase, _, *rest = self._received[0].key
        return Key(self.run, phase, sender, *rest)

    def senders(self, kind: Kind, messages: Sequence[Message]) -> list[TensorMessage]:
        """Return the messages of those clients that sent a tensor; one shape, never broadcast."""
        senders = [message for message in messages if isinstance(message, TensorMessage)]
        if not senders:
            raise ProtocolError(f"{messages[0].key}: no party sent its {kind}.")
        hidden = self.config.model.hidden
        widths = {"representation": hidden, "gradient": hidden * self.aggregation.widening}
        columns = widths.get(kind)  # how many classes there are, the server does not know
        for message in senders:
            if flaw := self.encodings[kind].flaw(message.value, columns):
                self._refuse(message, f"{kind}: {flaw}.")
        self._refuse_other_shapes(kind, senders)
        if kind == "probabilities":
            self._check_probabilities(senders)
        return senders

    def _check_probabilities(self, senders: Sequence[TensorMessage]) -> None:
        """Refuse the first tensor that cannot hold class probabilities.

        A party that sent 1e30 or -5 would otherwise decide every prediction and which model is selected.
        """
        self._refuse_senders_of_infinity("probabilities", senders)
        for message in senders:
            value = self.encodings["probabilities"].decode(message.value)
            if error := find_probability_error(value, self.config.train.task):
                self._refuse(message, f"class probabilities: {error}; they were not aggregated.")

    def _refuse_infinite(self, kind: Kind, senders: Sequence[TensorMessage], total: Array) -> None:
        """Refuse tensors whose sum is not finite: who sent something else than numbers, or all of them together.

        What is not finite in one of them is not finite in the sum: one look at it tells whether to look at each.
        """
        if np.logical_and.reduce(np.isfinite(total), axis=None):
            return
        self._refuse_senders_of_infinity(kind, senders)
        raise TrainingError(
            f"{self._key(SERVER)}: {kind}: all parties sent finite values, but their sum is not; training diverged, "
            "and nothing was sent on. Lower train.learning_rate."
        )

    def _refuse_senders_of_infinity(self, kind: Kind, senders: Sequence[TensorMessage]) -> None:
        """Refuse the first tensor that holds something else than numbers."""
        for message in senders:
            if not self.encodings[kind].is_finite(message.value):
                why = "expected finite values, got NaN or infinity; training diverged there, and nothing was sent on."
                self._refuse(message, f"{kind}: {why} Lower train.learning_rate.", TrainingError)

    def _refuse_other_shapes(self, kind: Kind, senders: Sequence[TensorMessage]) -> None:
        """Refuse tensors of several shapes: who is alone against most, or nobody by name where there is no majority."""
        shapes = [message.value.shape for message in senders]
        if len(set(shapes)) == 1:
            return
        usual, count = Counter(shapes).most_common(1)[0]
        if 2 * count <= len(senders):
            listed = "; ".join(f"party {self.roster[each.key.client]!r} {each.value.shape}" for each in senders)
            raise ProtocolError(
                f"{self._key(SERVER)}: {kind}: expected one shape from all, got {listed}; which of them is right, the "
                "server cannot tell."
            )
        for message in senders:
            if message.value.shape != usual:
                self._refuse(message, f"{kind}: expected shape {usual} as from most, got {message.value.shape}.")

    def aggregated(self, kind: Kind, messages: Sequence[Message], aggregation: Aggregation | None = None) -> Array:
        """Return what the clients' tensors make together, as it travels to all of them."""
        senders, encoding = self.senders(kind, messages), self.encodings[kind]
        aggregation, key = aggregation or self.aggregation, self._key(SERVER)
        start, num_rows = first_row(key.chunk), len(senders[0].value)
        if kind == "representation":
            self.rows[key.layer] = start + num_rows
        if not aggregation.adds:  # nothing to compute, so nothing is rounded a second time
            self._refuse_senders_of_infinity(kind, senders)
            return aggregation.aggregate([message.value for message in senders])

        def compute(rows: slice) -> list[Array]:
            with np.errstate(invalid="ignore", over="ignore"):
                joint = aggregation.aggregate([encoding.decode(message.value[rows]) for message in senders])
            self._refuse_infinite(kind, senders, joint)
            return [encoding.encode(joint, key, start + rows.start)]

        return _by_rows(num_rows, compute)[0]

    def backpropagated(self, messages: Sequence[Message]) -> list[Array]:
        """Return for each client the gradient at its partial, as it travels: of the sum of those that were sent."""
        senders, encoding = self.senders("gradient", messages), self.encodings["gradient"]
        keys = [self._key(TO_ONE + client) for client in range(len(self.roster))]
        start = first_row(keys[0].chunk)

        def compute(rows: slice) -> list[Array]:
            with np.errstate(invalid="ignore", over="ignore"):
                total = add([encoding.decode(message.value[rows]) for message in senders])
            self._refuse_infinite("gradient", senders, total)
            shares = zip(self.aggregation.backpropagate(total), keys, strict=True)
            return [encoding.encode(share, key, start + rows.start) for share, key in shares]

        return _by_rows(len(senders[0].value), compute)

    def owners_gradient(self, messages: Sequence[Message]) -> Array:
        """Return the gradient of the label owner, who alone sends one, as it travelled."""
        owner = self.roster[self.owner]
        for client, message in enumerate(messages):
            if isinstance(message, TensorMessage) != (client == self.owner):
                expects = f"expected a gradient from party {owner!r} alone, who has the labels"
                self._refuse(message, f"{expects}, got a {type(message).__name__} from party {self.roster[client]!r}.")
        (sender,) = self.senders("gradient", messages)
        self._refuse_senders_of_infinity("gradient", [sender])
        return sender.value

    def _note_losses(self, messages: Sequence[Message]) -> None:
        means = [float(message.losses.mean()) for message in messages if len(message.losses)]
        if means:
            self.losses.append(sum(means) / len(means))

    def state(self, traffic: Mapping[str, Any] | None = None) -> ServerState:
        """Return everything that a checkpoint needs; the traffic is counted by the runtime."""
        return ServerState(
            run=self.run,
            config_digest=self.config.digest(),
            roster=self.roster,
            round=self.round,
            selection=self.selection,
            stopped=self.stopped,
            losses=tuple(self.losses),
            history=tuple(self.history),
            traffic=dict(traffic or {}),
        )

    def restore(self, state: ServerState) -> None:
        """Become what `state` describes."""
        if (state.run, state.config_digest, state.roster) != (self.run, self.config.digest(), self.roster):
            raise ConfigError("the saved state belongs to a run with other settings or parties; start afresh.")
        self.round, self.selection, self.stopped = state.round, state.selection, state.stopped
        self.losses, self.history = list(state.losses), list(state.history)


def _by_rows(num_rows: int, compute: Callable[[slice], list[Array]]) -> list[Array]:
    """Compute arrays of so many rows, some rows at a time."""
    first = compute(slice(0, min(num_rows, ROWS_AT_ONCE)))
    if num_rows <= ROWS_AT_ONCE:
        return first
    results = [np.empty((num_rows, part.shape[1]), part.dtype) for part in first]
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = slice(start, min(start + ROWS_AT_ONCE, num_rows))
        for result, part in zip(results, compute(rows) if start else first, strict=True):
            result[rows] = part
    return results


def server_script(server: Server) -> Script:
    """Serve all rounds, then the test of the selected model."""
    if not server.stopped:
        yield from server_rounds(server)
    task = server.config.train.task
    metrics = yield from server_evaluation(server, server.config.train.num_rounds + 1, server.sizes.num_test, task)
    server.answer(Verdict, improved=False, stop=True)
    yield Evaluated(server.selection.best_round, "test", metrics)
    yield server.answers


def server_rounds(server: Server) -> Script:
    """The server's side of rounds t, t+1, ..., T-1."""
    train = server.config.train
    if server.owner >= 0 and train.sampler == "shared":
        yield from server_publication(server)
    coming = list(windows(server.round, server.config))
    for index, window in enumerate(coming):
        if index == 0 or train.prefetch == 0:
            yield from server_sampling(server, window)
        later = coming[index + 1 : index + 2] if train.prefetch else []
        server.riding = agreement_steps(server.config, later[0]) if later else []
        for round_index in window:
            yield from server_inference(server, round_index)
            if train.backward == "joint":
                yield from server_backward(server, round_index)
            elif server.owner >= 0:
                yield from server_gradient(server, round_index)
            server.round = round_index + 1
            yield from _evaluate_when_due(server)
            yield RoundDone(round_index)
            if server.stopped:
                return


def _evaluate_when_due(server: Server) -> Script:
    train, done = server.config.train, server.round
    if done % train.evaluate_every and done != train.num_rounds:
        return
    metrics = yield from server_evaluation(server, done, server.sizes.num_validation, train.task)
    server.selection = server.selection.after(metrics[SELECTED_BY[train.task]], done)
    improved, server.stopped = server.selection.best_round == done, server.selection.stops(train)
    server.answer(Verdict, improved=improved, stop=server.stopped)
    server.history.append({"round": done, "loss": server.losses[-1], **metrics})
    yield Evaluated(done, "validation", metrics, server.losses[-1], improved)
