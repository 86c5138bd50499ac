"""Load the undivided graph of a named data set."""

from __future__ import annotations

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.data.sources.catalog import load_parties


def load_whole(config: RunConfig) -> PartyData:
    """Return the graph with its splits, as the method "centralized" sees it."""
    (whole,) = load_parties(config.replace(train={"method": "centralized"}))
    return whole
