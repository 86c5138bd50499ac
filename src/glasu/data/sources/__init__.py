"""Data sets by name: the class `DataSource`, and the table of all sources.

To add a data set, write one file in this folder that defines a `DataSource`, and add one line to SOURCES. An extension
registers its sources under the seam "data" (see `glasu.registry`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from glasu import registry

if TYPE_CHECKING:
    from glasu.config import RunConfig
    from glasu.data.cache.store import Cache
    from glasu.data.party import PartyData

SOURCES = {  # name -> module:attribute
    "demo": "glasu.data.sources.demo:DEMO",
    "cora": "glasu.data.sources.planetoid:CORA",
    "citeseer": "glasu.data.sources.planetoid:CITESEER",
    "pubmed": "glasu.data.sources.planetoid:PUBMED",
    "venice": "glasu.data.sources.herigraph:VENICE",
    "suzhou": "glasu.data.sources.herigraph:SUZHOU",
    "amsterdam": "glasu.data.sources.herigraph:AMSTERDAM",
    "heri_venice": "glasu.data.sources.herigraph:VENICE",
    "heri_suzhou": "glasu.data.sources.herigraph:SUZHOU",
    "heri_amsterdam": "glasu.data.sources.herigraph:AMSTERDAM",
    "reddit": "glasu.data.sources.reddit:REDDIT",
    "synthetic": "glasu.data.sources.synthetic:SYNTHETIC",
    "dblp_authors": "glasu.data.sources.npz:DBLP_AUTHORS",
    "imdb_movies": "glasu.data.sources.npz:IMDB_MOVIES",
    "facebook_pages": "glasu.data.sources.npz:FACEBOOK_PAGES",
}
PYG_PREFIX = "pyg:"  # one source for many data sets: pyg:Class/name


@dataclass(frozen=True)
class Statistics:
    """The size of a data set: one row of the paper's Table 1."""

    nodes: int
    edges: int
    features: int
    classes: int
    counted: Literal["directed", "undirected"] = "directed"  # undirected: linked pairs in the union of all graphs

    def __str__(self) -> str:
        classes = f"{self.classes or 'no'} classes"
        return f"{self.nodes} nodes, {self.edges} {self.counted} edges, {self.features} features, {classes}"


@dataclass(frozen=True)
class RawData:
    """A data set as its source provides it."""

    parties: list[PartyData]  # a single entry is the whole graph, which is divided among the clients
    note: str = ""  # one line for the user, for example that the features are a replacement


@dataclass(frozen=True)
class DataSource:
    """A data set that `data.name` can name."""

    read: Callable[[RunConfig, Cache], RawData]
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)  # train, validation, test of `data.split = "paper"`
    # training nodes per class of the "paper" split, which also has 500 validation and 1000 test nodes
    per_class: int | None = None
    paper: Statistics | None = None  # the numbers in the paper's Table 1


def find_source(name: str) -> DataSource:
    """Return the source of a data set.

    For an unknown name, return the source of the user's own `.npz` files. Its `read` raises an error if no such file
    exists.
    """
    source: DataSource
    if name.startswith(PYG_PREFIX):
        source = registry.import_attribute("glasu.data.sources.pyg:PYG", name)
    elif registry.is_choice("data", name):
        source = registry.load("data", name)
    else:
        source = registry.import_attribute("glasu.data.sources.npz:OWN_FILE", name)
    return source


def find_data_root(root: str | None) -> Path:
    """Return the folder of raw files: `data.root`, or else GLASU_DATA_ROOT, or else "data". GLASU only reads it."""
    return Path(root or os.environ.get("GLASU_DATA_ROOT") or "data")
