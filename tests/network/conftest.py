"""Kits for the parties of the tiny runs, finished trainings, and a run that was stopped in the middle."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasu.protocol.requests import RoundDone
from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster
from support.kits import make_kits, make_pinned_kits, simulate_with_secrets
from support.tiny import tiny


@pytest.fixture(scope="session")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return kits of a server at localhost and of the parties a, b and c; not to be changed."""
    out = tmp_path_factory.mktemp("kits")
    make_kits(out, ["a", "b", "c"], ["localhost", "127.0.0.1"])
    return out


@pytest.fixture(scope="session")
def pinned_kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return kits whose keys the parties made themselves and pinned; not to be changed."""
    out = tmp_path_factory.mktemp("pinned")
    make_pinned_kits(out, ["a", "b", "c"], ["localhost", "127.0.0.1"])
    return out


@pytest.fixture(scope="session")
def finished_trainings() -> dict[str, tuple[Path, TrainedModel]]:
    """Return the folders of finished trainings and the same models from one process, by their settings."""
    return {}


@pytest.fixture
def train_once(
    kits: Path,
    finished_trainings: dict[str, tuple[Path, TrainedModel]],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Cluster, TrainedModel]]:
    """Return a function that trains two rounds over the network, or copies the folder of an equal training.

    It returns the cluster and the same model from one process.
    """

    def train(**keys: Any) -> tuple[Cluster, TrainedModel]:
        (config, parties), name = tiny(num_rounds=2, **keys), str(sorted(keys.items()))
        if name not in finished_trainings:
            folder = tmp_path_factory.mktemp("trained")
            Cluster(config, parties, kits, folder).run()
            finished_trainings[name] = folder, TrainedModel.of(simulate_with_secrets(parties, config).clients)
        folder, model = finished_trainings[name]
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        return Cluster(config, parties, kits, tmp_path), model

    return train


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: no test here cuts the power of the machine."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture(scope="session")
def stopped_folder(kits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of four rounds that the server ended after the third; not to be changed."""
    folder = tmp_path_factory.mktemp("stopped")
    config, parties = tiny(num_rounds=4)
    cluster = Cluster(config, parties, kits, folder)

    def stop(event: object) -> None:
        if isinstance(event, RoundDone) and event.round == 2:
            cluster.serving[-1].stop("enough")

    for role in (cluster.serve(observer=stop), *(cluster.join(name) for name in "abc")):
        assert "enough" in str(role.error())
    for name in ("server", "a", "b", "c"):
        found = sorted(path.name for path in (folder / name / "checkpoints").glob("*.checkpoint"))
        assert found == [f"round-{index:08d}.checkpoint" for index in (2, 3)]
    return folder


@pytest.fixture
def stopped_cluster(stopped_folder: Path, kits: Path, tmp_path: Path) -> Cluster:
    """Return a run of four rounds that the server ended at all parties after the third."""
    shutil.copytree(stopped_folder, tmp_path, dirs_exist_ok=True)
    config, parties = tiny(num_rounds=4)
    return Cluster(config, parties, kits, tmp_path)
