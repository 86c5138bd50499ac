# The public API, listed once. Type checkers read this file; glasu/__init__.py reads it to load names on first use.
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
from glasu.protocol.requests import Evaluated as Evaluated
from glasu.protocol.requests import Evaluating as Evaluating
from glasu.protocol.requests import Event as Event
from glasu.protocol.requests import RoundDone as RoundDone
from glasu.report import RunReport as RunReport
from glasu.runtime.estimator import GLASUClassifier as GLASUClassifier
from glasu.runtime.estimator import GLASURegressor as GLASURegressor
from glasu.runtime.simulation import train as train
from glasu.runtime.trained_model import TrainedModel as TrainedModel

__version__: str
