"""A run whose model cannot tell nodes apart, so that it predicts one class for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from glasu.config import RunConfig
from glasu.data.graph import Graph
from glasu.data.party import PartyData
from support.tiny import settings, tiny_parties

NOTHING = np.empty(0, np.int64)


def make_collapsing_run(**keys: Any) -> tuple[RunConfig, list[PartyData]]:
    """Return settings, and parties without edges whose rows are all equal; their labels differ."""
    labels = keys.get("labels", "all")
    parties = tiny_parties(num_nodes=100, owner=None if labels == "all" else labels)
    equal = [
        replace(party, features=np.ones_like(party.features), graph=Graph.from_edges(NOTHING, NOTHING, 100))
        for party in parties
    ]
    return settings(num_rounds=2, evaluate_every=1, **keys), equal
