"""Aggregations that record the tensors a client extracts and merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.model.aggregation import Aggregation
from glasu.protocol.client import Client
from support.monolith import Run, run


@dataclass
class Spy:
    """An aggregation that keeps its arguments and results."""

    inner: Aggregation
    extracted: list = field(default_factory=list)  # (joint, sent, others)
    merged: list = field(default_factory=list)  # (others, own part, result)

    @property
    def client(self) -> int:
        return self.inner.client

    @property
    def widening(self) -> int:
        return self.inner.widening

    def extract_others(self, joint: Tensor, partial: Tensor) -> Tensor:
        others = self.inner.extract_others(joint, partial)
        self.extracted.append((joint.clone(), partial.clone(), others.clone()))
        return others

    def with_clients(self, num_present: int) -> Spy:
        assert num_present == self.inner.num_clients  # spies record rounds in which all clients are present
        return self

    def own_gradient(self, gradient: Tensor) -> Tensor:
        return self.inner.own_gradient(gradient)

    def merge(self, others: Tensor, partial: Tensor) -> Tensor:
        merged = self.inner.merge(others, partial)
        self.merged.append((others, partial.detach().clone(), merged.detach().clone()))
        return merged


def run_with_spies(
    config: RunConfig,
    parties: Sequence[PartyData],
    arrange: Callable[[list[Client]], None] | None = None,
    **keys: Any,
) -> tuple[Run, list[Spy]]:
    """Run with a spy in the place of every client's aggregation; return the run and the spies."""
    spies = []

    def arrange_spies(clients: list[Client]) -> None:
        if arrange is not None:
            arrange(clients)
        for client in clients:
            client.learner.aggregation = Spy(client.learner.aggregation)
            spies.append(client.learner.aggregation)

    return run(config, parties, arrange=arrange_spies, **keys), spies
