"""A server needs only the packages of deploy/server-requirements.txt: no torch, no PyG, no scipy, no pyarrow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glasu.config import RunConfig
from glasu.data.folders import write_party
from glasu.data.party import PartyData
from glasu.data.sources.catalog import load_parties
from support.kits import make_kits, make_pinned_kits, simulate_with_secrets
from support.server_environment import GLASU, link_packages
from support.small import SMALL
from support.warm_process import WarmProcess

ABSENT = ("torch", "torch_geometric", "numba", "scipy", "sklearn", "pyarrow", "plotly", "optuna", "tenseal")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return link_packages(tmp_path_factory.mktemp("server") / "packages")


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", ABSENT)
def test_the_environment_of_these_tests_lacks_the_large_packages(environment, name):
    tried = run(environment, sys.executable, "-S", "-c", f"import {name}")
    assert f"No module named '{name}'" in tried.stderr


def test_the_help_of_serve_takes_less_than_half_a_second_of_cpu_time(environment):
    before = os.times()
    shown = run(environment, *GLASU, "serve", "--help")
    after = os.times()
    assert shown.returncode == 0, shown.stderr
    assert "--listen" in shown.stdout
    spent = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    assert spent < 0.5


def test_kits_are_made_without_the_large_packages(environment, tmp_path):
    words = ["provision", "--parties", "a,b", "--host", "localhost", "--out", str(tmp_path / "kits")]
    made = run(environment, *GLASU, *words)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "kits" / "server" / "kit.toml").is_file()


class Run:
    """The processes of one run: a server in the small environment, parties in this one."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.running: dict[str, subprocess.Popen[bytes] | WarmProcess] = {}

    def start(self, name: str, *words: object) -> None:
        """Start a role; its output is appended to its log."""
        log, out = self.folder / f"{name}.log", self.folder / "runs" / name
        command = [*map(str, words), "--kit", str(self.folder / "kits" / name), "--out", str(out), "--wait", "120"]
        if name != "server":
            self.running[name] = WarmProcess(command, log)
            return
        with log.open("a") as file:
            self.running[name] = subprocess.Popen([*GLASU, *command], env=self.environment, stdout=file, stderr=file)

    def serve(self, *more: str) -> int:
        """Start the server and return its port."""
        (self.folder / "server.log").unlink(missing_ok=True)
        self.start("server", "serve", self.folder / "run.toml", "--listen", "127.0.0.1:0", *more)
        deadline = time.monotonic() + 60
        while not (found := re.search(r"listening on 127.0.0.1:(\d+)", self.log("server"))):
            assert self.running["server"].poll() is None, self.log("server")
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return int(found[1])

    def join(self, name: str, port: int, *more: object) -> None:
        self.start(name, "join", self.folder / "parties" / name, "--server", f"localhost:{port}", *more)

    def prepare(self, settings: str, make: Callable[[Path, list[str]], None]) -> list[PartyData]:
        """Write the run file, the folders of the parties and the kits; return the parties."""
        (self.folder / "run.toml").write_text(settings)
        parties = load_parties(RunConfig.from_toml(self.folder / "run.toml"))
        for party in parties:
            write_party(party, self.folder / "parties" / party.name)
        make(self.folder / "kits", [party.name for party in parties])
        return parties

    def train(self, parties: list[PartyData]) -> dict[str, Any]:
        """Train to the end, compare the weights with a run in one process, and return the server's report."""
        port = self.serve()
        for party in parties:
            self.join(party.name, port)
        self.finish()
        report: dict[str, Any] = json.loads((self.folder / "runs" / "server" / "report.json").read_text())
        config = RunConfig.from_toml(self.folder / "run.toml")
        assert report["weights_sha256"] == list(simulate_with_secrets(parties, config).report.weights_sha256)
        return report

    def finish(self) -> None:
        """Wait until every role has exited with code 0."""
        for name, process in self.running.items():
            assert process.wait(240) == 0, self.log(name)
        self.running.clear()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@pytest.fixture
def whole_run(tmp_path, environment) -> Iterator[Run]:
    found = Run(tmp_path, environment)
    yield found
    for process in found.running.values():  # left by a failure
        process.kill()
        process.wait()


def test_a_server_without_torch_serves_a_training_and_a_prediction(whole_run, tmp_path):
    settings = (
        SMALL.replace("[model]", "num_clients = 2\n[model]") + "aggregation_layers = [1]\n[train]\nnum_rounds = 3\n"
    )
    parties = whole_run.prepare(settings, make_kits)
    report = whole_run.train(parties)
    assert "torch" not in report["versions"]

    ids = tmp_path / "ids.csv"
    ids.write_text("id\n" + "\n".join(map(str, parties[0].ids[:3])) + "\n")
    port = whole_run.serve("--predict")
    whole_run.join("a", port, "--predict", ids)
    whole_run.join("b", port, "--predict")
    whole_run.finish()
    assert json.loads((tmp_path / "runs" / "server" / "prediction.json").read_text())["nodes"] == 3


def test_a_server_without_tenseal_adds_ciphertexts(whole_run):
    keys = 'aggregation_layers = [1]\n[train]\nnum_rounds = 2\n[privacy]\nsecure_aggregation = "ckks"\n'
    settings = SMALL.replace("[model]", "num_clients = 3\n[model]") + keys
    whole_run.train(whole_run.prepare(settings, make_pinned_kits))
