"""Folders of data: the data root is only read; downloads and converted data go to the cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def data_root(root: str | None) -> Path:
    """Return the folder of raw files: `data.root`, else GLASU_DATA_ROOT, else "data"."""
    return Path(root or os.environ.get("GLASU_DATA_ROOT") or "data")


def cache_folder() -> Path:
    """Return the folder of downloads and converted data: GLASU_CACHE, else the cache folder of the user."""
    own = os.environ.get("GLASU_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glasu"
