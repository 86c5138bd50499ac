"""Train one graph neural network across organisations that share nodes but neither features nor edges."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glasu.config import DataConfig as DataConfig
    from glasu.config import ModelConfig as ModelConfig
    from glasu.config import PrivacyConfig as PrivacyConfig
    from glasu.config import RunConfig as RunConfig
    from glasu.config import TrainConfig as TrainConfig
    from glasu.config import WireConfig as WireConfig
    from glasu.data.alignment import align_in_clear as align_in_clear
    from glasu.data.folders import read_party as read_party
    from glasu.data.folders import write_party as write_party
    from glasu.data.graph import Graph as Graph
    from glasu.data.party import PartyData as PartyData
    from glasu.data.party import Splits as Splits
    from glasu.data.sources.catalog import load_parties as load_parties
    from glasu.data.sources.pyg import split_vertically as split_vertically
    from glasu.errors import AlignmentError as AlignmentError
    from glasu.errors import ConfigError as ConfigError
    from glasu.errors import DataError as DataError
    from glasu.errors import GlasuError as GlasuError
    from glasu.errors import ProtocolError as ProtocolError
    from glasu.errors import TrainingError as TrainingError
    from glasu.errors import TransportError as TransportError
    from glasu.report import RunReport as RunReport
    from glasu.runtime.estimator import GLASUClassifier as GLASUClassifier
    from glasu.runtime.simulation import train as train
    from glasu.runtime.trained_model import TrainedModel as TrainedModel

__version__ = "0.1.0"

# Where each public name lives: it is loaded when first asked for, so that `glasu --help` need not wait for torch.
_HOMES = {
    "AlignmentError": "glasu.errors",
    "ConfigError": "glasu.errors",
    "DataConfig": "glasu.config",
    "DataError": "glasu.errors",
    "GLASUClassifier": "glasu.runtime.estimator",
    "GlasuError": "glasu.errors",
    "Graph": "glasu.data.graph",
    "ModelConfig": "glasu.config",
    "PartyData": "glasu.data.party",
    "PrivacyConfig": "glasu.config",
    "ProtocolError": "glasu.errors",
    "RunConfig": "glasu.config",
    "RunReport": "glasu.report",
    "Splits": "glasu.data.party",
    "TrainConfig": "glasu.config",
    "TrainedModel": "glasu.runtime.trained_model",
    "TrainingError": "glasu.errors",
    "TransportError": "glasu.errors",
    "WireConfig": "glasu.config",
    "align_in_clear": "glasu.data.alignment",
    "load_parties": "glasu.data.sources.catalog",
    "read_party": "glasu.data.folders",
    "split_vertically": "glasu.data.sources.pyg",
    "train": "glasu.runtime.simulation",
    "write_party": "glasu.data.folders",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'glasu' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
