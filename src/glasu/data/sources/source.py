"""DataSource: how to read a named data set, and how the paper splits and counts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from glasu.config import RunConfig
    from glasu.data.cache.parties import Dataset
    from glasu.data.cache.store import Cache


@dataclass(frozen=True)
class Statistics:
    """The size of a data set: one row of the paper's Table 1."""

    nodes: int
    edges: int
    features: int
    classes: int
    counted: Literal["directed", "undirected"] = "directed"  # undirected: linked pairs in the union of the graphs

    def __str__(self) -> str:
        return (
            f"{self.nodes} nodes, {self.edges} {self.counted} edges, {self.features} features, {self.classes} classes"
        )


@dataclass(frozen=True)
class RawData:
    """A data set as its source provides it."""

    data: Dataset
    note: str = ""  # one line for the user, for example that the features are a replacement


@dataclass(frozen=True)
class DataSource:
    """A data set that `data.name` can name. To add one, see glasu/data/sources/__init__.py."""

    read: Callable[[RunConfig, Cache], RawData]
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)  # of `data.split = "paper"`: train, validation, test
    per_class: int | None = None  # training nodes per class of the "paper" split; 500 validate and 1000 test
    paper: Statistics | None = None  # in the paper's Table 1
