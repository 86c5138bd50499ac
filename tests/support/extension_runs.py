"""Train with each choice of an extension, in one process and over the network; print parts of the reports as JSON.

`main` runs in a separate process, because an extension stays loaded until its process ends. The parties are threads of
this process. Each server is a process that has only the packages of a server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from glasu import registry
from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.html_report import render_report
from support.cluster import Cluster
from support.kits import make_kits, simulate_with_secrets
from support.server_environment import GLASU
from support.tiny import tiny

EXTENSION = "support.my_extension"
Change = tuple[str, str, object]  # section, key, value
CHOICES: dict[str, Change] = {
    "sampler": ("train", "sampler", "first-neighbors"),
    "aggregation": ("model", "aggregation", "sum"),
    "encoding": ("wire", "precision", "ring"),
    "convolution": ("model", "backbone", "graph-conv"),  # of PyG; with all choices, the next line replaces it
    "backbone": ("model", "backbone", "two-matrices"),
    "task": ("train", "task", "smoothed"),
}


CONCAT = ("model", "aggregation", "concat")
JOINT = (("train", "backward", "joint"), ("train", "num_local_steps", 1))
RUNS: dict[str, tuple[Change, ...]] = {
    **{name: (choice,) for name, choice in CHOICES.items()},
    "all": (*CHOICES.values(),),
}
# A choice of the extension together with a choice of GLASU for another seam.
PAIRS: dict[str, tuple[Change, ...]] = {
    "encoding and concat": (CHOICES["encoding"], CONCAT),
    "encoding, concat and joint gradients": (CHOICES["encoding"], CONCAT, *JOINT),
    "aggregation and bf16": (CHOICES["aggregation"], ("wire", "precision", "bf16")),
    "aggregation and int8": (CHOICES["aggregation"], ("wire", "precision", "int8")),
}


def change(config: RunConfig, changes: Sequence[Change]) -> RunConfig:
    """Return the settings with these changes."""
    sections: dict[str, dict[str, Any]] = {}
    for section, key, value in changes:
        sections.setdefault(section, {})[key] = value
    return config.replace(**sections)


def write_toml(config: RunConfig, path: Path) -> None:
    """Write settings as a run file."""
    lines = []
    for section, keys in config.to_dict().items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items() if value is not None]
    path.write_text("\n".join(lines) + "\n")


@contextmanager
def start_server(settings: Path, kits: Path, out: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a server process; kill it at the end."""
    words = ["serve", settings, "--listen", "127.0.0.1:0", "--kit", kits / "server", "--out", out, "--wait", "200"]
    server = subprocess.Popen(
        [*GLASU, *map(str, words), "--extension", EXTENSION],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        try:
            yield server
        finally:
            server.kill()


def read_port(server: subprocess.Popen[str]) -> int:
    """Wait until a server listens; return its port."""
    assert server.stderr is not None
    lines = []
    for line in server.stderr:
        lines.append(line)
        if found := re.search(r"listening on 127.0.0.1:(\d+)", line):
            return int(found[1])
    raise AssertionError(f"the server ended with exit code {server.wait()}: {lines}")


def main(folder: Path, path: str) -> None:
    """Print the results of all runs. Servers have `path` as their PYTHONPATH."""
    registry.load_extension(EXTENSION)
    base, parties = tiny(num_rounds=2, sampler="neighbor", num_layers=2, aggregation_layers=(0, 1))
    make_kits(folder / "kits", [party.name for party in parties], ["localhost"])
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        servers = {}
        for name, changes in RUNS.items():  # they start while this process trains
            out = folder / name
            out.mkdir()
            write_toml(change(base, changes), out / "run.toml")
            environment = {**os.environ, "PYTHONPATH": path}
            servers[name] = stack.enter_context(
                start_server(out / "run.toml", folder / "kits", out / "server", environment)
            )
        for name, changes in {**RUNS, **PAIRS, "none": ()}.items():
            report = simulate_with_secrets(parties, change(base, changes)).report
            found[name] = {
                "one process": list(report.weights_sha256),
                "scores in one process": report.to_dict()["test"],
                "history": report.to_dict()["history"],
                "summary": report.summary(),
                "page": render_report("A run", "", {"glasu": report}),
            }
        for name, changes in RUNS.items():
            found[name]["network"] = run_parties(change(base, changes), parties, folder, name, servers[name])
    print(json.dumps(found))


def run_parties(
    config: RunConfig, parties: Sequence[PartyData], folder: Path, name: str, server: subprocess.Popen[str]
) -> dict[str, Any]:
    """Train over the network with this server, and return its report."""
    cluster = Cluster(config, parties, folder / "kits", folder / name, read_port(server))
    for role in [cluster.join(party.name) for party in parties]:
        role.outcome()
    assert server.wait(60) == 0
    report: dict[str, Any] = json.loads((folder / name / "server" / "report.json").read_text())
    return report
