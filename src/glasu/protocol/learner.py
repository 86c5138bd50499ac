"""The local part of a client: features and labels of its nodes, and its part of the model. It sends no message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.data.preprocessing import Preparation, fit_preparation, measure_prepared
from glasu.model.aggregation import make_aggregation
from glasu.model.blocks import NodeSet
from glasu.model.dropout import Dropout, make_no_dropout
from glasu.model.exact import ExactInference, FeatureRows
from glasu.model.layers import Hidden
from glasu.model.optimizer import find_schedule_factor, make_optimizer
from glasu.model.sampler import Sample, find_sampler
from glasu.model.sparse import SparseRows
from glasu.model.split import ClientModel, find_input_scale
from glasu.model.step import Inputs, Step, Steps
from glasu.model.task import Targets, Task, check_predictions, make_task
from glasu.randomness import EVERYONE, Stream, draw_distinct
from glasu.secret import Secret
from glasu.timing import Stopwatch
from glasu.wire.encodings import find_compute_dtype

EMPTY: NodeSet = np.empty(0, np.int64)
MAX_PREPARED = 1 << 24  # a dense matrix of at most this many values is prepared as a whole: 64 MiB in single precision


@dataclass(frozen=True, eq=False)
class Batch(Inputs):
    """The inputs of the layers, the labels and the nodes of one sample."""

    round: int
    labels: Tensor | None  # y of the examples
    nodes: tuple[NodeSet, ...]  # S_m[0..L], as agreed
    targets: Targets


class NodeData:
    """Prepared features, labels and splits of one party's nodes, in the precision of the run."""

    def __init__(
        self, config: RunConfig, party: PartyData, *, has_labels: bool, preparation: Preparation | None = None
    ) -> None:
        """Prepare the data of a party.

        Args:
            config: the run's settings, resolved.
            party: the data.
            has_labels: whether this client's labels are used.
            preparation: the preparation of the features, from a model trained earlier; None: fit it to this party's
                features.
        """
        self.train, self.party, self.has_labels = config.train, party, has_labels
        self.preparation = prepare_features(config, party) if preparation is None else preparation
        self.dtype = getattr(torch, find_compute_dtype(config).name)
        self.task = make_task(config.train)
        if has_labels and party.labels is not None:
            labels = party.labels[self.training_examples()]
            self.task.fit(labels, party.classes, config.train)
            if len(labels):
                check_predictions(self.task, labels[:1], party.classes)
        self._stored = party.features if isinstance(party.features, np.ndarray) else SparseRows.of(party.features)
        self._keeps_rows = find_sampler(config.train).reads_whole_graph  # all rows are read in every round
        self._all_rows: Hidden | None = None
        self._prepared: NDArray[Any] | None = None  # all rows of a small dense matrix

    @property
    def num_nodes(self) -> int:
        return self.party.num_nodes

    def features(self, nodes: NodeSet) -> Hidden:
        """Return the prepared rows of X_m at the nodes."""
        if len(nodes) < self.num_nodes or not self._keeps_rows:
            return self._rows(nodes)
        if self._all_rows is None:
            self._all_rows = self._rows(nodes)
        return self._all_rows

    def _rows(self, nodes: NodeSet) -> Hidden:
        stored, is_whole = self._stored, len(nodes) == self.num_nodes
        kind = np.float64 if self.dtype == torch.float64 else np.float32
        if isinstance(stored, np.ndarray):
            if stored.size <= MAX_PREPARED:  # preparing the rows of each batch would take longer than the input layer
                if self._prepared is None:
                    self._prepared = self.preparation.apply(stored, kind)
                return torch.from_numpy(self._prepared if is_whole else self._prepared[nodes])
            return torch.from_numpy(self.preparation.apply(stored if is_whole else stored[nodes], kind))
        sparse = stored if is_whole else stored.rows(nodes)
        return SparseRows(*self.preparation.apply_sparse(*sparse.parts, kind), self.preparation.width)

    def labels(self, examples: NodeSet) -> Tensor:
        """Return y of the examples, in the dtype that the loss needs."""
        assert self.party.labels is not None
        return self.task.label_tensor(self.party.labels[examples], self.dtype)

    def find_targets(self, examples: NodeSet) -> Targets:
        """Return the examples with the nodes that belong to them, as the task defines."""
        return self.task.find_targets(self.party, examples)

    def training_examples(self) -> NodeSet:
        """Return the training examples with known labels; empty at a client without labels."""
        party = self.party
        if not self.has_labels or party.splits is None or party.labels is None:
            return EMPTY
        return self.task.training_examples(party.labels, party.splits.train)

    def test_examples(self) -> NodeSet:
        """Return a copy of the test examples; empty at a client without labels."""
        splits = self.party.splits
        return splits.test.copy() if self.has_labels and splits is not None else EMPTY  # torch refuses read-only arrays

    def validation_examples(self) -> NodeSet:
        """Return a copy of the validation examples, or of a fixed subset of size `train.evaluate_nodes`."""
        splits, subset = self.party.splits, self.train.evaluate_nodes
        if not self.has_labels or splits is None:
            return EMPTY
        if 0 < subset < len(splits.validation):
            key = Stream(self.train.seed, "validation subset").key()
            chosen: NodeSet = splits.validation[draw_distinct(key, len(splits.validation), subset)]
            return chosen
        return splits.validation.copy()


