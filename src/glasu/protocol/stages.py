"""The two stages of a client in a run with `train.release = "once"`: their settings, data and weights.

`once.py` contains the scripts. This module computes the input of the upper stage. It also joins the weights of both
stages and separates them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glasu.config import PrivacyConfig, RunConfig
from glasu.data.preprocessing import Preparation
from glasu.model.split import find_input_scale
from glasu.protocol.learner import NodeData

if TYPE_CHECKING:
    from glasu.protocol.state import ClientState

LOWER, UPPER, SCALES = "lower.", "upper.", "aggregate.scales"  # two prefixes and a name in the whole model's weights


@dataclass(eq=False)
class Stages:
    """The settings and data of both stages of a client, and the state in which the upper stage starts."""

    whole: RunConfig  # the settings of the run
    lower: RunConfig
    upper: RunConfig
    data: NodeData  # the data of the lower stage
    scales: Tensor | None = None  # two factors for the input columns of the upper stage; None: not known yet
    trained: Mapping[str, Tensor] = field(default_factory=dict)  # the upper weights of a trained model
    interrupted: ClientState | None = None  # the state of an upper stage that was interrupted

    def restart(self, interrupted: ClientState | None) -> None:
        """Start a new attempt. It continues an interrupted upper stage, or the lower stage if `interrupted` is None."""
        self.interrupted, self.scales = interrupted, None

    def make_upper_data(self, own: Tensor, others: Tensor) -> NodeData:
        """Return the data of the upper stage.

        Args:
            own: H_m^+[l] at all nodes, without noise.
            others: H_{-m}[l+1] at all nodes. The columns of `own` and `others` together replace the features.
        """
        if self.scales is None:  # a factor for each part, so that strong noise in `others` does not dominate `own`
            lengths = [float(torch.linalg.vector_norm(part.double(), dim=1).mean()) for part in (own, others)]
            self.scales = torch.tensor([find_input_scale(self.upper.model, each) for each in lengths]).double()
        rows = torch.cat([part * float(scale) for part, scale in zip((own, others), self.scales, strict=True)], dim=1)
        party = dataclasses.replace(self.data.party, features=rows.numpy(), feature_names=(), checked=None)
        preparation = Preparation(rows.shape[1], 1.0)
        return NodeData(self.upper, party, has_labels=self.data.has_labels, preparation=preparation)

    def join_weights(self, lower: Mapping[str, Tensor], upper: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of the whole model."""
        assert self.scales is not None
        parts = {LOWER: lower, UPPER: upper}
        joined = {prefix + name: value for prefix, own in parts.items() for name, value in own.items()}
        return {**joined, SCALES: self.scales}

    def separate_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the lower weights of a trained model. Store its upper weights and scales in this object."""
        lower, upper = (
            {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            for prefix in (LOWER, UPPER)
        )
        if not upper or SCALES not in weights:
            raise RuntimeError("the weights belong to another kind of model")
        self.trained, self.scales = upper, weights[SCALES]
        return lower


def divide_settings(config: RunConfig) -> tuple[RunConfig, RunConfig] | None:
    """Return the settings of the lower and the upper stage; None if the run does not have these stages."""
    if not config.train.releases_once:
        return None
    (layer,), num_layers = config.model.aggregation_layers, config.model.num_layers
    alone = dataclasses.replace(config, privacy=PrivacyConfig())
    keys = {"release": "rounds", "preset": "none"}

    def make(count: int, **more: Any) -> RunConfig:
        return alone.replace(model={"num_layers": count, "aggregation_layers": ()}, train=keys, **more)

    # The upper stage needs no prepared features: `make_upper_data` scales its input and keeps the factors.
    return make(layer + 1), make(num_layers - layer - 1, data={"features": "none"})
