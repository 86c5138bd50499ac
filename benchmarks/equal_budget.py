"""Is joint training better than the alternatives if every method has the same search budget?

    python benchmarks/equal_budget.py --datasets cora,citeseer --seeds 10 --search search.csv --runs runs.csv

Every method tries twelve settings (make_points) on seeds 100 and 101, and the setting with the best mean validation
accuracy runs on seeds 0 to N-1. Test scores of the search are not stored. All runs use the paper's splits, gcnii with
four layers, and raw features. "glasu-1" has exact gradients and one step per round. A third of its settings begin with
a warm start, which replaces half of the rounds. "glasu-4" has local gradients and four steps per round. Both use party
dropout. Runs that are already in the files are not repeated.

The table shows the paired difference, GLASU minus the alternative, in points, with its 90 % interval (pairs.py).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import glasu
from glasu import RunConfig
from glasu.protocol.client import Client
from glasu.runtime.simulation import SimulationOptions, simulate
from pairs import find_interval, judge
from tables import append_rows, markdown, place, positive, show

DATASETS = ("cora", "citeseer", "pubmed", "dblp_authors")
SEARCH_SEEDS = (100, 101)
NUM_POINTS = 12
COMMON = {"preset": "none", "patience": 0, "weight_decay": 0.001, "evaluate_every": 5}
ONE_STEP = {**COMMON, "num_local_steps": 1}
JOINT = {
    # The exact gradient is that of the sum of the three clients' losses, so the weight decay is three times as large.
    "glasu-1": {**ONE_STEP, "method": "glasu", "backward": "joint", "party_dropout": 0.3, "weight_decay": 0.003},
    "glasu-4": {**COMMON, "method": "glasu", "num_local_steps": 4, "num_rounds": 60, "party_dropout": 0.3},
}
STEPS = {"glasu-1": (0.01, 0.02), "glasu-4": (0.002, 0.005, 0.01)}  # step sizes that differ from the other methods'
ALONE = ("standalone", "ensemble", "smooth")  # methods that share one training run of the parties
ALTERNATIVES = ("centralized", *ALONE)
FIELDS = ("dataset", "method", "settings", "seed", "validation", "test", "megabytes")
Row = dict[str, Any]


def make_points(method: str, rounds: int) -> list[dict[str, float]]:
    """Return the settings that a method tries; `rounds` applies to methods with one step per round."""
    ways: list[dict[str, float]] = [{"train.learning_rate": step} for step in STEPS.get(method, (0.005, 0.01, 0.02))]
    if method == "glasu-1":
        ways.append({**ways[0], "train.warm_start": rounds // 2, "train.num_rounds": rounds - rounds // 2})
    return [
        {"model.dropout": dropout, "model.alpha": alpha, **way}
        for dropout, alpha, way in itertools.product((0.5, 0.7), (0.1, 0.2), ways)
    ]


def name_point(method: str, point: int, rounds: int) -> str:
    """Return the settings of a point as a text, which identifies the runs of the point in a file."""
    settings = {
        "train.num_rounds": JOINT.get(method, {}).get("num_rounds", rounds),
        **make_points(method, rounds)[point],
    }
    return " ".join(f"{name.partition('.')[2]}={value}" for name, value in sorted(settings.items()))


def make_config(dataset: str, method: str, point: int, seed: int, rounds: int) -> RunConfig:
    """Return the settings of a run; `rounds` applies to methods with one step per round."""
    sections: dict[str, dict[str, Any]] = {
        "data": {"name": dataset, "features": "none"},
        "model": {"backbone": "gcnii"},
        "train": {"num_rounds": rounds, **JOINT.get(method, {**ONE_STEP, "method": method}), "seed": seed},
    }
    for name, value in make_points(method, rounds)[point].items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    return RunConfig.from_dict(sections)


def run(dataset: str, methods: Sequence[str], point: int, seed: int, rounds: int) -> list[Row]:
    """Train methods with one setting and one seed. All methods whose parties train alone use the same run."""
    rows: list[Row] = []
    trained: tuple[Client, ...] = ()
    for method in methods:
        config = make_config(dataset, method, point, seed, rounds)
        used = trained if method in ALONE else ()
        done = simulate(list(glasu.load_parties(config)), config, SimulationOptions(workers=1, trained=used))
        trained, report = (done.clients if method in ALONE else trained), done.report
        rows.append(
            {
                "dataset": dataset,
                "method": method,
                "settings": name_point(method, point, rounds),
                "seed": seed,
                "validation": report.validation.accuracy,
                "test": report.test.accuracy,
                "megabytes": report.traffic.total_bytes / 1e6,
            }
        )
    return rows


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file, or no rows if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def ensure(path: Path, dataset: str, points: Mapping[str, int], seed: int, rounds: int, *, keeps_test: bool) -> None:
    """Run each method at its point of the grid, unless the file contains this run, and append the rows.

    Args:
        path: the file of finished runs.
        dataset: the name of the data set.
        points: the point of the grid for each method.
        seed: the seed of the runs.
        rounds: the number of rounds of methods with one step per round.
        keeps_test: whether to store test scores.
    """
    known = {(row["dataset"], row["method"], row["settings"], int(row["seed"])) for row in read_rows(path)}
    left = [
        method
        for method, point in points.items()
        if (dataset, method, name_point(method, point, rounds), seed) not in known
    ]
    for point in sorted({points[method] for method in left}):
        rows = run(dataset, [method for method in left if points[method] == point], point, seed, rounds)
        for row in rows:
            logging.info("%(dataset)s %(method)s, %(settings)s, seed %(seed)d: %(validation).3f", row)
        append_rows(path, FIELDS, rows if keeps_test else [{**row, "test": ""} for row in rows])


def choose_points(path: Path, dataset: str, methods: Sequence[str], rounds: int) -> dict[str, int]:
    """Return the point with the best mean validation accuracy for each method, or the first of several best points."""
    found: dict[str, dict[int, list[float]]] = {method: {} for method in methods}
    places = {(method, name_point(method, point, rounds)): point for method in methods for point in range(NUM_POINTS)}
    for row in read_rows(path):
        point = places.get((row["method"], row["settings"]))
        if row["dataset"] == dataset and point is not None:
            found[row["method"]].setdefault(point, []).append(float(row["validation"]))
    return {method: max(sorted(scores), key=lambda point: fmean(scores[point])) for method, scores in found.items()}


def compare(path: Path, dataset: str, points: Mapping[str, int], num_seeds: int, rounds: int) -> list[list[str]]:
    """Return the rows of the table for one data set."""
    chosen = {method: name_point(method, point, rounds) for method, point in points.items()}
    scores: dict[str, dict[int, float]] = {method: {} for method in points}
    joint_method = next(method for method in points if method in JOINT)
    megabytes = []
    for row in read_rows(path):
        method, seed = row["method"], int(row["seed"])
        if row["dataset"] == dataset and chosen.get(method) == row["settings"] and seed < num_seeds:
            scores[method][seed] = 100 * float(row["test"])
            if method == joint_method:
                megabytes.append(float(row["megabytes"]))
    lines, own = [], scores[joint_method]
    for method in ALTERNATIVES:
        differences = [own[seed] - scores[method][seed] for seed in sorted(own)]
        low, high, error = find_interval(differences)
        cells = [f"{fmean(own.values()):.1f}", f"{fmean(scores[method].values()):.1f}", f"{low:+.2f} to {high:+.2f}"]
        lines.append([dataset, method, *cells, judge(low, error), f"{fmean(megabytes):.0f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=lambda text: text.split(","), default=list(DATASETS), metavar="A,B")
    parser.add_argument("--seeds", type=positive, default=10, metavar="N", help="seeds 0..N-1 of the comparison")
    parser.add_argument("--rounds", type=positive, default=200, metavar="N", help="rounds with one step (default 200)")
    parser.add_argument("--joint", choices=tuple(JOINT), default="glasu-1", help="method to compare with alternatives")
    parser.add_argument("--search", type=place, default=Path("search.csv"), metavar="FILE", help="runs of the search")
    parser.add_argument("--runs", type=place, default=Path("runs.csv"), metavar="FILE", help="runs of the comparison")
    parser.add_argument("--out", type=place, metavar="FILE", help="also write the table here")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    lines, methods = [], (*ALTERNATIVES, args.joint)
    for dataset in args.datasets:
        for point, seed in itertools.product(range(NUM_POINTS), SEARCH_SEEDS):
            ensure(args.search, dataset, dict.fromkeys(methods, point), seed, args.rounds, keeps_test=False)
        points = choose_points(args.search, dataset, methods, args.rounds)
        for method, point in points.items():
            logging.info("%s %s: %s", dataset, method, make_points(method, args.rounds)[point])
        for seed in range(args.seeds):
            ensure(args.runs, dataset, points, seed, args.rounds, keeps_test=True)
        lines += compare(args.runs, dataset, points, args.seeds, args.rounds)
    header = ["data set", "alternative", "glasu", "alternative", "difference", "", "MB of glasu"]
    show(markdown(header, lines), args.out)


if __name__ == "__main__":
    main()