def prepare_features(config: RunConfig, party: PartyData) -> Preparation:
    """Return the preparation of a party's features: fitted to its columns, or only the input scale."""
    if config.data.features == "none":
        return Preparation(party.num_features, find_input_scale(config.model, party.mean_length()))
    fitted = fit_preparation(party.features)
    return replace(fitted, input_scale=find_input_scale(config.model, measure_prepared(party.features, fitted)))


def make_classifier_stream(seed: int | Secret, layer: int) -> Stream:
    """Return the stream from which the initial classifier is drawn. It is equal at all clients with labels.

    Args:
        seed: the source of the draws. If all clients have labels, they use the public seed, so the server can also
            compute the initial classifier. With a warm start they use the run key, which the server does not have. A
            label owner uses its private seed: if its initial classifier were public, its first gradient would reveal
            the labels.
        layer: L.
    """
    return Stream(seed, "classifier", layer=layer, client=EVERYONE)


class Learner:
    """A client's layers, optimiser and sampler."""

    def __init__(
        self,
        config: RunConfig,
        data: NodeData,
        *,
        index: int,
        num_clients: int,
        num_outputs: int | None,
        private_seed: int | Secret | None = None,
        classifier_seed: int | Secret | None = None,
    ) -> None:
        """Draw the initial weights.

        Args:
            config: the run's settings, resolved.
            data: the client's features, labels and splits.
            index: m.
            num_clients: M.
            num_outputs: the width of the classifier, or None for a client without labels.
            private_seed: the seed of this client's initial weights, dropout masks and neighbours; None: `train.seed`.
            classifier_seed: the seed of the common classifier of a warm start; None: `train.seed`.
        """
        self.config, self.data = config, data
        self.private_seed = config.train.seed if private_seed is None else private_seed
        self.aggregation = make_aggregation(config.model, num_clients, index)

        def make_stream(purpose: str, layer: int) -> Stream:
            if purpose != "classifier":
                return Stream(self.private_seed, purpose, layer=layer, client=index)
            common = config.train.seed if classifier_seed is None else classifier_seed
            return make_classifier_stream(common if config.train.label_owner is None else self.private_seed, layer)

        self.model = ClientModel(
            config.model,
            num_clients=num_clients,
            num_features=data.preparation.width,
            num_outputs=num_outputs,
            stream=make_stream,
        ).to(data.dtype)
        if data.task.scale is not None:  # part of the weights, so that it is saved with them, in double precision
            self.model.register_buffer("label_scale", data.task.scale)
        self.optimizer = make_optimizer(config, self.model)
        # The optimizer has laid out the parameters, and their storage never changes. So one `state_dict` stays valid,
        # unless there are buffers, which a module may replace.
        self._weights = None if any(True for _ in self.model.buffers()) else self.model.state_dict()
        self.steps = Steps(self.model, self.optimizer)
        self.sampler = find_sampler(config.train)(config, data.party.graph, index, self.private_seed)
        self._fixed: Mapping[str, Tensor] = {}  # weights that no step changes

    @property
    def task(self) -> Task:
        return self.data.task

    def dropout(self, round_index: int, step: int | None) -> Dropout:
        """Return the dropout masks of a local step. An evaluation passes `step=None` and gets no masks.

        JointInference uses the masks of step 0, so that step 0 can reuse its forward pass.
        """
        if step is None:
            return make_no_dropout()
        seed, client = self.private_seed, self.aggregation.client
        return Dropout(
            self.config.model.dropout,
            lambda layer: Stream(seed, "dropout", round=round_index, step=step, layer=layer, client=client),
        )

    def gather(self, sample: Sample, *, with_labels: bool = True) -> Batch:
        """Gather blocks, features and labels of a sample."""
        blocks, nodes = self.sampler.blocks(sample.nodes, sample.draws)
        rows = [blocks[0].positions]  # positions in S_m[0] of the nodes S_m[1]; then of S_m[2], and so on
        for block in blocks[1:]:
            rows.append(rows[-1][block.positions])
        targets = sample.targets
        labels = self.data.labels(targets.examples) if self.data.has_labels and with_labels else None
        return Batch(self.data.features(nodes[0]), blocks, tuple(rows), sample.round, labels, sample.nodes, targets)

    def step(self, batch: Batch, step: int | None) -> Step:
        """Return a local step as an object that runs the layers.

        With `step=None`, the object runs a forward pass without dropout or gradients.
        """
        return self.steps.make(batch, self.dropout(batch.round, step), recording=step is not None)

    def loss_and_gradient(self, step: Step, joint: Tensor, batch: Batch) -> tuple[float, Tensor]:
        """Return the loss and its gradient at H_m[L]. The step stores the gradient at the classifier's weights."""
        assert batch.labels is not None
        logits = batch.targets.read_rows(step.logits(joint))
        value, gradient = self.task.loss_and_gradient(logits, batch.labels)
        return value, step.backward_classifier(batch.targets.add_rows(gradient))

    def exact_inference(self, nodes: NodeSet) -> ExactInference:
        """Return the forward pass with every edge.

        If the sampler does not read the whole graph, features are read from their file piece by piece.
        """
        shape, chunk = (self.data.num_nodes, self.data.preparation.width), FeatureRows.chunk_values
        features = FeatureRows(shape, self.data.features, None if self.sampler.reads_whole_graph else chunk)
        return ExactInference(self.model, self.sampler, features, nodes)

    @torch.no_grad()
    def scores(self, joint: Tensor, targets: Targets) -> Tensor:
        """Return the scores of this client's classifier, for example class probabilities, one row per example."""
        return self.task.scores(targets.read_rows(self.model.classify(joint, make_no_dropout())))

    def set_learning_rate(self, round_index: int) -> None:
        """Apply the schedule, which is a function of the round alone."""
        self.optimizer.learning_rate = self.config.train.learning_rate * find_schedule_factor(self.config, round_index)

    def classifier_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights that turn H_m[L] into logits: the head and the norm before it."""
        own = ("head.", "classifier.", f"norms.{self.config.model.num_layers - 1}.")
        return {name: tensor for name, tensor in self.weights().items() if name.startswith(own)}

    @contextmanager
    def fix_classifier(self) -> Iterator[None]:
        """Keep the weights of the classifier constant. The steps inside this context change only the other weights."""
        self._fixed = self.classifier_weights()
        try:
            yield
        finally:
            self._fixed = {}

    def take_step(self, pending: Sequence[slice]) -> None:
        """Update the weights after a backward pass, and restore the fixed weights.

        Args:
            pending: the parts of the weight vector that the backward pass has not updated (`Step.pending`).
        """
        self.optimizer.step(pending)
        if self._fixed:  # the backward pass of plain SGD has changed them, too
            found = self._find_weights()
            for name, tensor in self._fixed.items():
                found[name].copy_(tensor)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights."""
        return {name: tensor.detach().clone() for name, tensor in self._find_weights().items()}

    def _find_weights(self) -> Mapping[str, Tensor]:
        """Return the weights themselves, not a copy."""
        return self.model.state_dict() if self._weights is None else self._weights

    def restore(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Continue with saved weights and a saved state of the optimiser."""
        self.model.load_state_dict(dict(weights))
        self.model.train()
        self.optimizer.restore(optimizer)


class LookAhead:
    """Gathers every batch once: at the start of its round, or earlier, while the client waits for an answer.

    Blocks and features of the next round do not depend on the answers of this round.
    """

    def __init__(self, learner: Learner, watch: Stopwatch) -> None:
        self.learner, self.watch = learner, watch
        self._following: Sample | None = None
        self._batch: Batch | None = None  # the batch of `_following`, after it was gathered

    def take(self, sample: Sample, following: Sample | None) -> Batch:
        """Return the batch of this round.

        Args:
            sample: the sample of this round.
            following: the sample of the next round, if it is known.
        """
        batch = self._batch if self._following is sample else None
        self._following, self._batch = following, None
        return self._gather(sample) if batch is None else batch

    def gather_next(self) -> None:
        """Gather the batch of the next round, if its sample is known and the batch was not gathered before."""
        if self._following is not None and self._batch is None:
            self._batch = self._gather(self._following)

    def clear(self) -> None:
        """Forget the next round, because training stops or starts again from a saved state."""
        self._following = self._batch = None

    def _gather(self, sample: Sample) -> Batch:
        with self.watch.measure("sampling"):
            return self.learner.gather(sample)
