"""What do the server and a party recover from the messages of a run, and how much do the privacy settings help?

    python benchmarks/attacks.py off --datasets cora,minesweeper

Every argument becomes a column of the table. An argument is `off`, the name of a privacy profile, or a TOML file such
as privacy.toml, whose settings are applied to every run. If a profile refuses the sampler or the layers of a run, the
run uses a sampler and layers that the profile allows. Four kinds of runs are recorded and attacked. This list gives
their settings and, after the colon, the attacked data:

    rounds    labels at all parties, neighbour sampling, 90 rounds, nine evaluations: features, training nodes
    sets      1,000 rounds with a tiny network: edges from index sets
    owner-N   labels at one party, 30 rounds, with `model.owner_layers` = N = 0, 1 and 2: labels
    pair      two parties: the representation of the other party

In a fifth run, `split`, a server sends different answers to different parties for one round. Parties have secrets, as
they have in a run over a network. A cell says "refused" if GLASU refuses the run with the settings of the column. The
column "own data" is the score of a role that uses its own data and public facts, but no messages. This score is
computed with the settings of the first column whose run is not refused. If the settings of another column change the
score, that column shows the changed score in brackets.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from glasu.config import RunConfig
from glasu.data.methods import apply_method
from glasu.data.sources.catalog import load_parties
from glasu.errors import ConfigError
from glasu.privacy.attacks.result import AttackResult
from glasu.runtime.attack import attack_run
from glasu.runtime.simulation import SimulationOptions, simulate
from glasu.runtime.split_view import attack_by_splitting
from glasu.runtime.trained_model import TrainedModel
from glasu.runtime.transcript import RecordedRun
from tables import markdown, place, show

Sections = Mapping[str, Mapping[str, Any]]
SAMPLED = {"sampler": "neighbor", "batch_size": 16}
RUNS: dict[str, Sections] = {
    "rounds": {"train": {**SAMPLED, "num_rounds": 90, "evaluate_every": 10}},
    "sets": {
        "model": {"hidden": 4},
        "train": {**SAMPLED, "num_rounds": 1000, "num_local_steps": 1, "evaluate_every": 1000},
    },
    **{
        f"owner-{layers}": {
            "model": {"owner_layers": layers},
            "train": {"labels": "a", "num_rounds": 30, "evaluate_every": 30, "batch_size": 0, "sampler": "full"},
        }
        for layers in (0, 1, 2)
    },
    "pair": {"data": {"num_clients": 2}, "train": {"num_rounds": 10, "evaluate_every": 10, **SAMPLED}},
}
KEPT = {  # run -> the attacks on the messages of this run
    "rounds": ("features", "training nodes"),
    "sets": ("edges",),
    "owner": ("labels", "training nodes from index sets"),
    "pair": ("representation",),
}


ONCE: Sections = {"train": {"sampler": "full", "batch_size": 0}, "model": {"aggregation_layers": [1]}}


def read_column(text: str) -> Sections:
    """Return the settings for a column argument: `off`, a profile or a TOML file."""
    if text == "off":
        return {}
    if text.endswith(".toml"):
        return tomllib.loads(Path(text).read_text())
    return {"privacy": {"profile": text}, **(ONCE if text == "dp" else {})}


def configure(dataset: str, seed: int, run: Sections, column: Sections) -> RunConfig:
    """Return the settings of a run. The settings of the column override the run's own settings."""
    base: dict[str, dict[str, Any]] = {
        "data": {"name": dataset},
        "train": {"preset": "none", "patience": 0, "seed": seed},
    }
    for sections in (run, column):
        for name, keys in sections.items():
            base.setdefault(name, {}).update(keys)
    if column.get("privacy", {}).get("profile") == "server" and base["train"].get("sampler") == "neighbor":
        base["train"]["sampler"] = "shared"  # with several aggregation layers, masks require shared sampling
    return RunConfig.from_dict(base, f"the settings of {dataset}")


def make_secrets(names: list[str]) -> dict[str, bytes]:
    """Return fixed secrets, which make the figures reproducible."""
    return {name: hashlib.sha256(f"secret of {name}".encode()).digest() for name in names}


