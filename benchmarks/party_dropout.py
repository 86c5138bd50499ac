"""Does party dropout help when a party is missing, and what does it cost when all are present?

    python benchmarks/party_dropout.py --datasets cora,pubmed,facebook_pages --seeds 10 --runs dropout.csv

With party dropout, each party contributes nothing to a round with a given probability, the dropout rate. The runs have
three parties, splits of 60, 20 and 20 %, and default settings without a preset. For each seed, the script trains a
model without dropout and a model with each dropout rate. "all" is the test accuracy of all parties in per cent. "two"
is the mean over the three pairs of parties that predict without the third. If a model was trained without dropout,
GLASU refuses such a prediction, but this script computes it anyway. The brackets contain the 90 % interval of the
paired difference from the model without dropout. Runs in the file are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from scipy import stats

import glasu
from glasu.runtime.simulation import simulate
from glasu.runtime.trained_model import TrainedModel
from tables import append_rows, markdown, place, positive, show

FIELDS = ("dataset", "seed", "rate", "validation", "all", "two")
Row = dict[str, Any]


def run(dataset: str, seed: int, rate: float) -> Row:
    """Train one model; return its validation accuracy, and its test accuracies with all parties and with pairs."""
    config = glasu.RunConfig.from_dict(
        {
            "data": {"name": dataset, "split": (0.6, 0.2, 0.2)},
            "train": {"seed": seed, "preset": "none", "party_dropout": rate},
        }
    )
    parties = glasu.load_parties(config)
    done = simulate(parties, config)
    model = TrainedModel.of(done.clients)
    allowed = dataclasses.replace(model, config=model.config.replace(train={"party_dropout": rate or 0.5}))
    labels, splits = parties[0].labels, parties[0].splits
    assert labels is not None
    assert splits is not None
    pairs = []
    for pair in combinations(parties, 2):
        scores = allowed.predict_proba(pair, splits.test)
        pairs.append(float((scores.argmax(axis=1) == labels[splits.test]).mean()))
    return {
        "dataset": dataset,
        "seed": seed,
        "rate": rate,
        "validation": done.report.validation.accuracy,
        "all": done.report.test.accuracy,
        "two": fmean(pairs),
    }


def read_runs(path: Path) -> list[Row]:
    """Return the finished runs."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {key: value if key == "dataset" else float(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


def compare(rows: Sequence[Row], dataset: str, rate: float) -> list[str]:
    """Return a row of the table."""
    found: dict[float, dict[int, Row]] = {}
    for row in rows:
        if row["dataset"] == dataset:
            found.setdefault(row["rate"], {})[int(row["seed"])] = row
    own, plain = found[rate], found[0.0]
    cells = []
    for column in ("validation", "all", "two"):
        cell = f"{100 * fmean(row[column] for row in own.values()):.1f}"
        seeds = own.keys() & plain.keys()
        if rate and len(seeds) > 1 and column != "validation":
            differences = [100 * (own[seed][column] - plain[seed][column]) for seed in seeds]
            half = stats.t.ppf(0.95, len(seeds) - 1) * np.std(differences, ddof=1) / np.sqrt(len(seeds))
            cell += f" ({fmean(differences) - half:+.1f}..{fmean(differences) + half:+.1f})"
        cells.append(cell)
    return [dataset, f"{rate:g}", *cells, str(len(own))]


def main() -> None:
    """Train the missing models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="cora,pubmed,facebook_pages")
    parser.add_argument("--rates", default="0.1,0.3", help="compared with 0")
    parser.add_argument("--seeds", type=positive, default=10, help="seeds 0..N-1")
    parser.add_argument("--runs", type=place, default=Path("party_dropout.csv"), metavar="FILE", help="finished runs")
    parser.add_argument("--out", type=place)
    args = parser.parse_args()
    torch.set_num_threads(1)
    datasets, rates = args.datasets.split(","), [0.0, *map(float, args.rates.split(","))]
    for seed in range(args.seeds):
        for dataset in datasets:
            for rate in rates:
                done = {(row["dataset"], row["seed"], row["rate"]) for row in read_runs(args.runs)}
                if (dataset, seed, rate) not in done:
                    append_rows(args.runs, FIELDS, [run(dataset, seed, rate)])
    rows = read_runs(args.runs)
    body = [compare(rows, dataset, rate) for dataset in datasets for rate in rates]
    show(markdown(["data set", "rate", "validation", "all", "two", "seeds"], body), args.out)


if __name__ == "__main__":
    main()
