"""The identity of a role in a run, and its state between two rounds.

Randomness is counter-based and needs no state. A new field of `Progress` or `ClientProgress` is saved and restored
without any other change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from glasu.data.presets import count_race_rounds
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
    """The identity of one role in a run. The keys of its messages derive from it."""

    names: tuple[str, ...]  # all parties, in client order
    labels: str  # "all", or the label owner
    index: int  # m, or SERVER
    run: bytes
    incarnation: int = 0  # how many times this party's process was started, this start included
    attempt: int = 0
    base: int = 0  # added to the rounds in keys, because the candidates of a race repeat rounds
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
        return Key(self.run, phase, self.index, self.base + round_index, layer, 0, self.incarnation, self.attempt)

    def round_of(self, key: Key) -> int:
        """Return the round that a key of this role is about."""
        return key.round - self.base


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
        if self.is_improved_by(score):
            return Selection(score, round_index, 0)
        # Patience counts evaluations after rounds. After a warm start there are two evaluations before round 0.
        return Selection(self.best, self.best_round, self.evaluations_since + (round_index > 0))

    def is_improved_by(self, score: float) -> bool:
        """Return whether a model with this score is selected."""
        return self.best is None or score > self.best or math.isnan(score)

    def stops(self, train: TrainConfig) -> bool:
        """Return whether training stops: no improvement within `patience`, or the target score is reached."""
        reached = self.best is not None and 0 < train.stop_at <= self.best
        return reached or 0 < train.patience <= self.evaluations_since


@dataclass(frozen=True)
class Race:
    """A race between candidates of the preset. The preferred candidate runs last, and continues if it wins."""

    order: tuple[int, ...]  # positions of the candidates, the preferred one first
    finished: int = 0  # number of candidates that have run and are discarded: the last ones of `order`
    scores: tuple[float, ...] = ()  # scores of the finished candidates, then of the preferred one; only at the server
    chosen: int | None = None  # position of the winner

    @property
    def candidate(self) -> int:
        """The position of the candidate that runs now."""
        return self.order[-1 - self.finished] if self.chosen is None else self.chosen

    @property
    def is_last(self) -> bool:
        """Whether the preferred candidate runs now."""
        return self.finished == len(self.order) - 1


@dataclass
class Progress:
    """The part of a role that changes from round to round.

    With a server, only the server's has losses and selection.
    """

    round: int = 0  # the next round
    selection: Selection = field(default_factory=Selection)
    stopped: bool = False
    losses: tuple[float, ...] = ()  # the mean loss of every round
    ensemble: bool = False  # the selected model is the warm ensemble; see `warm_start.py`
    race: Race | None = None  # None if the preset leaves no choice
    base: int = 0  # the value of `Identity.base`

    @property
    def position(self) -> int:
        """The number of rounds so far, including those of other candidates. It numbers the checkpoints."""
        return self.base + self.round

    def end(self, train: TrainConfig) -> int:
        """Return the number of rounds of the current candidate. In a race it is less than `train.num_rounds`."""
        racing = self.race is not None and self.race.chosen is None
        return count_race_rounds(train) if racing else train.num_rounds

    def start_over(self, num_rounds: int) -> None:
        """Begin with another candidate. The one before had at most this number of rounds."""
        # The last evaluation of a candidate has the key of round `num_rounds`, so the next candidate starts after it.
        self.base += num_rounds + 1
        self.round, self.selection, self.stopped, self.losses = 0, Selection(), False, ()

    def judge(self, score: float, train: TrainConfig) -> tuple[bool, bool]:
        """Add a validation score to the selection; return whether the model is the best so far, and whether to stop."""
        improved = self.selection.is_improved_by(score)
        self.selection = self.selection.after(score, self.round)
        self.stopped = self.selection.stops(train)
        return improved, self.stopped or self.round == train.num_rounds


@dataclass
class ClientProgress(Progress):
    """The progress of a client, besides weights, optimiser and ledger."""

    warm_steps: int = 0  # number of finished warm steps, the local steps before round 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)  # weights at the best evaluation
    is_collapsed: bool = False  # whether the last evaluated model predicts the same for all nodes
    best_is_collapsed: bool = False  # whether the best model on validation nodes does
    alpha: float | None = None  # if predictions are smoothed: the weight of the averaged class probabilities
    # With party dropout, at a client with labels: validation metrics of the selected model with some of the parties.
    subsets: dict[tuple[str, ...], dict[str, float]] = field(default_factory=dict)

    def start_over(self, num_rounds: int) -> None:
        """Begin with another candidate. The one before had at most this number of rounds."""
        super().start_over(num_rounds)
        self.best_weights = {}


@dataclass(frozen=True, eq=False)
class ClientState:
    """A client between two rounds."""

    config_digest: str
    incarnation: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    ledger: Ledger
    progress: ClientProgress
    references: Mapping[tuple[str, int], Reference]  # for representations that are sent as changes


@dataclass(frozen=True, eq=False)
class ServerState:
    """The server between two rounds."""

    config_digest: str
    run: bytes
    roster: tuple[str, ...]
    progress: Progress
