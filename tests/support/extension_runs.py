"""Train with each choice of an extension, in one process and over the network; print parts of the reports as JSON.

`main` runs in a separate process, because an extension stays loaded until its process ends. The parties are threads of
this process. Each server is a process in the environment that the arguments describe.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
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
CHOICES = {
    "sampler": ("train", "sampler", "first-neighbors"),
    "aggregation": ("model", "aggregation", "sum"),
    "encoding": ("wire", "precision", "ring"),
    "convolution": ("model", "backbone", "graph-conv"),  # of PyG; with all choices, the next line replaces it
    "backbone": ("model", "backbone", "two-matrices"),
    "task": ("train", "task", "smoothed"),
}


def change(config: RunConfig, *seams: str) -> RunConfig:
    """Use the choices of the extension for these seams."""
    for seam in seams:
        section, key, choice = CHOICES[seam]
        config = config.replace(**{section: {key: choice}})
    return config


def write_toml(config: RunConfig, path: Path) -> None:
    """Write settings as a run file."""
    lines = []
    for section, keys in config.to_dict().items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items() if value is not None]
    path.write_text("\n".join(lines) + "\n")


def serve(settings: Path, kits: Path, out: Path, environment: dict[str, str]) -> tuple[subprocess.Popen[str], int]:
    """Start a server process; return it and its port."""
    words = ["serve", settings, "--listen", "127.0.0.1:0", "--kit", kits / "server", "--out", out, "--wait", "60"]
    server = subprocess.Popen(
        [*GLASU, *map(str, words), "--extension", EXTENSION],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    lines = []
    for line in server.stderr:
        lines.append(line)
        if found := re.search(r"listening on 127.0.0.1:(\d+)", line):
            return server, int(found[1])
    raise AssertionError(f"the server ended with exit code {server.wait()}: {lines}")


def main(folder: Path, path: str, served: Sequence[str]) -> None:
    """Print the results of all runs in one process, and of those named over the network.

    Servers have `path` as their PYTHONPATH.
    """
    registry.load_extension(EXTENSION)
    base, parties = tiny(num_rounds=2, sampler="neighbor", num_layers=2, aggregation_layers=(0, 1))
    make_kits(folder / "kits", [party.name for party in parties], ["localhost"])
    found = {}
    for name in (*CHOICES, "all"):
        config = change(base, *(CHOICES if name == "all" else (name,)))
        report = simulate_with_secrets(parties, config).report
        found[name] = {
            "network": run_over_network(config, parties, folder, name, path) if name in served else None,
            "one process": list(report.weights_sha256),
            "scores in one process": report.to_dict()["test"],
            "history": report.to_dict()["history"],
            "summary": report.summary(),
            "page": render_report("A run", "", {"glasu": report}),
        }
    found["none"] = {"one process": list(simulate_with_secrets(parties, base).report.weights_sha256)}
    print(json.dumps(found))


def run_over_network(
    config: RunConfig, parties: Sequence[PartyData], folder: Path, name: str, path: str
) -> dict[str, Any]:
    """Train with a server in a process with this PYTHONPATH, and return its report."""
    out = folder / name
    out.mkdir()
    write_toml(config, out / "run.toml")
    server, port = serve(out / "run.toml", folder / "kits", out / "server", {**os.environ, "PYTHONPATH": path})
    try:
        cluster = Cluster(config, parties, folder / "kits", out, port)
        for role in [cluster.join(party.name) for party in parties]:
            role.outcome()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()
    report: dict[str, Any] = json.loads((out / "server" / "report.json").read_text())
    return report
