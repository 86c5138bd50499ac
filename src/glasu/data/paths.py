"""Where data sets lie: below the data root, which is only read; what GLASU fetches or converts goes to the cache."""

from __future__ import annotations

import os
from pathlib import Path


def data_root(root: str | None) -> Path:
    """Return the folder of raw files: `data.root`, else GLASU_DATA_ROOT, else "data"."""
    return Path(root or os.environ.get("GLASU_DATA_ROOT") or "data")


def cache_folder() -> Path:
    """Return where downloads and converted forms go: GLASU_CACHE, else the user's cache folder."""
    own = os.environ.get("GLASU_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glasu"
