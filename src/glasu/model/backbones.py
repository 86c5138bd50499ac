"""Backbones: the kinds of graph layers, and the properties of each kind that other modules read.

The config imports this module to check settings, also on a server without torch. So torch is not imported at the top.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from glasu import registry
from glasu.config import ModelConfig
from glasu.errors import ConfigError
from glasu.model.blocks import Normalization

if TYPE_CHECKING:
    from torch import Tensor, nn

    from glasu.model.layers import Layer


class Backbone(ABC):
    """A kind of graph layer. To add a backbone, register a subclass."""

    normalization: ClassVar[Normalization] = "symmetric"  # how blocks are normalised, see `Adjacency`
    has_encoder: ClassVar[bool] = False  # True: H_m[0] is ReLU(Linear(X_m)); False: H_m[0] is X_m
    uses_edge_weights: ClassVar[bool] = True
    separates_own_row: ClassVar[bool] = False  # whether own and neighbours' rows are multiplied by different matrices
    fails_if_deep: ClassVar[bool] = False  # whether models of three or more layers need normalisation or residuals
    uses_torch_generator: ClassVar[bool] = (
        False  # whether layers draw from torch's global generator; clients then run one after the other
    )
    fused_step: ClassVar[str] = ""  # "module:function"; the function maps (model, optimizer) to a `StepMaker` or None

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @classmethod  # noqa: B027 - most backbones accept every setting
    def check(cls, config: ModelConfig) -> None:
        """Raise ConfigError if this backbone does not support a setting of [model]."""

    @abstractmethod
    def build_layer(self, layer: int, width_in: int) -> Layer:
        """Return layer l, which reads rows of width `width_in` and returns rows of width `model.hidden`."""

    def activation(self, hidden: Tensor) -> Tensor:
        """Apply the function that follows every layer."""
        return hidden.relu()


class GCN(Backbone):
    """Kipf and Welling 2017."""

    fails_if_deep = True

    def build_layer(self, layer: int, width_in: int) -> Layer:
        from glasu.model.layers import GCNLayer

        return GCNLayer(width_in, self.config.hidden)


class GCNII(Backbone):
    """Chen et al. 2020."""

    has_encoder = True
    fused_step = "glasu.model.fused.gcnii:make_fused_steps"

    def build_layer(self, layer: int, width_in: int) -> Layer:
        from glasu.model.layers import GCNIILayer

        alpha, theta = self.config.alpha, self.config.theta
        return GCNIILayer(width_in, self.config.hidden, layer=layer, alpha=alpha, theta=theta)


class SAGE(Backbone):
    """Hamilton et al. 2017, with mean aggregation of neighbours."""

    normalization = "mean"
    separates_own_row = True
    fails_if_deep = True

    def build_layer(self, layer: int, width_in: int) -> Layer:
        from glasu.model.layers import SAGELayer

        return SAGELayer(width_in, self.config.hidden)


class GAT(Backbone):
    """Velickovic et al. 2018. Attention replaces edge weights."""

    normalization = "none"
    uses_edge_weights = False
    fails_if_deep = True

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        if config.hidden % config.heads:
            raise ConfigError(
                f"model.heads={config.heads}: must divide model.hidden={config.hidden} because head outputs are "
                "concatenated."
            )

    def build_layer(self, layer: int, width_in: int) -> Layer:
        from glasu.model.layers import GATLayer

        return GATLayer(width_in, self.config.hidden, heads=self.config.heads)

    def activation(self, hidden: Tensor) -> Tensor:
        from torch.nn.functional import elu

        return elu(hidden)


class ConvolutionBackbone(Backbone):
    """A PyG convolution on bipartite pairs. To train with one, register a subclass.

    The convolution is called with ((x_source, x_target), edge_index). The edges include self loops.
    """

    normalization = "none"
    uses_edge_weights = False
    uses_torch_generator = True

    @abstractmethod
    def convolution(self, width_in: int, width_out: int) -> nn.Module:
        """Return the convolution of one layer; it must not add self loops."""

    def build_layer(self, layer: int, width_in: int) -> Layer:
        from glasu.model.layers import ConvolutionLayer

        return ConvolutionLayer(self.convolution(width_in, self.config.hidden), self.config.hidden)


BACKBONES: dict[str, type[Backbone]] = {"gcn": GCN, "gcnii": GCNII, "gat": GAT, "sage": SAGE}


def find_backbone(config: ModelConfig) -> type[Backbone]:
    """Return the class of the backbone that the config names."""
    found: type[Backbone] = registry.load("backbone", config.backbone)
    return found
