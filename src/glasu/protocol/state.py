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
from glasu.privacy.masking import SumHistory
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from glasu.config import TrainConfig

DIVERGED = -math.inf  # used as a score; worse than every other score


@dataclass
class Identity:
    """The identity of one role in a run. The keys of its messages are derived from it."""

    names: tuple[str, ...]  # all parties, in client order
    label_owner: str | None  # None: all clients have the labels
    index: int  # m; at the server, SERVER
    run: bytes
    incarnation: int = 0  # number of starts of this party's process, including the current one
    attempt: int = 0  # number of the attempt; one begins whenever all roles start or resume together
    earlier_rounds: int = 0  # rounds that earlier candidates of a race used; added to the round of message keys
    owner: int | None = field(init=False)  # index of the label owner

    def __post_init__(self) -> None:
        self.owner = None if self.label_owner is None else self.names.index(self.label_owner)

    @property
    def num_clients(self) -> int:
        return len(self.names)

    def has_labels(self, client: int) -> bool:
        """Return whether a client has labels and a classifier."""
        return self.owner in (None, client)

    def key(self, phase: Phase, round_index: int, layer: int = -1) -> Key:
        """Return the key of a message of this role."""
        return self.fixed_key(phase, self.earlier_rounds + round_index, layer)

    def fixed_key(self, phase: Phase, round_index: int, layer: int = -1) -> Key:
        """Return the key of a message with exactly this round number. Rounds of earlier candidates are not added."""
        return Key(self.run, phase, self.index, round_index, layer, 0, self.incarnation, self.attempt)

    def find_round(self, key: Key) -> int:
        """Return the round number of a key, without the rounds of earlier candidates. Inverse of `key`."""
        return key.round - self.earlier_rounds


@dataclass(frozen=True)
class Selection:
    """The best validation score so far, and the number of evaluations since then."""

    best: float | None = None
    best_round: int = -1
    evaluations_since: int = 0

    def add_score(self, score: float, round_index: int) -> Selection:
        """Return the selection after one more evaluation; a tie keeps the earlier model.

        Without validation nodes the score is NaN, and the latest model is selected.
        """
        if self.is_improved_by(score):
            return Selection(score, round_index, 0)
        # Patience counts only evaluations after rounds. A warm start adds two evaluations before round 0.
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
    finished: int = 0  # number of candidates that have run and cannot continue; they are at the end of `order`
    # Scores of the finished candidates, then of the preferred one; only at the server.
    scores: tuple[float, ...] = ()
    chosen: int | None = None  # position of the winner
    releases: int = 0  # at a client: the number of its releases until the choice

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
    """The part of a role's state that changes from round to round.

    If the server gets losses and metrics, only its progress contains losses and the selection. Otherwise only the
    progress of clients with labels contains them.
    """

    round: int = 0  # the next round
    selection: Selection = field(default_factory=Selection)
    stopped: bool = False  # whether training has stopped
    losses: tuple[float, ...] = ()  # the mean loss of every round
    ensemble: bool = False  # whether the selected model is the warm ensemble (`warm_start.py`)
    race: Race | None = None  # None before a race, and if the preset leaves nothing to decide
    earlier_rounds: int = 0  # number of rounds of earlier candidates, as in `Identity`
    diverged: bool = False  # in a race: whether training diverged; at the server, whether it did at any client

    @property
    def is_racing(self) -> bool:
        """Whether the current candidate can still lose a race."""
        return self.race is not None and self.race.chosen is None

    def describe_position(self, num_rounds: int | None = None) -> str:
        """Describe for a log line how many rounds are done; in a race, the rounds of the current candidate."""
        done = f"round {self.round}" if num_rounds is None else f"round {self.round} of {num_rounds}"
        if self.race is None or self.race.chosen is not None:
            return done
        return f"{done} of candidate {self.race.finished + 1} of {len(self.race.order)} in the race"

    @property
    def position(self) -> int:
        """The number of rounds so far, including those of other candidates. Checkpoints are numbered by it."""
        return self.earlier_rounds + self.round

    def end(self, train: TrainConfig) -> int:
        """Return the number of rounds of the current candidate. In a race, it is less than `train.num_rounds`."""
        return count_race_rounds(train) if self.is_racing else train.num_rounds

    def mark_divergence(self) -> bool:
        """Mark the training as diverged; return whether the run continues. It continues only in a race.

        A candidate that diverges loses the race. All roles learn this in the next evaluation. Until then, the client
        sends finite placeholder values, so that the exchanges with the other clients can continue.
        """
        self.diverged = self.is_racing
        return self.diverged

    def start_over(self, last: int) -> None:
        """Begin with another candidate. Keys of the previous candidate have round numbers up to `last`."""
        self.earlier_rounds += last + 1
        self.round, self.selection, self.stopped, self.losses, self.diverged = 0, Selection(), False, (), False

    def judge(self, score: float, train: TrainConfig) -> tuple[bool, bool]:
        """Add a validation score to the selection; return whether the model is the best so far, and whether to stop."""
        improved = self.selection.is_improved_by(score)
        self.selection = self.selection.add_score(score, self.round)
        self.stopped = self.selection.stops(train)
        return improved, self.stopped or self.round == train.num_rounds


@dataclass
class ClientProgress(Progress):
    """The progress of a client. Its current weights and its optimiser are not part of it."""

    warm_steps: int = 0  # number of local steps before round 0 that are done
    best_weights: dict[str, Tensor] = field(default_factory=dict)  # weights of the best evaluation so far
    lower: dict[str, Tensor] = field(default_factory=dict)  # weights of the lower stage (`stages.py`)
    best_is_collapsed: bool = False  # whether the selected model has learned nothing
    alpha: float | None = None  # if predictions are smoothed: the weight of the averaged class probabilities
    # With party dropout, at a client with labels: validation metrics of the selected model with some of the parties.
    subsets: dict[tuple[str, ...], dict[str, float]] = field(default_factory=dict)

    def start_over(self, last: int) -> None:
        """Begin with another candidate. Keys of the previous candidate have round numbers up to `last`."""
        super().start_over(last)
        self.best_weights, self.warm_steps = {}, 0


@dataclass(frozen=True, eq=False)
class ClientState:
    """A client between two rounds."""

    config_digest: str
    incarnation: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    progress: ClientProgress
    references: Mapping[tuple[str, int], Reference]  # references of representations that are sent as changes
    ranges: Mapping[tuple[str, int], Tensor]  # ranges of the grids of hidden tensors, by kind and layer
    clamped: int = 0  # number of values outside these grids so far
    history: SumHistory = field(default_factory=SumHistory)  # the hidden sums that the client has read


@dataclass(frozen=True, eq=False)
class ServerState:
    """The server between two rounds."""

    config_digest: str
    run: bytes
    roster: tuple[str, ...]
    progress: Progress
