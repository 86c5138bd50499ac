"""What an evaluation or a prediction scores: one record, which the client and the server build alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

VALIDATION, TEST = "validation", "test"
METRICS_LAYER = -2  # used as `layer` in the keys of metrics and verdicts


@dataclass(frozen=True)
class Scoring:
    """The model and the examples of one evaluation or prediction, and the keys of its messages.

    In a key, the round t <= T belongs to the evaluation after t rounds, and larger numbers belong to the other records.
    In the phase PREDICTION, an inference uses every edge.
    """

    key: Key  # phase and round
    split: str | None = None  # VALIDATION or TEST; None: other examples, for example requested nodes
    # Whether the warm ensemble is scored instead of the joint model. Then no layer aggregates, and the result is the
    # mean of the scores that the clients compute alone.
    ensemble: bool = False
    present: Sequence[int] | None = None  # the clients that contribute; None: all

    @classmethod
    def of_joint_model(cls, role: Client | Server) -> Scoring:
        """Return the evaluation of the joint model after the rounds so far."""
        return cls(role.identity.key(Phase.EVALUATION, role.progress.round), VALIDATION)

    @classmethod
    def of_ensemble(cls, role: Client | Server) -> Scoring:
        """Return the evaluation of the warm ensemble."""
        return cls(role.identity.key(Phase.EVALUATION, role.config.train.num_rounds + 2), VALIDATION, ensemble=True)

    @classmethod
    def of_test(cls, role: Client | Server) -> Scoring:
        """Return the test of the selected model."""
        key = role.identity.key(Phase.EVALUATION, role.config.train.num_rounds + 1)
        return cls(key, TEST, role.progress.ensemble)

    @classmethod
    def of_subset(cls, role: Client | Server, index: int, present: Sequence[int]) -> Scoring:
        """Return the evaluation of the selected model with one subset of the clients, given its position."""
        key = role.identity.key(Phase.PREDICTION, role.config.train.num_rounds + 2 + index)
        return cls(key, VALIDATION, role.progress.ensemble, present)

    @classmethod
    def of_request(cls, role: Client | Server) -> Scoring:
        """Return a prediction of requested nodes by the selected model."""
        return cls(role.identity.key(Phase.PREDICTION, 0), ensemble=role.progress.ensemble)

    @property
    def metrics_key(self) -> Key:
        """The key of the metrics and of the verdict."""
        return self.key.at(METRICS_LAYER)
