"""Data sets by name.

To add a data set, write one file in this folder that defines a `DataSource`, and add one line to SOURCES.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glasu.data.sources.source import DataSource

SOURCES = {  # name -> module of this folder:attribute
    "demo": "demo:DEMO",
    "cora": "planetoid:CORA",
    "citeseer": "planetoid:CITESEER",
    "pubmed": "planetoid:PUBMED",
    "venice": "herigraph:VENICE",
    "suzhou": "herigraph:SUZHOU",
    "amsterdam": "herigraph:AMSTERDAM",
    "heri_venice": "herigraph:VENICE_STAND_IN",
    "heri_suzhou": "herigraph:SUZHOU_STAND_IN",
    "heri_amsterdam": "herigraph:AMSTERDAM_STAND_IN",
    "reddit": "reddit:REDDIT",
    "synthetic": "synthetic:SYNTHETIC",
    "dblp_authors": "npz:DBLP_AUTHORS",
    "imdb_movies": "npz:IMDB_MOVIES",
    "facebook_pages": "npz:FACEBOOK_PAGES",
}
PREFIXES = {"pyg:": "pyg:PYG"}  # sources of many data sets: pyg:Class/name
OTHER = "npz:OWN_FILE"  # any other name: a file below the data root


def find_source(name: str) -> DataSource:
    """Return the source of a data set; its `read` reports an unknown name."""
    if name in SOURCES:
        return _load(SOURCES[name])
    return _load(next((target for prefix, target in PREFIXES.items() if name.startswith(prefix)), OTHER))


@cache
def _load(target: str) -> DataSource:
    module, _, attribute = target.partition(":")
    source: DataSource = getattr(import_module(f"glasu.data.sources.{module}"), attribute)
    return source
