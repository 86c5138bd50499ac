"""Settings of each method on each data set: tuned by a search if there is a file, otherwise the defaults."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import Any

from glasu.config import RunConfig

METHODS: dict[str, dict[str, Any]] = {
    "centralized": {"method": "centralized"},
    "standalone": {"method": "standalone", "num_local_steps": 1},
    "simulated": {"method": "simulated", "num_local_steps": 1},
    "glasu-1": {"method": "glasu", "num_local_steps": 1, "backward": "joint"},
    "glasu-4": {"method": "glasu", "num_local_steps": 4},
}


@functools.cache
def read_settings(dataset: str, method: str, backbone: str = "gcnii") -> RunConfig:
    """Return the settings of a method on a data set."""
    path = find_tuned_file(dataset, method, backbone)
    if path.is_file():
        return RunConfig.from_toml(path)
    config = RunConfig.from_dict({"data": {"name": dataset}, "train": METHODS[method]})
    return config.replace(model={"backbone": backbone})


def find_tuned_file(dataset: str, method: str, backbone: str = "gcnii") -> Path:
    """Return the path of tuned settings; the file may not exist."""
    name = method if backbone == "gcnii" else f"{method}-{backbone}"
    return Path(str(resources.files("glasu.experiments"))) / "tuned" / dataset / f"{name}.toml"
