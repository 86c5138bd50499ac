"""Is GLASU better than the alternatives, if the results of `glasu reproduce` are paired by seed?

    glasu reproduce accuracy --seeds 10 --methods centralized,standalone,ensemble,smooth,glasu-4 --out DIR
    python benchmarks/pairs.py DIR/results.csv

Each difference is GLASU minus the alternative with the same seed, in points. Its 90 % interval comes from Student's t.
"better" means that the interval lies above 0. "no worse" means that its lower end is at least -1, or at least -3 if the
standard error exceeds 1. "not shown" means that neither condition holds.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats

from tables import markdown, place, show

CONFIDENCE = 0.9


def read_scores(path: Path) -> dict[tuple[str, str], dict[int, float]]:
    """Return the scores in per cent for each seed, grouped by data set and method."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            scores = found.setdefault((row["dataset"], row["method"]), {})
            scores[int(row["seed"])] = 100 * float(row["test_accuracy"])
    return found


def find_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the interval's lower and upper end, and the standard error of the mean difference."""
    error = stdev(differences) / len(differences) ** 0.5
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1) * error
    return fmean(differences) - half, fmean(differences) + half, error


def judge(low: float, error: float) -> str:
    """Return the verdict on a difference, given the lower end of its interval: better, no worse, or not shown."""
    if low > 0:
        return "better"
    return "no worse" if low >= (-3 if error > 1 else -1) else "not shown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--method", default="glasu-4")
    parser.add_argument("--out", type=place, help="also write the table to this file")
    args = parser.parse_args()
    scores, rows = read_scores(args.results), []
    for (dataset, method), other in scores.items():
        own = scores.get((dataset, args.method), {})
        seeds = sorted(own.keys() & other.keys())
        if method == args.method or len(seeds) < 2:
            continue
        low, high, error = find_interval([own[seed] - other[seed] for seed in seeds])
        means = [f"{fmean(each[seed] for seed in seeds):.1f}" for each in (own, other)]
        rows.append([dataset, method, *means, f"{low:+.2f} to {high:+.2f}", judge(low, error), str(len(seeds))])
    show(markdown(["data set", "alternative", args.method, "alternative", "difference", "", "seeds"], rows), args.out)


if __name__ == "__main__":
    main()
