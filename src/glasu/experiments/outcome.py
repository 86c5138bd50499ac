"""What a trial is given and what it gives; torch is not loaded here, for a search that only waits for its processes."""

from __future__ import annotations

from dataclasses import dataclass

from glasu.config import RunConfig

MARKS = 10  # per run: where trials are compared, at equal shares of the rounds or bytes that a run may take


@dataclass(frozen=True)
class Terms:
    """What all trials of a search have in common."""

    config: RunConfig  # with the keys that do not vary
    seeds: int
    max_bytes: int | None  # per run, until the evaluation that counts


@dataclass(frozen=True)
class Outcome:
    """What a trial found; of several seeds (or parties alone) the mean score, the latest round and the most bytes."""

    state: str  # "complete", "pruned": given up, or "failed": diverged, or no evaluation within the budget
    score: float | None = None  # best on validation; of a pruned trial, until it was given up
    best_round: int | None = None
    bytes: int | None = None  # until the best evaluation
    num_rounds: int | None = None  # as many as were asked for, or fit into the budget with every seed
    seconds: float = 0.0
    note: str = ""  # why it failed
