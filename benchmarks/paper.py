"""The paper's settings, and parties with dense features.

This module uses only the public API, because compare_trees.py runs it with two versions of GLASU.
"""

from __future__ import annotations

import copy

from glasu import DataConfig, ModelConfig, PartyData, RunConfig, TrainConfig

WINDOW = 16  # number of rounds whose node sets are drawn in one exchange; only whole windows are timed


def paper_settings(**train: object) -> RunConfig:
    """Return the paper's settings: K = 2, Q = 4, batch 16, fan-out 2, hidden 192. Evaluation is short and not timed."""
    keys = {
        "num_rounds": 4 * WINDOW + 1,
        "num_local_steps": 4,
        "batch_size": 16,
        "sampler": "neighbor",
        "fanout": 2,
        "evaluate_every": 10**6,
        "evaluate_nodes": 64,
        "sampled_evaluation": True,
        "prefetch": WINDOW,
    }
    # Older versions have neither presets nor prepared features. In newer versions, turn both off.
    keys |= {"preset": "none"} if "preset" in TrainConfig.__dataclass_fields__ else {}
    data = DataConfig(features="none") if "features" in DataConfig.__dataclass_fields__ else DataConfig()
    train_config = TrainConfig(**{**keys, **train})  # type: ignore[arg-type]
    return RunConfig(data=data, model=ModelConfig(hidden=192), train=train_config)


def dense_twin(party: PartyData) -> PartyData:
    """Return the party with dense features. The constructor of PartyData would make them sparse again."""
    twin: PartyData = copy.copy(party)
    dense = party.features.toarray() if hasattr(party.features, "toarray") else party.features
    object.__setattr__(twin, "features", dense)
    return twin
