"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Return the folder of real data sets, or skip the test."""
    root = os.environ.get("GLASU_DATA_ROOT")
    if not root:
        pytest.skip("GLASU_DATA_ROOT is not set: no real data")
    return Path(root)
