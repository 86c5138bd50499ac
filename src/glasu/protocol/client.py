"""A client: the data, model, gate and progress of one party in a run. The scripts of this package drive it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.errors import ConfigError, ProtocolError, TrainingError
from glasu.model.layers import Convolution
from glasu.privacy.ledger import Ledger
from glasu.privacy.release import Release
from glasu.protocol.fields import split_rows
from glasu.protocol.learner import Learner, NodeData
from glasu.protocol.messages import TensorMessage
from glasu.protocol.state import ClientState, Selection
from glasu.timing import Stopwatch
from glasu.wire.encodings import Kind, encodings_of
from glasu.wire.message_key import RUN_BYTES, Key, Phase

NO_OWNER = -1  # the label owner's index when all clients have the labels


def find_owner(config: RunConfig, names: Sequence[str]) -> int:
    """Return the index of the label owner, or NO_OWNER when all clients have the labels."""
    return NO_OWNER if config.train.labels == "all" else list(names).index(config.train.labels)


@dataclass
class Identity:
    """The place of one client in a run. It names the client's messages."""

    config: RunConfig
    names: tuple[str, ...]  # all parties, in client order
    index: int  # m
    run: bytes
    incarnation: int = 0  # number of this process among the starts of this party
    attempt: int = 0

    @property
    def num_clients(self) -> int:
        return len(self.names)

    @property
    def owner(self) -> int:
        return find_owner(self.config, self.names)

    @property
    def has_labels(self) -> bool:
        return self.owner in (NO_OWNER, self.index)

    def key(self, phase: Phase, round_index: int, layer: int = -1) -> Key:
        """Return the key of a message of this client."""
        return Key(self.run, phase, self.index, round_index, layer, 0, self.incarnation, self.attempt)


@dataclass
class Progress:
    """The part of a client's state that changes from round to round, besides weights and ledger."""

    round: int = 0  # the next round to compute
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    test_metrics: dict[str, float] = field(default_factory=dict)  # of the selected model, at a client with labels
    selection: Selection | None = None  # only where no server selects
    stopped: bool = False
    key_epoch: int = 0
    noise_secret: bytes = field(default=b"", repr=False)  # empty: no noise


class Client:
    """One party in a training."""

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
            party: the data that this client owns.
            index: m.
            names: all parties in client order.
            num_outputs: the number of classes.
            watch: adds up the client's seconds.
            convolution: builds the layers of backbone "custom".
            scale: the input scale of a model trained earlier; None: as the config says.
        """
        self.config, self.party, self.watch = config, party, watch
        run = bytes.fromhex(config.digest())[:RUN_BYTES]  # a runtime with a server replaces it
        self.identity = Identity(config, tuple(names), index, run)
        self.data = NodeData.of(config, party, has_labels=self.identity.has_labels, scale=scale)
        self.learner = Learner(
            config,
            self.data,
            index=index,
            num_clients=len(names),
            num_outputs=num_outputs if self.identity.has_labels else None,
            convolution=convolution,
        )
        self.release = Release(encodings_of(config))
        alone = not config.model.aggregation_layers
        self.progress = Progress(selection=Selection() if alone else None)

    @property
    def name(self) -> str:
        return self.party.name

    @property
    def has_labels(self) -> bool:
        return self.identity.has_labels

    def check_loss(self, value: float, round_index: int) -> float:
        """Return the loss; raise TrainingError if it is not finite."""
        if not math.isfinite(value):
            raise TrainingError(
                f"party {self.name!r}, round {round_index}: the loss is {value}; training diverged. "
                "Lower train.learning_rate."
            )
        return value

    def read(self, kind: Kind, message: TensorMessage, shape: tuple[int, int]) -> Tensor:
        """Decode the tensor of an answer; refuse another encoding or shape, NaN and infinity."""
        encoding, where = self.release.encodings[kind], f"party {self.name!r}, {message.key}"
        if flaw := encoding.flaw(message.value):
            raise ProtocolError(f"{where}, {encoding.name} tensor: {flaw}.")
        if not encoding.is_finite(message.value):
            raise TrainingError(
                f"{where}: expected a {kind} of finite values, got NaN or infinity. It was not used. Training "
                "diverged: lower train.learning_rate. If other parties report finite values, check the server."
            )
        value = encoding.decode(message.value)
        if value.shape != shape:
            raise ProtocolError(f"{where}: expected a {kind} of shape {shape}, got {value.shape}.")
        return torch.from_numpy(value)

    def read_rows(
        self,
        kind: Kind,
        answers: Sequence[TensorMessage],
        shape: tuple[int, int],
        requested: NDArray[np.bool_] | None = None,
    ) -> Tensor:
        """Decode a tensor that arrived in chunks.

        Args:
            kind: the kind of tensor.
            answers: the chunks, in order.
            shape: the shape of the whole tensor.
            requested: the rows that this client receives, if not all.
        """
        rows, columns = shape
        parts = []
        for answer, part in zip(answers, split_rows(rows, self.config.wire.chunk_rows), strict=True):
            expected = part.stop - part.start if requested is None else int(np.count_nonzero(requested[part]))
            parts.append(self.read(kind, answer, (expected, columns)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def state(self, traffic: Mapping[str, Any] | None = None) -> ClientState:
        """Return the state for a checkpoint. The runtime supplies the traffic counted so far."""
        ledger, progress = self.release.ledger, self.progress
        return ClientState(
            config_digest=self.config.digest(),
            round=progress.round,
            weights=self.learner.weights(),
            optimizer=self.learner.optimizer.state(),
            best_weights=dict(progress.best_weights),
            selection=progress.selection,
            stopped=progress.stopped,
            incarnation=self.identity.incarnation,
            key_epoch=progress.key_epoch,
            noise_secret=progress.noise_secret,
            traffic=dict(traffic or {}),
            ledger_head=ledger.head,
            ledger_totals={key: tuple(total) for key, total in ledger.totals.items()},
        )

    def restore(self, state: ClientState) -> None:
        """Continue from a saved state."""
        if state.config_digest != self.config.digest():
            raise ConfigError("the saved state belongs to a run with other settings; start over.")
        self.learner.restore(state.weights, state.optimizer)
        self.identity.incarnation = state.incarnation
        self.progress = Progress(
            round=state.round,
            best_weights=dict(state.best_weights),
            selection=state.selection,
            stopped=state.stopped,
            key_epoch=state.key_epoch,
            noise_secret=state.noise_secret,
        )
        self.release.ledger = Ledger(state.ledger_head, {key: list(row) for key, row in state.ledger_totals.items()})
