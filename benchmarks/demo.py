"""Is the ranking of the methods of the demo the same for every seed of the data?

    python benchmarks/demo.py --seeds 10 --runs benchmarks/results/demo.csv

The settings are those of `glasu demo`. A seed changes the data, the splits and the weights. "alone" is the mean over
the departments. "best party alone" is the department with the best validation accuracy, by its model or by label
propagation. In the last row, only "profile" has labels. A difference is GLASU with exact gradients minus the
alternative with the same seed. The 90 % intervals come from Student's t. Runs in the file are not repeated.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import glasu
from glasu.cli.demo import make_demo_config
from glasu.experiments.plan import METHOD_SETTINGS
from glasu.records import FlatSettings
from glasu.report import find_best_party
from pairs import find_interval
from tables import append_rows, markdown, place, positive, show

GLASU = "GLASU, Q = 1, exact"
RUNS: dict[str, FlatSettings] = {
    "alone": METHOD_SETTINGS["standalone"],
    "ensemble": METHOD_SETTINGS["ensemble"],
    "smooth": METHOD_SETTINGS["smooth"],
    "GLASU, Q = 4, local": METHOD_SETTINGS["glasu-4"],
    GLASU: METHOD_SETTINGS["glasu-1"],
    "pooled": METHOD_SETTINGS["centralized"],
    "GLASU, Q = 1, labels at profile": {**METHOD_SETTINGS["glasu-1"], "labels": "profile"},
}
BEST_PARTY = "best party alone"
ROWS = ("alone", BEST_PARTY, *list(RUNS)[1:])
FIELDS = ("method", "rounds", "seed", "test_accuracy", "megabytes")


def run(method: str, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Train once and return the rows for the file. There is one row, or two if every department trains alone."""
    config = make_demo_config(rounds, seed).replace(train=RUNS[method])
    report = glasu.train(glasu.load_parties(config), config)
    scores = {method: report.test.accuracy}
    if method == "alone" and (best := find_best_party(report)) is not None:
        scores[BEST_PARTY] = best.test
    size = f"{report.traffic.total_bytes / 1e6:.2f}"
    return [
        dict(zip(FIELDS, (name, rounds, seed, f"{score:.6g}", size), strict=True)) for name, score in scores.items()
    ]


def read_runs(path: Path, rounds: int) -> dict[tuple[str, int], tuple[float, float]]:
    """Return the accuracy in per cent and the megabytes of the finished runs, by method and seed."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            (row["method"], int(row["seed"])): (100 * float(row["test_accuracy"]), float(row["megabytes"]))
            for row in csv.DictReader(file)
            if int(row["rounds"]) == rounds
        }


def compare(found: Mapping[tuple[str, int], tuple[float, float]], seeds: int) -> str:
    """Return the table: mean, smallest and largest accuracy, bytes, and the difference from GLASU."""
    rows = []
    for method in ROWS:
        scores = [found[method, seed][0] for seed in range(seeds)]
        gains = [found[GLASU, seed][0] - score for seed, score in enumerate(scores)]
        low, high, _ = find_interval(gains)
        gain = "" if method == GLASU else f"{fmean(gains):+.1f} ({low:+.1f} to {high:+.1f})"
        size = fmean(found[method, seed][1] for seed in range(seeds))
        rows.append([method, f"{fmean(scores):.1f}", f"{min(scores):.1f} to {max(scores):.1f}", f"{size:.1f}", gain])
    return markdown(["method", "accuracy", "range", "MB", f"{GLASU} minus this"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=120, help="rounds per method (default: 120)")
    parser.add_argument("--seeds", type=positive, default=10, metavar="N", help="seeds 0..N-1")
    parser.add_argument("--quick", action="store_true", help="10 rounds and two seeds")
    parser.add_argument("--runs", type=place, default=Path("demo.csv"), metavar="FILE", help="finished runs")
    parser.add_argument("--out", type=place, metavar="FILE", help="also write the table here")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seeds = 10, 2
    done = read_runs(args.runs, args.rounds)
    for seed in range(args.seeds):
        for method in RUNS:
            if (method, seed) not in done:
                append_rows(args.runs, FIELDS, run(method, args.rounds, seed))
    show(compare(read_runs(args.runs, args.rounds), args.seeds), args.out)


if __name__ == "__main__":
    main()
