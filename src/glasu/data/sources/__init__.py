"""Data sets by name.

To add a data set, write one file in this folder that defines a `DataSource`, and add one line to SOURCES.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glasu.data.sources.source import DataSource

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
PREFIXES = {"pyg:": "glasu.data.sources.pyg:PYG"}  # many data sets: pyg:Class/name
OTHER = "glasu.data.sources.npz:OWN_FILE"  # any other name: a file below the data root


def find_source(name: str) -> DataSource:
    """Return the source of a data set; its `read` reports an unknown name."""
    by_prefix = next((target for prefix, target in PREFIXES.items() if name.startswith(prefix)), OTHER)
    module, _, attribute = SOURCES.get(name, by_prefix).partition(":")
    source: DataSource = getattr(import_module(module), attribute)
    return source
