"""Client: what one party holds while it trains: data, model, optimiser, and the gate to the outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasu.config import RunConfig
from glasu.data.party import PartyData, have_labels
from glasu.errors import ConfigError, ProtocolError, TrainingError
from glasu.model.aggregation import aggregation_of
from glasu.model.blocks import NodeSet
from glasu.model.dropout import Dropout, no_dropout
from glasu.model.exact import FeatureRows, exact_layer, exact_start
from glasu.model.fused.gcnii import TO_WRITE, FusedStep, Hand
from glasu.model.layers import Convolution, Hidden
from glasu.model.loss import loss_and_gradient
from glasu.model.optimizer import Optimizer, schedule_factor
from glasu.model.sampler import Sampler, training_batch
from glasu.model.sparse import SparseRows
from glasu.model.split import NORMALIZATION, ClientModel, input_scale
from glasu.model.step import AutogradStep, Inputs, Step
from glasu.privacy.ledger import Ledger
from glasu.privacy.release import Release
from glasu.protocol.chunks import message_chunks
from glasu.protocol.messages import NO_NUMBERS, TensorMessage
from glasu.protocol.sampling import Sample
from glasu.protocol.state import ClientState, Selection
from glasu.randomness import EVERYONE, Stream, draw_distinct
from glasu.timing import Stopwatch
from glasu.wire.encodings import Kind, encodings_of
from glasu.wire.message_key import RUN_BYTES, Key, Phase

NOBODY = -1  # the label owner's index when everybody has the labels
EMPTY: NodeSet = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Batch(Inputs):
    """A sample with everything that the layers read."""

    round: int
    labels: Tensor | None  # y[S[L]]


def owner_index(config: RunConfig, names: Sequence[str]) -> int:
    """Return who holds the labels, or NOBODY when everybody does."""
    return NOBODY if config.train.labels == "all" else list(names).index(config.train.labels)


def run_id(config: RunConfig) -> bytes:
    """Return the identity of a run that needs no server to choose one: the digest of its settings."""
    return bytes.fromhex(config.digest())[:RUN_BYTES]


class Client:
    """One party in a training; the scripts of this package drive it."""

    def __init__(
        self,
        config: RunConfig,
        party: PartyData,
        *,
        index: int,
        names: Sequence[str],
        num_outputs: int,
        watch: Stopwatch,
        convolution: Convolution | None = None,
        scale: float | None = None,
    ) -> None:
        """Build the client's model and optimiser from the seeds in `config`.

        Args:
            config: the run's settings, resolved.
            party: what this client owns.
            index: m.
            names: all parties in client order.
            num_outputs: the number of classes.
            watch: where seconds are added up.
            convolution: builds the layers of backbone "custom".
            scale: the input scale of a model trained earlier; None: as the config says.
        """
        self.config, self.party, self.index, self.watch = config, party, index, watch
        self.num_clients, self.names = len(names), tuple(names)
        self.owner = owner_index(config, names)
        self.has_labels = self.owner in (NOBODY, index)
        self.dtype = torch.float64 if config.wire.precision == "fp64" else torch.float32
        self.aggregation = aggregation_of(config.model, self.num_clients, index)
        self.model = ClientModel(
            config.model,
            num_clients=self.num_clients,
            num_features=party.num_features,
            num_outputs=num_outputs if self.has_labels else None,
            stream=self._initial_stream,
            convolution=convolution,
        ).to(self.dtype)
        self.optimizer = Optimizer(config, self.model)
        self.hand = Hand.of(self.model, directly=self.optimizer.is_plain)
        self.sampler = Sampler(config, party.graph, index, NORMALIZATION[config.model.backbone])
        self.scale = input_scale(config.model, party.mean_length()) if scale is None else scale
        self.release = Release(encodings_of(config))
        self.training_nodes = self._own_training_nodes()
        self.run = run_id(config)
        self.round, self.incarnation, self.attempt, self.key_epoch = 0, 0, 0, 0
        self.noise_secret = b""  # of GaussianNoise in the gate; empty: no noise
        self.losses: list[float] = []
        self.coming: Callable[[], Sample | None] = lambda: None  # the sample of the next round, once it is agreed
        self._ready: tuple[Sample, Batch] | None = None  # what was gathered ahead
        self.best_weights: dict[str, Tensor] = {}
        self.tested: dict[str, float] = {}  # the scores of the selected model, at a client with labels
        self.selection: Selection | None = None if config.model.aggregation_layers else Selection()
        self.stopped = False
        stored = party.features
        self._stored = stored if isinstance(stored, np.ndarray) else SparseRows.of(stored)
        self._all_features: Hidden | None = None

    def _own_training_nodes(self) -> NodeSet:
        """Return the training nodes that this client knows before any message."""
        return _labelled_training_nodes(self.party) if self.has_labels else EMPTY

    def _initial_stream(self, purpose: str, layer: int) -> Stream:
        sharer = EVERYONE if purpose == "classifier" else self.index  # classifiers start equal at all clients
        return Stream(self.config.train.seed, purpose, layer=layer, client=sharer)

    def key(self, phase: Phase, round_index: int, layer: int = -1, chunk: int = 0) -> Key:
        """Name a message of this client."""
        return Key(
            run=self.run,
            phase=phase,
            client=self.index,
            round=round_index,
            layer=layer,
            chunk=chunk,
            incarnation=self.incarnation,
            attempt=self.attempt,
        )

    def dropout(self, round_index: int, step: int | None) -> Dropout:
        """Return the masks of one local step (JointInference uses those of step 0), or none for evaluation."""
        if step is None:
            return no_dropout()
        seed, client = self.config.train.seed, self.index
        return Dropout(
            self.config.model.dropout,
            lambda layer: Stream(seed, "dropout", round=round_index, step=step, layer=layer, client=client),
        )

    def batch_nodes(self, round_index: int) -> NodeSet:
        """Draw S[L]; empty at a client that does not know the training nodes."""
        return training_batch(self.config, self.training_nodes, round_index)

    def features(self, nodes: NodeSet) -> Hidden:
        """Return the scaled rows of X_m; sampler "full" asks for all of them again and again, and they are kept."""
        if len(nodes) < self.party.num_nodes or self.config.train.sampler != "full":
            return self._rows(nodes)
        if self._all_features is None:
            self._all_features = self._rows(nodes)
        return self._all_features

    def _rows(self, nodes: NodeSet) -> Hidden:
        stored, everything = self._stored, len(nodes) == self.party.num_nodes
        if isinstance(stored, np.ndarray):
            return torch.from_numpy(self._scaled(stored if everything else stored[nodes]))
        sparse = stored if everything else stored.rows(nodes)
        return sparse.with_data(self._scaled(sparse.data))

    def _scaled(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """Return features times the input scale, in the precision of the run."""
        kind = np.float64 if self.dtype == torch.float64 else np.float32
        return np.multiply(values, kind(self.scale), dtype=kind)

    def labels(self, nodes: NodeSet) -> Tensor:
        """Return y at the nodes, as the loss wants it."""
        assert self.party.labels is not None
        labels = torch.from_numpy(self.party.labels[nodes])
        return labels.to(self.dtype) if self.config.train.task == "multilabel" else labels

    def finite(self, value: float, round_index: int) -> float:
        """Return the loss, or stop the run where it is not a number any more."""
        if not math.isfinite(value):
            raise TrainingError(
                f"party {self.party.name!r}, round {round_index}: the loss is {value}; training diverged. "
                "Lower train.learning_rate."
            )
        return value

    def look_ahead(self) -> None:
        """Gather what the next round reads, if it is known: for a runtime to call while an answer is on its way."""
        sample = self.coming()
        if sample is not None and (self._ready is None or self._ready[0] is not sample):
            self._ready = sample, self.gather(sample)

    def forget_ahead(self) -> None:
        """Gather nothing ahead any more, and keep nothing of it: what came next does not come."""
        self.coming, self._ready = lambda: None, None

    def batch(self, sample: Sample) -> Batch:
        """Return what the layers read for a sample to learn from."""
        if self._ready is not None and self._ready[0] is sample:
            return self._ready[1]
        return self.gather(sample)

    def gather(self, sample: Sample, *, to_learn: bool = True) -> Batch:
        """Gather what the layers read for a sample, and the labels, if it is to learn from."""
        with self.watch.measure("sampling"):
            blocks, nodes = self.sampler.blocks(sample.nodes, sample.draws)
            rows = [blocks[0].positions]  # of S_m[1] in S_m[0]; then of S_m[2] among those, and so on
            for block in blocks[1:]:
                rows.append(rows[-1][block.positions])
            labels = self.labels(nodes[-1]) if self.has_labels and to_learn else None
            return Batch(self.features(nodes[0]), blocks, tuple(rows), sample.round, labels)

    def passes(self, batch: Batch, step: int | None) -> Step:
        """Return the passes of one local step through the layers; None: of an evaluation, which goes forward only."""
        dropout = self.dropout(batch.round, step)
        dense = self.sampler.keeps_matrices and any(block.dense is not None for block in batch.blocks)
        if self.hand is not None and not dense:
            return FusedStep(self.hand, batch, dropout, self.optimizer.descent if self.optimizer.is_plain else TO_WRITE)
        return AutogradStep(self.model, batch, dropout, recording=step is not None)

    def back_from_loss(self, passes: Step, joint: Tensor, batch: Batch) -> tuple[float, Tensor]:
        """Return the client's loss at H_m[L], and its gradient there; the passes keep the classifier's."""
        assert batch.labels is not None
        value, gradient = loss_and_gradient(self.config.train.task, passes.logits(joint), batch.labels)
        return self.finite(value, batch.round), passes.back_from_logits(gradient)

    def back(self, passes: Step, layer: int, gradient: Tensor) -> Tensor | None:
        """Return the gradient at H_m[l], given that at what H_m^+[l] was when it had passed the gate."""
        if layer in self.model.aggregation_layers:
            gradient = self.release.clip_gradient(passes.partials[layer], gradient)
        return passes.back(layer, gradient)

    def gradient_at(self, joint: Tensor, batch: Batch) -> Tensor:
        """Return G, the gradient of the loss of step 0 at H[L]."""
        return self.back_from_loss(self.passes(batch, 0), joint, batch)[1]

    def end_step(self, passes: Step, gradient: Tensor | None) -> None:
        """Go back through the encoder, given the gradient at H_m[0], and change the weights."""
        passes.back_to_features(gradient)
        self.optimizer.step(passes.pending)

    def take_losses(self, key: Key) -> NDArray[np.float64]:
        """Return the losses that have not been sent yet, for the message named by `key` to carry."""
        losses, self.losses = self.losses, []
        return self.release.numbers("losses", losses, key) if losses else NO_NUMBERS

    def evaluation_nodes(self, split: str) -> NodeSet:
        """Return the nodes of a split in their order, or the fixed subset that `evaluate_nodes` asks for; a copy."""
        splits, subset = self.party.splits, self.config.train.evaluate_nodes
        if not self.has_labels or splits is None:
            return EMPTY
        if split == "test":
            return splits.test.copy()  # torch wants to be able to write to what it reads
        if 0 < subset < len(splits.validation):
            key = Stream(self.config.train.seed, "validation subset").key()
            chosen: NodeSet = splits.validation[draw_distinct(key, len(splits.validation), subset)]
            return chosen
        return splits.validation.copy()

    def exact_start(self) -> tuple[Hidden | FeatureRows, Tensor | None]:
        """Return H_m[0] and H_m^0 for all nodes; of a graph that is sampled, the features stay where they are."""
        if self.config.train.sampler != "full":
            shape = (self.party.num_nodes, self.party.num_features)
            return exact_start(self.model, FeatureRows(shape, self.features))
        with torch.no_grad():
            return self.model.encode(self.features(np.arange(self.party.num_nodes)), no_dropout())

    def empty_rows(self, count: int) -> Tensor:
        """Return room for so many rows of H_m^+[l]."""
        return torch.empty(count, self.config.model.hidden, dtype=self.dtype)

    def exact_layer(
        self, layer: int, hidden: Hidden | FeatureRows, initial: Tensor | None, targets: NodeSet
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield H_m^+[l] at `targets` with every edge: which of the targets, and their rows."""
        return exact_layer(self.model, self.sampler, layer, hidden, initial, targets)

    def joint_shape(self, partial: Tensor) -> tuple[int, int]:
        """Return the shape of H[l+1], given H_m^+[l]."""
        rows, columns = partial.shape
        return rows, columns * self.aggregation.widening

    def read(self, kind: Kind, message: TensorMessage, shape: tuple[int, int]) -> Tensor:
        """Return the tensor of an answer, or refuse one of another encoding or shape than expected, or no numbers."""
        encoding = self.release.encodings[kind]
        if flaw := encoding.flaw(message.value):
            raise ProtocolError(f"{self._asked(message)}, {encoding.name} tensor: {flaw}.")
        if not encoding.is_finite(message.value):
            raise TrainingError(
                f"{self._asked(message)}: expected a {kind} of finite values, got NaN or infinity; nothing was "
                "computed with it. Training diverged: lower train.learning_rate, or the server is none of ours."
            )
        value = encoding.decode(message.value)
        if value.shape != shape:
            raise ProtocolError(f"{self._asked(message)}: expected a {kind} of shape {shape}, got {value.shape}.")
        return torch.from_numpy(value)

    def _asked(self, answer: TensorMessage) -> str:
        return f"party {self.party.name!r}, {answer.key}"

    def read_rows(
        self,
        kind: Kind,
        answers: Sequence[TensorMessage],
        shape: tuple[int, int],
        asked: NDArray[np.bool_] | None = None,
    ) -> Tensor:
        """Return the tensor of the answers to a tensor that was sent in chunks.

        Args:
            kind: what it holds.
            answers: to the chunks, in their order.
            shape: of the whole answer; or, with `asked`, of what it would be if all rows were.
            asked: which rows this client asked for, where it receives no others.
        """
        rows, columns = shape
        if len(answers) == 1:
            return self.read(kind, answers[0], shape if asked is None else (int(np.count_nonzero(asked)), columns))
        parts = []
        for answer, part in zip(answers, message_chunks(rows), strict=True):
            expected = part.stop - part.start if asked is None else np.count_nonzero(asked[part])
            parts.append(self.read(kind, answer, (int(expected), columns)))
        return torch.cat(parts)

    @torch.no_grad()
    def probabilities(self, joint: Tensor) -> Tensor:
        """Return the class probabilities of this client's classifier."""
        logits = self.model.classify(joint, no_dropout())
        return logits.sigmoid() if self.config.train.task == "multilabel" else logits.softmax(dim=1)

    def set_learning_rate(self, round_index: int) -> None:
        """Apply the schedule: a function of the round alone."""
        self.optimizer.learning_rate = self.config.train.learning_rate * schedule_factor(self.config, round_index)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def state(self, traffic: Mapping[str, Any] | None = None) -> ClientState:
        """Return everything that a checkpoint needs; the traffic is counted by the runtime."""
        ledger = self.release.ledger
        return ClientState(
            config_digest=self.config.digest(),
            round=self.round,
            weights=self.weights(),
            optimizer=self.optimizer.state(),
            best_weights=dict(self.best_weights),
            selection=self.selection,
            losses=tuple(self.losses),
            stopped=self.stopped,
            incarnation=self.incarnation,
            key_epoch=self.key_epoch,
            noise_secret=self.noise_secret,
            traffic=dict(traffic or {}),
            ledger_head=ledger.head,
            ledger_totals={key: tuple(total) for key, total in ledger.totals.items()},
        )

    def restore(self, state: ClientState) -> None:
        """Become what `state` describes."""
        if state.config_digest != self.config.digest():
            raise ConfigError("the saved state belongs to a run with other settings; start afresh.")
        self.forget_ahead()
        self.model.load_state_dict(dict(state.weights))
        self.model.train()
        self.training_nodes = self._own_training_nodes()
        self.optimizer.restore(state.optimizer)
        self.best_weights = dict(state.best_weights)
        self.round, self.selection, self.stopped = state.round, state.selection, state.stopped
        self.losses, self.incarnation, self.key_epoch = list(state.losses), state.incarnation, state.key_epoch
        self.noise_secret = state.noise_secret
        self.release.ledger = Ledger(state.ledger_head, {key: list(row) for key, row in state.ledger_totals.items()})


def _labelled_training_nodes(party: PartyData) -> NodeSet:
    """Return the training nodes whose labels are known; the others have nothing to teach."""
    if party.splits is None or party.labels is None:
        return EMPTY
    labels = party.labels[party.splits.train]
    known: NodeSet = party.splits.train[have_labels(labels)]
    return known
