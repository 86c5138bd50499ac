"""Load the data of a run once per process."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from glasu.config import RunConfig, TrainConfig

if TYPE_CHECKING:
    from glasu.data.sources.catalog import Loaded

KEPT = 4  # data sets or seeds kept in memory


def load_once(config: RunConfig) -> Loaded:
    """Load the parties of a run. Runs whose settings select the same data share them."""
    train = config.train
    keys = TrainConfig(method=train.method, labels=train.labels, task=train.task, seed=train.seed)
    return _load(RunConfig(data=config.data, train=keys))


@functools.lru_cache(maxsize=KEPT)
def _load(config: RunConfig) -> Loaded:
    from glasu.data.sources.catalog import load

    return load(config)
