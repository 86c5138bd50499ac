"""The methods of `train.method`: the settings that each method prescribes, and the data that its parties see.

A method is a row of METHODS. Other modules read the fields of this row and never compare names of methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glasu import registry
from glasu.config import ModelConfig, Override, RunConfig
from glasu.config_sections import EVERY_PARTY
from glasu.errors import DataError
from glasu.records import Sections

if TYPE_CHECKING:  # a server reads this table, and it has no scipy
    from glasu.data.party import PartyData

NOTHING_TO_SMOOTH = 'train.method="smooth" propagates predictions over edges; without edges use "ensemble".'


@dataclass(frozen=True)
class Method:
    """One method."""

    prescribe: Callable[[ModelConfig], Sections] | None = None  # returns the settings that the method decides
    prepare: Callable[[Sequence[PartyData]], list[PartyData]] = list  # returns the data that each party may use
    one_party: bool = False  # whether one party holds all data
    needs_all_labels: bool = False  # whether every party needs labels
    between_machines: bool = False  # whether it can run over the network, where no party has another party's data
    predicts_alone: bool = False  # whether each party predicts with its own model, so that each has a score
    averages: bool = False  # whether the server averages the class probabilities of parties that trained alone
    is_baseline: bool = False  # whether `--baselines` compares a run with it
    smooths: bool = False  # whether each party propagates the averaged class probabilities over its edges

    def prescribes(self, section: str, key: str) -> bool:
        """Return whether the method decides a setting."""
        return key in self.list_prescribed(ModelConfig()).get(section, {})

    def list_prescribed(self, model: ModelConfig) -> Sections:
        """Return the settings of a model that the method decides."""
        return {} if self.prescribe is None else self.prescribe(model)


@dataclass(frozen=True)
class PreparedRun:
    """A run after its method was applied."""

    config: RunConfig
    parties: list[PartyData]
    overridden: dict[str, Override]


def _pool(parties: Sequence[PartyData]) -> list[PartyData]:
    from glasu.data.partition import pool_parties

    return [pool_parties(parties)] if len(parties) > 1 else list(parties)


def _train_alone(model: ModelConfig) -> Sections:
    return {
        "model": {"aggregation_layers": ()},
        "train": {"backward": "local", "party_dropout": 0.0, "warm_start": 0, "release": "rounds"},
    }


def _share_edges(parties: Sequence[PartyData]) -> list[PartyData]:
    from glasu.data.partition import share_edges

    return share_edges(parties)


METHODS: dict[str, Method] = {
    "glasu": Method(between_machines=True),
    "centralized": Method(
        prescribe=lambda model: {
            "data": {"num_clients": 1},
            "model": {"aggregation_layers": ()},
            "train": {
                "num_local_steps": 1,
                "labels": EVERY_PARTY,
                "backward": "local",
                "warm_start": 0,
                "release": "rounds",
            },
        },
        prepare=_pool,
        one_party=True,
    ),
    "standalone": Method(prescribe=_train_alone, is_baseline=True, predicts_alone=True),
    "ensemble": Method(
        prescribe=_train_alone, is_baseline=True, needs_all_labels=True, between_machines=True, averages=True
    ),
    "smooth": Method(prescribe=_train_alone, is_baseline=True, between_machines=True, averages=True, smooths=True),
    "simulated": Method(  # Ni et al.: every layer aggregates, and every client has all edges
        prescribe=lambda model: {
            "data": {"edge_fraction": 1.0},
            "model": {"aggregation_layers": tuple(range(model.num_layers))},
            "train": {"num_local_steps": 1, "backward": "joint", "warm_start": 0, "release": "rounds"},
        },
        prepare=_share_edges,
    ),
}


def find_method(config: RunConfig) -> Method:
    """Return the method of a run."""
    method: Method = registry.load("method", config.train.method)
    return method


def has_server(config: RunConfig) -> bool:
    """Return whether the parties of a run exchange messages: in training, or for an averaged prediction."""
    return bool(config.model.aggregation_layers) or find_method(config).averages


def trains_alone(config: RunConfig) -> bool:
    """Return whether no message is sent in rounds. Then each party selects its own model and sends no losses."""
    return not config.model.aggregation_layers or config.train.releases_once


def keeps_scores(config: RunConfig) -> bool:
    """Return whether losses and metrics stay at the parties, so that the server has none to report.

    With secure aggregation, the server must not see results. If noise is added, only noisy rows may leave a party. With
    `train.release = "once"`, each party trains and selects its layers alone, so the server does not need scores.
    """
    return (config.privacy.hides_parts and has_server(config)) or evaluates_once(config)


def evaluates_once(config: RunConfig) -> bool:
    """Return whether the parties evaluate their common model only once, after the last round.

    If noise is added, every evaluation is one more release. With `train.release = "once"`, no round has a common model,
    because each party trains its layers alone.
    """
    return config.train.releases_once or (config.privacy.adds_noise and bool(config.model.aggregation_layers))


def apply_method(config: RunConfig, parties: Sequence[PartyData]) -> PreparedRun:
    """Check the parties, restrict or extend their data as the method requires, and apply the method's settings."""
    from glasu.data.alignment import check_parties, keep_labels

    method = find_method(config)
    # A pooled party has the labels of the label owner, but another name.
    owner = None if method.one_party and len(parties) == 1 else config.train.label_owner
    check_parties(parties, owner, config.train.task, config.data.split)
    prepared = method.prepare(keep_labels(parties, owner))
    if method.smooths and not any(party.graph.num_edges for party in prepared):
        raise DataError(f"no party has an edge. {NOTHING_TO_SMOOTH}")
    requested = config.data.num_clients
    config, overridden = override_settings(config)
    if config.data.num_clients != len(prepared):
        overridden["data.num_clients"] = {"requested": requested, "used": len(prepared)}
        config = config.replace(data={"num_clients": len(prepared)})
    return PreparedRun(config, prepared, overridden)


def override_settings(config: RunConfig) -> tuple[RunConfig, dict[str, Override]]:
    """Apply the settings that the method prescribes. Also return the settings that this has changed."""
    prescribed = find_method(config).list_prescribed(config.model)
    overridden: dict[str, Override] = {
        f"{section}.{key}": {"requested": getattr(getattr(config, section), key), "used": value}
        for section, keys in prescribed.items()
        for key, value in keys.items()
        if getattr(getattr(config, section), key) != value
    }
    return config.replace(**prescribed), overridden
