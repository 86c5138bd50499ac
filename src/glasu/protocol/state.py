"""The place of a role in a run, and its state between two rounds as one value.

Randomness is counter-based and needs no state. A new field of `Progress` or `ClientProgress` needs no other change to
be saved and restored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from glasu.privacy.feedback import Reference
from glasu.privacy.ledger import Ledger
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from glasu.config import TrainConfig

NO_OWNER = -1  # the index of the label owner when all clients have the labels


@dataclass
class Identity:
    """The place of one role in a run. It names the messages of the role."""

    names: tuple[str, ...]  # all parties, in client order
    labels: str  # "all", or the label owner
    index: int  # m, or SERVER
    run: bytes
    incarnation: int = 0  # number of this process among the starts of this party
    attempt: int = 0
    owner: int = field(init=False)  # index of the label owner, or NO_OWNER

    def __post_init__(self) -> None:
        self.owner = NO_OWNER if self.labels == "all" else self.names.index(self.labels)

    @property
    def num_clients(self) -> int:
        return len(self.names)

    def has_labels(self, client: int) -> bool:
        """Return whether a client has labels and a classifier."""
        return self.owner in (NO_OWNER, client)

    def key(self, phase: Phase, round_index: int, layer: int = -1) -> Key:
        """Return the key of a message of this role."""
        return Key(self.run, phase, self.index, round_index, layer, 0, self.incarnation, self.attempt)


@dataclass(frozen=True)
class Selection:
    """The best validation score so far, and the number of evaluations since then."""

    best: float | None = None
    best_round: int = -1
    evaluations_since: int = 0

    def after(self, score: float, round_index: int) -> Selection:
        """Return the selection after one more evaluation; a tie keeps the earlier model.

        Without validation nodes the score is NaN, and the latest model is selected.
        """
        if self.best is None or score > self.best or math.isnan(score):
            return Selection(score, round_index, 0)
        return Selection(self.best, self.best_round, self.evaluations_since + 1)

    def stops(self, train: TrainConfig) -> bool:
        """Return whether patience has run out, or the requested score is reached."""
        reached = self.best is not None and 0 < train.stop_at <= self.best
        return reached or 0 < train.patience <= self.evaluations_since


@dataclass
class Progress:
    """The part of a role that changes from round to round. If there is a server, only it selects and keeps losses."""

    round: int = 0  # the next round
    selection: Selection = field(default_factory=Selection)
    stopped: bool = False
    losses: tuple[float, ...] = ()  # the mean loss of every round

    def judge(self, score: float, train: TrainConfig) -> tuple[bool, bool]:
        """Add a validation score to the selection; return whether the model is the best so far, and the last one."""
        self.selection = self.selection.after(score, self.round)
        self.stopped = self.selection.stops(train)
        return self.selection.best_round == self.round, self.stopped or self.round == train.num_rounds


@dataclass
class ClientProgress(Progress):
    """The progress of a client, besides weights, optimiser and ledger."""

    best_weights: dict[str, Tensor] = field(default_factory=dict)  # of the best evaluation so far
    alpha: float | None = None  # where predictions are smoothed: the share of the averaged class probabilities
    # With party dropout, at a client with labels: validation metrics of the selected model with some of the parties.
    subsets: dict[tuple[str, ...], dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ClientState:
    """A client between two rounds."""

    config_digest: str
    incarnation: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    ledger: Ledger
    progress: ClientProgress
    references: Mapping[tuple[str, int], Reference]  # of representations that travel as changes


@dataclass(frozen=True, eq=False)
class ServerState:
    """The server between two rounds."""

    config_digest: str
    run: bytes
    roster: tuple[str, ...]
    progress: Progress
