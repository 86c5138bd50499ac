"""Kits that the tests of this folder share, and kits with a flaw."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from glasu.pki.provision import provision

NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture(scope="session")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return kits of a server at localhost and of the parties a, b and c; not to be changed."""
    return provision_kits(tmp_path_factory, "kits", NOW)


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return kits of the same names, signed by another CA."""
    return provision_kits(tmp_path_factory, "foreign", NOW)


def provision_kits(factory: pytest.TempPathFactory, name: str, now: datetime) -> Path:
    out = factory.mktemp(name)
    provision(out, ["a", "b", "c"], ["localhost", "127.0.0.1"], now=now)
    return out


@pytest.fixture
def copy(kits: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies one of the kits, for a test that damages it."""
    return lambda name: Path(shutil.copytree(kits / name, tmp_path / name))
