"""RunReport: config, metrics, traffic, time and releases of a run -> JSON and one line."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from glasu import __version__


@dataclass(frozen=True)
class SplitScores:
    """How the selected model does on one split."""

    accuracy: float
    macro_f1: float
    loss: float
    micro_f1: float | None = None  # multi-label tasks
    round: int | None = None  # after how many rounds this model was reached
    per_client: tuple[float, ...] | None = None  # standalone: the accuracy of each client alone

    def to_dict(self) -> dict[str, Any]:
        """Return the figures that there are."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True)
class RunReport:
    """What a run did, found and cost."""

    config: dict[str, Any]  # as it ran
    overridden: dict[str, dict[str, Any]]  # what was asked, and what method or sampler used instead
    parties: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]  # what a reader should know about the data
    test: SplitScores
    validation: SplitScores
    history: tuple[dict[str, Any], ...]
    losses: tuple[float, ...]  # the mean training loss of every round
    traffic: dict[str, Any]
    seconds: dict[str, float]
    weights_sha256: tuple[str, ...]
    privacy: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values; what is not a number becomes null."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        values["test"], values["validation"] = self.test.to_dict(), self.validation.to_dict()
        result: dict[str, Any] = plain(values)
        return result

    def to_json(self) -> str:
        """Return the report as it is written to report.json."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def _selected(self) -> str:
        chosen = self.validation.round
        return "every party at its own best round" if chosen is None else f"best at round {chosen}"

    def summary(self) -> str:
        """Return the run in one line."""
        traffic = self.traffic
        moved = (traffic["bytes_to_server"] + traffic["bytes_to_clients"]) / 1e6
        return (
            f"{self.config['train']['method']}: test accuracy {percent(self.test.accuracy)} "
            f"(validation {percent(self.validation.accuracy)}, {self._selected()}), "
            f"{moved:.1f} MB in {traffic['exchanges']} exchanges, {self.seconds['total']:.1f} s"
        )


def percent(share: float) -> str:
    """Write a share as a percentage; a dash where there was nothing to measure it on."""
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def plain(value: Any) -> Any:
    """Return a value as JSON has it: what is not a number becomes null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def versions() -> dict[str, str]:
    """Return the versions that decide the bits of a run; a server installation has neither torch nor scipy."""
    found = {"python": platform.python_version(), "glasu": __version__}
    for package in ("torch", "torch_geometric", "numpy", "scipy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
