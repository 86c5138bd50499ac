"""Kits for the parties of the tiny runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from glasu.pki.provision import provision


@pytest.fixture(scope="session")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return kits of a server at localhost and of the parties a, b and c; not to be changed."""
    out = tmp_path_factory.mktemp("kits")
    provision(out, ["a", "b", "c"], ["localhost", "127.0.0.1"])
    return out


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here pulls the plug of the machine, so nothing here has to wait for the disk."""
    monkeypatch.setattr("os.fsync", lambda handle: None)
