"""The two stages of a run with one release: their settings, and the names of their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from glasu.config import PrivacyConfig, RunConfig

LOWER, UPPER, SCALES = "lower.", "upper.", "aggregate.scales"  # names in the weights of the whole model


class Stages(NamedTuple):
    """The settings of a run with one release, and of its two stages."""

    whole: RunConfig
    lower: RunConfig
    upper: RunConfig


def list_stages(config: RunConfig) -> Stages | None:
    """Return the settings of both stages; None for a run with rounds of messages."""
    if config.train.release != "once":
        return None
    (layer,), num_layers = config.model.aggregation_layers, config.model.num_layers
    alone = replace(config, privacy=PrivacyConfig())
    keys = {"release": "rounds", "preset": "none"}

    def make(count: int, **more: Any) -> RunConfig:
        return alone.replace(model={"num_layers": count, "aggregation_layers": ()}, train=keys, **more)

    # The client scales the input of the upper stage, and stores the factors with the weights.
    return Stages(config, make(layer + 1), make(num_layers - layer - 1, data={"features": "none"}))
