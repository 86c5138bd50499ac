"""The presets of `train.preset`: values for keys that the user has not set.

A preset lists candidates in order of preference. A candidate fixes the structure of a run and suggests values for other
keys. A key that the user sets is never changed. A candidate is omitted if its structure contradicts such a key, and
suggestions apply only to keys that are not set. If no candidate is left, all other keys keep their defaults.

If several candidates are left, `order_candidates` keeps those that fit the data of the parties. If there are still
several, a short race on the validation nodes decides (`glasu.protocol.race`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from glasu import registry
from glasu.config import RunConfig, TrainConfig, list_candidates, list_open_keys
from glasu.config_checks import find_release_layer
from glasu.data.cache.arrays import divide_rows
from glasu.data.methods import keeps_scores
from glasu.records import FlatSettings, Sections, SettingValue

if TYPE_CHECKING:  # a server imports this module and has no scipy
    from glasu.data.party import PartyData

MIN_TRAINING_EDGES = 100  # homophily is estimated only if at least this many pairs of training nodes have an edge
# Adjusted homophily (Platonov et al. 2023): 1 if neighbours always share a class, 0 if they do so as often as by
# chance.
LOW_HOMOPHILY, HIGH_HOMOPHILY = 0.1, 0.4
RACE_ROUNDS, RACE_SHARE = 30, 0.3  # limits on the rounds of a candidate in a race: a number, and a share of the run


class Homophily(enum.IntEnum):
    """A party's estimate of how often neighbours have the same class."""

    UNKNOWN = 0
    LOW = 1
    MIDDLE = 2
    HIGH = 3


