"""The choices of `privacy.profile`: sets of ordinary settings that protect a run.

A profile requires some values and suggests others. A key that contradicts a required value is refused; a suggestion
applies only to keys that are not set. The profile "dp" needs noise of any strength. The settings of the run contain the
values from the profile, so reports and digests show these values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from glasu.records import Sections


class OnlyLastLayer:
    """Placeholder for `[L - 1]`: only the last layer aggregates."""


ONLY_LAST = OnlyLastLayer()


@dataclass(frozen=True)
class Profile:
    """A set of required and suggested settings, by section and key."""

    required: Sections = field(default_factory=dict)
    suggested: Sections = field(default_factory=dict)
    needs_noise: bool = False  # whether a noise multiplier above 0 is required; it may differ from the suggested one

    @property
    def is_empty(self) -> bool:
        """Whether the profile neither requires nor suggests any value."""
        return not self.required and not self.suggested

    def list_required(self, num_layers: int) -> list[tuple[str, str, Any]]:
        """Return section, key and value of the settings that a network with this number of layers requires."""
        return [
            (section, key, (num_layers - 1,) if value is ONLY_LAST else value)
            for section, keys in self.required.items()
            for key, value in keys.items()
        ]

    def sets(self, section: str, key: str, value: Any) -> bool:
        """Return whether the profile requires or suggests this value of a setting that does not depend on the model."""
        return any(keys.get(section, {}).get(key) == value for keys in (self.required, self.suggested))

    def list_suggested(self) -> list[tuple[str, str, Any]]:
        """Return section, key and value of the suggestions."""
        return [(section, key, value) for section, keys in self.suggested.items() for key, value in keys.items()]


_BLIND = {"secure_aggregation": "masks", "blind_server": True}
PROFILES: dict[str, Profile] = {
    "off": Profile(),
    "server": Profile({"privacy": _BLIND}),
    # Other parties see few sums (one layer aggregates, evaluations are rare), with few columns and 8 bits per number.
    "lean": Profile(
        {"privacy": _BLIND, "model": {"aggregation_layers": ONLY_LAST}},
        {"model": {"hidden": 16}, "train": {"evaluate_every": 50}, "wire": {"precision": "int8"}},
    ),
    # Every party releases noisy rows once. The rows have few columns, because noise grows with the number of columns.
    # Class probabilities stay at the parties, because with noise they would be useless.
    "dp": Profile(
        {"privacy": _BLIND, "train": {"release": "once"}},
        {"privacy": {"dp_noise_multiplier": 1.0, "release_probabilities": False}, "model": {"hidden": 16}},
        needs_noise=True,
    ),
}
