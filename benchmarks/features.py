"""Does preparing the features help, and does a column of timestamps do harm?

    python benchmarks/features.py --datasets cora,tolokers --seeds 3 --runs features.csv

The script trains on every data set with raw features (`data.features = "none"`) and with prepared features (`"auto"`).
Each variant also runs with one more column per party ("+ time"). This column contains the seconds since 1970 of random
times within a year and is independent of the classes. In "auto + rows", every prepared row is divided by its length.
There are two settings: the default model ("gcnii"), and two layers of sage. The score is the test accuracy, or the ROC
AUC if there are two classes. With `--split validation` it is the score on the validation nodes. Runs in the file are
not repeated.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import normalize

import glasu
from glasu.data.preprocessing import fit_preparation
from tables import markdown, place, positive, show

DATASETS = (
    "cora",
    "citeseer",
    "pubmed",
    "actor",
    "squirrel_filtered",
    "wisconsin",
    "minesweeper",
    "tolokers",
    "blogcatalog",
    "facebook_pages",
)
SETTINGS: Mapping[str, dict[str, Any]] = {
    "gcnii": {},
    "sage": {
        "model": {"backbone": "sage", "num_layers": 2, "aggregation_layers": (0, 1)},
        "train": {"weight_decay": 5e-4},
    },
}
VARIANTS = ("none", "auto", "none + time", "auto + time", "auto + rows")
CHANGES = {  # heading -> the two variants whose scores are compared
    "auto - none": ("none", "auto"),
    "change by time": ("auto", "auto + time"),
    "change by rows": ("auto", "auto + rows"),
}
NOW, YEAR = 1.7e9, 3.15e7
Key = tuple[str, str, str, int, int, str]  # data set, setting, variant, rounds, seed, split


def add_timestamps(party: glasu.PartyData, seed: int) -> glasu.PartyData:
    """Return the party with one more feature column: random times within a year."""
    times = NOW + YEAR * np.random.default_rng(seed).random((party.num_nodes, 1))
    stack = sp.hstack if sp.issparse(party.features) else np.hstack
    return replace(party, features=stack([party.features, times]), feature_names=())


def divide_rows(party: glasu.PartyData) -> glasu.PartyData:
    """Return the party with prepared features whose rows are divided by their length; rows of zeros stay zero."""
    features = fit_preparation(party.features).apply(sp.csr_array(party.features).toarray(), np.float32)
    return replace(party, features=normalize(features), feature_names=())


def run(dataset: str, setting: str, variant: str, rounds: int, seed: int, split: str) -> float:
    """Train one model and return its score on a split in per cent."""
    prepared, _, added = variant.partition(" + ")
    config = glasu.RunConfig(
        data=glasu.DataConfig(name=dataset, split=(0.6, 0.2, 0.2)),
        train=glasu.TrainConfig(num_rounds=rounds, seed=seed, evaluate_every=5),
    )
    config = config.replace(data={"features": "none" if added == "rows" else prepared}, **SETTINGS[setting])
    parties = glasu.load_parties(config)
    if added == "time":
        parties = [add_timestamps(party, number) for number, party in enumerate(parties)]
    if added == "rows":
        parties = [divide_rows(party) for party in parties]
    model = glasu.GLASUClassifier(config=config).fit(parties)
    owner = parties[0]
    assert owner.labels is not None
    assert owner.splits is not None
    nodes = {"validation": owner.splits.validation, "test": owner.splits.test}[split]
    if len(owner.classes) > 2:
        return 100 * float(model.score(parties, nodes=nodes))
    return 100 * float(roc_auc_score(owner.labels[nodes], model.predict_proba(parties, nodes)[:, 1]))


def read_runs(path: Path) -> dict[Key, float]:
    """Return the scores of the finished runs."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            (
                row["dataset"],
                row["setting"],
                row["variant"],
                int(row["rounds"]),
                int(row["seed"]),
                row["split"],
            ): float(row["score"])
            for row in csv.DictReader(file)
        }


def append_run(path: Path, key: Key, score: float) -> None:
    """Add a finished run to the file."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["dataset", "setting", "variant", "rounds", "seed", "split", "score"])
        writer.writerow([*key, f"{score:.4f}"])


def compare(dataset: str, setting: str, scores: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a table row: the mean scores, and the changes by preparation, by timestamps and by row normalisation."""
    means = {variant: fmean(values) for variant, values in scores.items()}
    shown = [f"{means[variant]:.1f}" if variant in means else "-" for variant in VARIANTS]
    changes = [
        f"{means[after] - means[before]:+.1f}" if {after, before} <= set(means) else "-"
        for before, after in CHANGES.values()
    ]
    return [dataset, setting, str(max(map(len, scores.values()))), *shown, *changes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=lambda text: text.split(","), default=list(DATASETS), metavar="A,B")
    parser.add_argument("--settings", type=lambda text: text.split(","), default=list(SETTINGS), metavar="A,B")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS), metavar="A,B")
    parser.add_argument("--rounds", type=positive, default=40)
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="seeds 0..N-1")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="nodes to score")
    parser.add_argument("--quick", action="store_true", help="wisconsin and minesweeper, 5 rounds, one seed")
    parser.add_argument("--runs", type=place, default=Path("features.csv"), metavar="FILE", help="finished runs")
    parser.add_argument("--out", type=place, metavar="FILE", help="also write the table here")
    given = parser.parse_args()
    if given.quick:
        given.datasets, given.rounds, given.seeds = ["wisconsin", "minesweeper"], 5, 1
    done = read_runs(given.runs)
    rows = []
    for dataset in given.datasets:
        for setting in given.settings:
            scores: dict[str, list[float]] = {variant: [] for variant in given.variants}
            for seed in range(given.seeds):
                for variant in given.variants:
                    key = (dataset, setting, variant, given.rounds, seed, given.split)
                    if key not in done:
                        done[key] = run(*key)
                        append_run(given.runs, key, done[key])
                    scores[variant].append(done[key])
            rows.append(compare(dataset, setting, scores))
    header = ["data", "setting", "seeds", *VARIANTS, *CHANGES]
    show(markdown(header, rows), given.out)


if __name__ == "__main__":
    main()
