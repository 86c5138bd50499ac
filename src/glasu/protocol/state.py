"""What a role must keep to go on after a crash, as one value per role; randomness is counter-based and needs none."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from glasu.config import TrainConfig


@dataclass(frozen=True, eq=False)
class ClientState:
    """A client between two rounds."""

    config_digest: str
    round: int  # the next round to compute
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    best_weights: Mapping[str, Tensor]  # of the best evaluation so far; empty before the first
    selection: Selection | None  # only where no server selects
    losses: tuple[float, ...]  # of the last round, not sent yet
    stopped: bool
    incarnation: int
    key_epoch: int
    noise_secret: bytes = field(repr=False)
    traffic: Mapping[str, Any]  # counted so far by the runtime
    ledger_head: bytes
    ledger_totals: Mapping[tuple[str, str, int, str], tuple[int, ...]]


@dataclass(frozen=True)
class Selection:
    """The best validation score so far, and how long ago it was reached."""

    best: float | None = None
    best_round: int = -1
    evaluations_since: int = 0

    def after(self, score: float, round_index: int) -> Selection:
        """Return the selection after one more evaluation; a tie keeps the earlier model.

        Without validation nodes the score is not a number, and the latest model is the best.
        """
        if self.best is None or score > self.best or math.isnan(score):
            return Selection(score, round_index, 0)
        return Selection(self.best, self.best_round, self.evaluations_since + 1)

    def stops(self, train: TrainConfig) -> bool:
        """Tell whether patience has run out, or the score that was asked for is reached."""
        reached = self.best is not None and 0 < train.stop_at <= self.best
        return reached or 0 < train.patience <= self.evaluations_since


@dataclass(frozen=True, eq=False)
class ServerState:
    """The server between two rounds."""

    run: bytes
    config_digest: str
    roster: tuple[str, ...]
    round: int
    selection: Selection
    stopped: bool
    losses: tuple[float, ...]  # the mean loss of every round
    history: tuple[dict[str, Any], ...]  # one entry per evaluation
    traffic: Mapping[str, Any]  # counted so far by the runtime