class Situation(NamedTuple):
    """The description of its data that a party sends if the preset has several candidates. It has only these fields."""

    has_edges: bool
    has_features: bool  # at least one column that is not constant
    homophily: Homophily

    def to_numbers(self) -> list[float]:
        """Return the situation as the numbers of a message."""
        return [float(self.has_edges), float(self.has_features), float(self.homophily)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Situation | None:
        """Read the numbers of a message; None if they are invalid."""
        if len(numbers) != 3 or not {*numbers[:2]} <= {0.0, 1.0} or numbers[2] not in {*map(float, Homophily)}:
            return None
        return cls(bool(numbers[0]), bool(numbers[1]), Homophily(int(numbers[2])))


@dataclass(frozen=True)
class Candidate:
    """Settings that a preset may choose."""

    structure: Sections = field(default_factory=dict)  # the candidate is omitted if the user set another value
    suggestions: Sections = field(default_factory=dict)
    # When to use the candidate. True: if every party has edges, features and labels; False: otherwise; None: always.
    for_complete: bool | None = None
    for_one_owner: bool | None = None  # True: only if one party has the labels; False: only if all parties have them

    def apply(self, config: RunConfig) -> RunConfig | None:
        """Return the config with this candidate's values for unset keys; None if a set key contradicts it."""
        changes: dict[str, dict[str, SettingValue]] = {}
        for section, key, value in _list_keys(self.structure):
            if key not in getattr(config, section).given:
                changes.setdefault(section, {})[key] = value
            elif getattr(getattr(config, section), key) != value:
                return None
        optimizer = self.suggestions.get("train", {}).get("optimizer", TrainConfig.optimizer)
        other_optimizer = "optimizer" in config.train.given and config.train.optimizer != optimizer
        for section, key, value in _list_keys(self.suggestions):
            if key == "learning_rate" and other_optimizer:  # the rate suits only the suggested optimizer
                continue
            if key not in getattr(config, section).given:
                changes.setdefault(section, {})[key] = value
        return config.replace(**changes)


@dataclass(frozen=True)
class Preset:
    """A list of candidates, in order of preference."""

    candidates: tuple[Candidate, ...] = ()
    chooses_layer: bool = False  # whether it chooses the aggregation layer for `train.release = "once"`
    # fallback if no candidate fits and the model has more than two layers without skip connections
    deep: Candidate | None = None

    def fit(self, config: RunConfig) -> list[tuple[Candidate, RunConfig]]:
        """Return the candidates that do not contradict the keys that are set, and the settings of each candidate.

        If there is no such candidate, all keys that are not set keep their defaults. A deep network is an exception:
        it uses the fallback `deep`.
        """
        if config.train.releases_once and self.chooses_layer:  # the candidates do not cover this case
            layer = find_release_layer(config.model.num_layers)
            once = Candidate(suggestions={"model": {"aggregation_layers": (layer,)}})
            applied = once.apply(config)
            assert applied is not None
            return [(once, applied)]
        one_owner = config.train.label_owner is not None
        fitting = [each for each in self.candidates if each.for_one_owner in (None, one_owner)]
        found = [(each, applied) for each in fitting if (applied := each.apply(config)) is not None]
        if all(applied == found[0][1] for _, applied in found[1:]):  # all candidates give the same settings
            found = [(Candidate(), applied) for _, applied in found[:1]]
        if one_owner:  # the other parties have no labels
            found = [pair for pair in found if pair[0].for_complete is not True]
        if not found and self.deep is not None and _is_deep(config):
            found = [(self.deep, applied)] if (applied := self.deep.apply(config)) is not None else []
        if config.privacy.adds_noise:  # a race would send a description of the data
            found = found[:1]
        return found or [(Candidate(), config)]

    def expand(self, config: RunConfig) -> tuple[RunConfig, ...]:
        """Return the settings of the candidates that `fit` returns."""
        return tuple(applied for _, applied in self.fit(config))


# Four layers with skip connections suit graphs in which neighbours share labels. For other graphs, two layers that
# treat a node's own row and the mean of its neighbours separately are better. docs/experiments.md has the comparison.
_FOUR_GCNII = {"backbone": "gcnii", "num_layers": 4, "aggregation_layers": (1, 3)}
_TWO_SAGE = {"backbone": "sage", "num_layers": 2, "aggregation_layers": (0, 1)}
_LOCAL = {"release": "rounds", "backward": "local"}
_EXACT = {"release": "rounds", "backward": "joint"}
_EXACT_SAGE: Sections = {"model": _TWO_SAGE, "train": _EXACT}
_EXACT_GCNII: Sections = {"model": _FOUR_GCNII, "train": _EXACT}
_MANY_ROUNDS = {"num_local_steps": 1, "num_rounds": 200}
_SMALL_STEPS = {**_MANY_ROUNDS, "weight_decay": 0.002, "learning_rate": 0.01}
_LARGE_STEPS = {**_MANY_ROUNDS, "weight_decay": 0.002, "learning_rate": 0.03}
# The exact gradient is the gradient of the sum of all losses. With one loss instead of M, the same weight decay has
# about M times the effect.
_OWNER_STEPS = {**_LARGE_STEPS, "weight_decay": 0.0005}

PRESETS: dict[str, Preset] = {
    "auto": Preset(
        (
            Candidate({"model": _FOUR_GCNII, "train": _LOCAL}, for_complete=True),
            Candidate(_EXACT_SAGE, {"train": _SMALL_STEPS}, True),
            # With local gradients, a party does not learn representations that the other parties need. So these
            # candidates use exact gradients, with which larger steps are better here.
            Candidate(_EXACT_SAGE, {"train": _LARGE_STEPS}, False, for_one_owner=False),
            Candidate(_EXACT_GCNII, {"train": _LARGE_STEPS}, False, for_one_owner=False),
            Candidate(_EXACT_SAGE, {"train": _OWNER_STEPS}, False, for_one_owner=True),
            Candidate(_EXACT_GCNII, {"train": _OWNER_STEPS}, False, for_one_owner=True),
        ),
        chooses_layer=True,
        # With local gradients, or without normalisation, such a network often learns nothing.
        deep=Candidate(
            {"train": _EXACT},
            {"model": {"normalization": "layer"}, "train": {**_MANY_ROUNDS, "learning_rate": 0.01}},
        ),
    ),
    "none": Preset(),
    "paper": Preset(
        (
            Candidate(
                suggestions={
                    "data": {"features": "none"},
                    "model": {**_FOUR_GCNII, "hidden": 192, "dropout": 0.4},
                    "train": {
                        "num_rounds": 1024,
                        "num_local_steps": 4,
                        "batch_size": 16,
                        "sampler": "neighbor",
                        "fanout": 3,
                        "optimizer": "sgd",
                        "learning_rate": 0.5,
                        "weight_decay": 0.0,
                        "schedule": "step",
                        "evaluate_every": 64,
                        "patience": 0,
                    },
                }
            ),
        )
    ),
}


def count_race_rounds(train: TrainConfig) -> int:
    """Return the number of rounds of each candidate in a race.

    It is a multiple of `evaluate_every`, unless the whole run is shorter.
    """
    wanted = min(RACE_ROUNDS, RACE_SHARE * train.num_rounds)
    return min(train.num_rounds, train.evaluate_every * max(1, round(wanted / train.evaluate_every)))


def can_race(config: RunConfig, candidates: Sequence[RunConfig]) -> bool:
    """Return whether a race decides between candidates. Otherwise fixed rules choose one.

    A race must not take more than half of the rounds of a candidate, because then it is not worth its cost.
    """
    is_short = all(2 * count_race_rounds(each.train) <= each.train.num_rounds for each in candidates)
    return is_short and not find_race_obstacle(config)


def order_candidates(config: RunConfig, situations: Sequence[Situation]) -> list[int]:
    """Return the candidates that race, as positions in the list of `list_candidates`. The preferred candidate is first.

    Args:
        config: the requested settings.
        situations: the situations of all parties.
    """
    complete = all(each.has_edges and each.has_features for each in situations)
    preset: Preset = registry.load("preset", config.train.preset)
    found = preset.fit(config)
    kept = [index for index, (each, _) in enumerate(found) if each.for_complete in (None, complete)]
    kept = kept or list(range(len(found)))
    if can_race(config, [found[index][1] for index in kept]):
        return kept
    if max(each.homophily for each in situations) is Homophily.LOW:
        kept.sort(key=lambda index: not _find_backbone(found[index][1]).separates_own_row)
    return kept[:1]


def find_race_obstacle(config: RunConfig) -> str:
    """Return the reason why a race is impossible with these settings; an empty string if it is possible."""
    if keeps_scores(config):
        return "the server has no validation scores"
    if config.wire.feedback:
        return "with wire.feedback = true all rounds need the same layers"
    return ""


def describe_situation(config: RunConfig, party: PartyData, *, labels_nodes: bool) -> Situation:
    """Return the situation of a party.

    The homophily is a statistic of the labels. It is stated only if a rule may need it, that is, without a race.

    Args:
        config: the requested settings.
        party: the data of the party.
        labels_nodes: whether the party's labels are used and belong to nodes.
    """
    is_needed = labels_nodes and not can_race(config, list_candidates(config))
    homophily = measure_homophily(party) if is_needed else None
    level = Homophily.UNKNOWN
    if homophily is not None:
        level = Homophily(1 + (homophily >= LOW_HOMOPHILY) + (homophily >= HIGH_HOMOPHILY))
    return Situation(party.graph.num_edges > 0, _has_varying_column(party.features), level)


def _has_varying_column(features: Any) -> bool:
    """Return whether two nodes differ in a column."""
    if not isinstance(features, np.ndarray):  # sparse
        return bool(((features.max(axis=0) != features.min(axis=0)).sum()) > 0)
    return any(bool((features[rows] != features[:1]).any()) for rows in divide_rows(features))


def measure_homophily(party: PartyData) -> float | None:
    """Return the adjusted homophily of the edges between training nodes; None if there are too few edges.

    Both ends of an edge must be training nodes with a known class. The labels of other nodes are not read.
    """
    if party.labels is None or party.splits is None:
        return None
    graph, labels = party.graph, party.labels[party.splits.train]
    if labels.ndim != 1 or party.has_numeric_labels:  # several classes per node, or numbers
        return None
    known = np.full(party.num_nodes, -1, np.int64)
    known[party.splits.train] = labels
    counts, equal = np.zeros(len(party.classes), np.int64), 0
    pairs: set[tuple[int, int]] = set()
    for nodes, indptr in graph.node_pieces():  # in pieces: a large edge list does not fit into memory
        targets = np.repeat(np.arange(nodes.start, nodes.stop), np.diff(indptr))
        edges = np.stack([graph.indices[indptr[0] : indptr[-1]], targets])
        edges = edges[:, (known[edges] >= 0).all(axis=0)]
        ends = known[edges]
        counts += np.bincount(ends.ravel(), minlength=len(counts))
        equal += int(np.count_nonzero(ends[0] == ends[1]))
        # 2 * MIN_TRAINING_EDGES edges are enough, because a pair has at most one edge in each direction.
        pairs.update((min(edge), max(edge)) for edge in edges[:, : 2 * MIN_TRAINING_EDGES].T.tolist())
    if len(pairs) < MIN_TRAINING_EDGES or np.count_nonzero(counts) < 2:
        return None
    chance = float(np.square(counts / counts.sum()).sum())
    return (2 * equal / int(counts.sum()) - chance) / (1 - chance)


def list_chosen(candidates: Sequence[RunConfig], index: int) -> FlatSettings:
    """Return the settings in which a candidate differs from other candidates, by name: {"model.backbone": "sage"}."""
    flat = candidates[index].flatten()
    return {key: flat[key] for key in list_open_keys(candidates)}


def _find_backbone(config: RunConfig) -> Any:
    """Return the class of the backbone. The type is `Any`, because `glasu.data` must not import `glasu.model`."""
    return registry.load("backbone", config.model.backbone)


def _is_deep(config: RunConfig) -> bool:
    """Return whether the parties train together with more than two layers without skip connections."""
    model = config.model
    return (
        bool(_find_backbone(config).fails_if_deep)
        and not model.residual
        and len(model.aggregation_layers) > 0
        and model.num_layers > 2
    )


def _list_keys(settings: Sections) -> list[tuple[str, str, Any]]:
    return [(section, key, value) for section, keys in settings.items() for key, value in keys.items()]
