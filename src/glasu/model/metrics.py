"""Old entry points of `task`, until the last caller uses a `Task`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu import registry


class _Names(dict[str, tuple[str, ...]]):
    def __missing__(self, task: str) -> tuple[str, ...]:
        found: tuple[str, ...] = registry.load("task", task).metric_names
        return found


class _Selected(dict[str, str]):
    def __missing__(self, task: str) -> str:
        found: str = registry.load("task", task).selected_by
        return found


NAMES, SELECTED_BY = _Names(), _Selected()


def evaluate(probabilities: NDArray[Any], labels: NDArray[np.int64], task: str) -> dict[str, float]:
    found: dict[str, float] = registry.load("task", task)().evaluate(probabilities, labels)
    return found


def find_probability_error(values: NDArray[Any], task: str) -> str:
    return str(registry.load("task", task)().find_score_error(values))
