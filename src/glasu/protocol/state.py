"""The state of a role between two rounds, as one value. Randomness is counter-based and needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from glasu.config import TrainConfig


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


@dataclass(frozen=True, eq=False)
class ClientState:
    """A client between two rounds."""

    config_digest: str
    round: int  # the next round to compute
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    best_weights: Mapping[str, Tensor]  # of the best evaluation so far; empty before the first
    selection: Selection | None  # only where no server selects
    stopped: bool
    incarnation: int
    key_epoch: int
    noise_secret: bytes = field(repr=False)
    traffic: Mapping[str, Any]  # counted so far by the runtime
    ledger_head: bytes
    ledger_totals: Mapping[tuple[str, str, int, str], tuple[int, ...]]


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
    traffic: Mapping[str, Any]  # counted so far by the runtime, with the history of evaluations


def is_save_due(train: TrainConfig, next_round: int, *, stopped: bool) -> bool:
    """Return whether a role must be saved before it starts `next_round`."""
    every = train.checkpoint_every
    return every > 0 and (next_round % every == 0 or next_round == train.num_rounds or stopped)
