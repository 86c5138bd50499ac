"""Runs in which candidates race: settings that a preset leaves open, and parties that learn in a few rounds."""

from __future__ import annotations

from typing import Any

from glasu import registry
from glasu.config import RunConfig, list_candidates
from glasu.data.party import PartyData
from glasu.data.presets import Candidate, Preset
from support.tiny import settings, tiny_parties

GOOD, USELESS, TOO_LARGE = 0.1, 1e-12, 1e30  # training diverges after one step of TOO_LARGE
WARM, USELESS_WARM = 0.05, 3e-12  # rates of candidates that take warm steps
CASES = {
    "the preferred one wins": (GOOD, USELESS),
    "another one wins": (USELESS, GOOD),
    "the second of three wins": (USELESS, GOOD, 2e-12),
    "a tie keeps the preferred one": (USELESS, 2e-12),
    "the preferred one starts warm and wins": (WARM, USELESS),
    "another one starts warm and loses": (GOOD, WARM),
    "the preferred one starts warm and loses": (USELESS_WARM, GOOD),
    "both start warm": (WARM, USELESS_WARM),
}
DIVERGING = {
    "the preferred one diverges": (TOO_LARGE, GOOD),
    "another one diverges": (GOOD, TOO_LARGE),
    "all diverge": (TOO_LARGE, 2e30),
}
ALONE = {"one candidate": (GOOD,)}  # nothing is left to decide
EVERYTHING = {**CASES, **DIVERGING, **ALONE}
WINNERS = {name: GOOD if GOOD in rates else rates[0] for name, rates in EVERYTHING.items()}
WARM_STEPS = 6


def candidate(rate: float) -> Candidate:
    layers = {"aggregation_layers": (3,)} if rate < WARM else {}
    warm = {"warm_start": WARM_STEPS} if rate in (WARM, USELESS_WARM) else {}
    return Candidate({"train": {"learning_rate": rate}}, {"model": layers, "train": warm})


for _name, _rates in EVERYTHING.items():
    preset = Preset(tuple(candidate(rate) for rate in _rates))
    registry.register("preset", _name.replace(" ", "-"), preset)


def race(name: str, **keys: Any) -> tuple[RunConfig, list[PartyData]]:
    """Return settings with a race, and parties whose labels can be learned in a few rounds."""
    keys = {
        "backbone": "sage",
        "num_rounds": 10,  # four for each candidate in the race
        "num_local_steps": 2,
        "evaluate_every": 2,
        "precision": "fp32",
        "optimizer": "adam",
        **keys,
    }
    config = settings(preset=name.replace(" ", "-"), **keys)
    left_open = {"learning_rate", "aggregation_layers"}
    sections = {
        section: {key: value for key, value in values.items() if key not in left_open}
        for section, values in config.to_dict(given=True).items()
    }
    labels = keys.get("labels", "all")
    return RunConfig.from_dict(sections), tiny_parties(num_nodes=150, owner=None if labels == "all" else labels)


def find_candidate(config: RunConfig, rate: float) -> RunConfig:
    """Return the settings of the candidate with this learning rate."""
    (found,) = {each.digest(): each for each in list_candidates(config) if each.train.learning_rate == rate}.values()
    return found
