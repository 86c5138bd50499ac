"""Kits for the parties of a dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.kits import make_kits


@pytest.fixture(scope="session")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return kits of a server at localhost, and at no other name, and of the parties a, b and c; not to be changed."""
    out = tmp_path_factory.mktemp("kits")
    make_kits(out, ["a", "b", "c"], ["localhost"])
    return out