def attack_recorded(config: RunConfig, attacks: tuple[str, ...]) -> list[AttackResult]:
    """Record a run and attack it; the last row contains the test accuracy of the model."""
    parties = apply_method(config, load_parties(config)).parties
    with tempfile.TemporaryDirectory() as folder:
        options = SimulationOptions(transcript=Path(folder), secrets=make_secrets([party.name for party in parties]))
        done = simulate(parties, config, options)
        model = TrainedModel.of(done.clients)
        probabilities = model.predict_proba(parties) if "training nodes" in attacks else None
        transcript = RecordedRun(Path(folder))
        found = attack_run(transcript, parties, probabilities=probabilities, only=attacks)
    labelled = next(party for party in parties if party.labels is not None)
    assert labelled.labels is not None
    most = float(np.bincount(labelled.labels[labelled.labels >= 0]).max() / (labelled.labels >= 0).sum())
    accuracy = float(done.report.test.metrics["accuracy"])
    return [*found, AttackResult("none: test accuracy of the model", "-", "-", "accuracy", accuracy, most, most)]


def attack_split(config: RunConfig) -> list[AttackResult]:
    """Attack one round with a server that sends different answers to different parties."""
    parties = apply_method(config, load_parties(config)).parties
    return attack_by_splitting(parties, config, "a", make_secrets([party.name for party in parties]))


def list_findings(
    dataset: str, seed: int, column: Sections, runs: list[str]
) -> Iterator[tuple[str, list[AttackResult] | str]]:
    """Yield the results of every run, or the reason why the run was refused."""
    work: dict[str, tuple[Sections, Callable[[RunConfig], list[AttackResult]]]] = {}
    for name, sections in RUNS.items():
        work[name] = sections, partial(attack_recorded, attacks=KEPT[name.partition("-")[0]])
    work["split"] = {"train": {"num_rounds": 1, "batch_size": 0, "sampler": "full"}}, attack_split
    for name, (sections, attack) in work.items():
        if name not in runs and name.partition("-")[0] not in runs:
            continue
        try:
            yield name, attack(configure(dataset, seed, sections, column))
        except ConfigError as error:
            yield name, f"refused: {error}"


def main() -> None:
    """Print one table per data set. A table has a row per attack and role, and a score per column argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("columns", nargs="+", metavar="COLUMN", help="off, a profile, or a TOML file")
    parser.add_argument("--datasets", default="cora,minesweeper")
    parser.add_argument("--runs", default="rounds,sets,owner,pair,split", help="runs to make, comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=place, help="also write the tables to this file")
    args = parser.parse_args()
    if unknown := set(args.runs.split(",")) - {*RUNS, *KEPT, "split"}:
        parser.error(f"--runs {','.join(sorted(unknown))}: choose from {', '.join((*KEPT, *RUNS, 'split'))}")
    tables = []
    for dataset in args.datasets.split(","):
        rows: dict[tuple[str, str, str], dict[str, str]] = {}
        for column in args.columns:
            for run, found in list_findings(dataset, args.seed, read_column(column), args.runs.split(",")):
                print(f"{dataset}, {column}, {run}: {found}", file=sys.stderr, flush=True)
                if isinstance(found, str):
                    rows.setdefault((run, "every attack", "-"), {})[column] = "refused"
                    continue
                for each in found:
                    row = rows.setdefault((run, each.attack, each.role), {})
                    baseline = row.setdefault("own data", f"{each.baseline:.3f}")
                    row[column] = f"{each.score:.3f}"
                    if f"{each.baseline:.3f}" != baseline:  # for example, fewer nodes are evaluated with these settings
                        row[column] += f" ({each.baseline:.3f})"
                    row.setdefault("chance", f"{each.chance:.3f}")
                    row.setdefault("measure", each.measure)
        names = ("measure", "chance", "own data", *args.columns)
        body = [[*row, *(values.get(name, "-") for name in names)] for row, values in rows.items()]
        tables.append(f"{dataset}\n\n{markdown(['run', 'attack', 'role', *names], body)}")
    show("\n\n".join(tables), args.out)


if __name__ == "__main__":
    main()
