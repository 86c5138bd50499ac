"""How many bytes, exchanges and CPU seconds does a run need to reach a given validation accuracy?

    python benchmarks/bytes_to_accuracy.py --datasets cora,citeseer,pubmed --seeds 5 --jobs 2

The first two rows are the cheap methods, which send almost no bytes: ensemble averages the predictions of parties that
train alone, and smooth propagates this average over the edges. The other settings range from an exchange of every layer
in every step to an exchange of one narrow layer of 8-bit numbers every few steps. Every run trains for a fixed number
of rounds. The best cheap method is the ensemble or smooth setting with the highest mean validation accuracy. The table
shows the cost of a run until its validation accuracy first reaches the goal, the megabytes until that accuracy exceeds
the accuracy of the best cheap method with the same seed, and the test accuracy of the selected model. Bytes include
sampling, training and validation. Runs that are in the output folder are not repeated.

    python benchmarks/bytes_to_accuracy.py --ladder cheap --datasets cora --seeds 10

This command compares runs of a few megabytes with the best cheap method. It counts the bytes of the whole run:
training, evaluations and the test. The last two settings were chosen by validation accuracy on seeds 100-104, and the
setting with party dropout was chosen on seeds 100 and 101.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from glasu.experiments.plan import STOP_AT, Run, read_settings
from glasu.experiments.reproduce import run_missing
from glasu.experiments.results import CurvePoint, RunResult, load_result
from glasu.experiments.tables import format_spread, list_percentages
from pairs import find_interval
from tables import markdown

DATASETS = ("cora", "citeseer", "pubmed")
EXCESS = "MB until validation exceeds the best cheap method"
ONE = {"aggregation_layers": (3,)}
INT8 = {"precision": "int8"}
CHEAP_METHODS = ("ensemble", "smooth")
LADDER: list[tuple[str, str, dict[str, Any]]] = [
    *((method, method, {}) for method in CHEAP_METHODS),
    ("K=4 Q=1, every client with all edges", "simulated", {}),
    ("K=2 Q=1, exact gradient", "glasu-1", {}),
    ("K=2 Q=4", "glasu-4", {}),
    ("K=1 Q=4", "glasu-4", {"model": ONE}),
    ("K=1 Q=4, width 32", "glasu-4", {"model": {**ONE, "hidden": 32}}),
    ("K=1 Q=4, width 16", "glasu-4", {"model": {**ONE, "hidden": 16}}),
    ("K=1 Q=8, width 16", "glasu-4", {"model": {**ONE, "hidden": 16}, "train": {"num_local_steps": 8}}),
    ("K=1 Q=8, width 8", "glasu-4", {"model": {**ONE, "hidden": 8}, "train": {"num_local_steps": 8}}),
    ("K=2 Q=4, int8", "glasu-4", {"wire": INT8}),
    ("K=1 Q=4, int8", "glasu-4", {"model": ONE, "wire": INT8}),
    ("K=1 Q=4, width 32, int8", "glasu-4", {"model": {**ONE, "hidden": 32}, "wire": INT8}),
    (
        "K=1 Q=8, width 16, int8",
        "glasu-4",
        {"model": {**ONE, "hidden": 16}, "train": {"num_local_steps": 8}, "wire": INT8},
    ),
]

WIDE = {**ONE, "hidden": 64}
SHORT = {"num_local_steps": 8, "num_rounds": 30, "evaluate_every": 6}
CHEAP: list[tuple[str, str, dict[str, Any]]] = [
    *((method, method, {}) for method in CHEAP_METHODS),
    LADDER[-1],
    ("K=1 Q=8, width 64, int8, 30 rounds", "glasu-4", {"model": WIDE, "train": SHORT, "wire": INT8}),
    *(
        (
            f"K=1 Q=8, width 64, changes of {bits} bits, 30 rounds",
            "glasu-4",
            {"model": WIDE, "train": SHORT, "wire": {**INT8, "feedback": True, "feedback_bits": bits}},
        )
        for bits in (4, 3, 2)
    ),
    (
        "K=1 Q=16, width 64, int8, party dropout, 90 rounds",
        "glasu-4",
        {
            "model": {**WIDE, "dropout": 0.6},
            "train": {
                "num_local_steps": 16,
                "learning_rate": 0.005,
                "weight_decay": 0.002,
                "party_dropout": 0.3,
                "num_rounds": 90,
                "evaluate_every": 10,
            },
            "wire": INT8,
        },
    ),
    ("smooth, 8 layers", "smooth", {"model": {"num_layers": 8, "aggregation_layers": (7,), "alpha": 0.2}}),
    (
        "K=1 Q=4, 6 layers, changes of 2 bits, 64 rounds",
        "glasu-4",
        {
            "model": {"num_layers": 6, "aggregation_layers": (5,), "alpha": 0.2, "theta": 0.2},
            "train": {"learning_rate": 0.005, "num_rounds": 64, "evaluate_every": 16},
            "wire": {**INT8, "feedback": True, "feedback_bits": 2},
        },
    ),
]


def runs(dataset: str, seeds: int, ladder: Sequence[tuple[str, str, dict[str, Any]]] = LADDER) -> list[Run]:
    """Return the runs of all settings on a data set. Runs with the same setting are consecutive."""
    result = []
    for name, method, changes in ladder:
        for seed in range(seeds):
            config = read_settings(dataset, method).replace(**changes)
            result.append(Run(dataset, method, name, seed, config.replace(train={"seed": seed})))
    return result


def find_point_that_reaches(result: RunResult, goal: float) -> CurvePoint | None:
    """Return the first evaluation that reaches the goal, or None."""
    return next((point for point in result.curve if point.val_accuracy >= goal), None)


def find_best_cheap(cells: Sequence[Sequence[RunResult]]) -> Sequence[RunResult]:
    """Return the runs of the cheap setting whose mean validation accuracy over the seeds is highest."""
    cheap = [cell for cell in cells if cell[0].row.method in CHEAP_METHODS]
    return max(cheap, key=lambda cell: fmean(result.row.validation_accuracy for result in cell))


def format_excess(cell: Sequence[RunResult], best: Sequence[RunResult]) -> str:
    """Return the mean megabytes until validation beats the best cheap method, and how many seeds achieve this."""
    if cell[0].row.method in CHEAP_METHODS:
        return "-"
    goals = {other.row.seed: other.row.validation_accuracy for other in best}
    points = [find_point_that_reaches(each, math.nextafter(goals[each.row.seed], math.inf)) for each in cell]
    sizes = [point.bytes / 1e6 for point in points if point is not None]
    return f"{fmean(sizes):.1f} ({len(sizes)} of {len(cell)})" if sizes else f"never (0 of {len(cell)})"


def rung(dataset: str, results: Sequence[RunResult], best: Sequence[RunResult]) -> list[str]:
    """Return the table row of one setting over all seeds; `best` contains the runs of the best cheap method."""
    firsts = [first for result in results if (first := find_point_that_reaches(result, STOP_AT[dataset])) is not None]
    whole = [result.curve[-1].bytes / 1e6 for result in results]
    cost = ["-"] * 3
    if firsts:
        figures = [[getattr(first, name) for first in firsts] for name in ("bytes", "exchanges", "seconds")]
        cost = [f"{fmean(figures[0]) / 1e6:.1f}", f"{fmean(figures[1]):.0f}", f"{fmean(figures[2]):.1f}"]
    return [
        results[0].row.setting,
        f"{len(firsts)} of {len(results)}",
        *cost,
        format_excess(results, best),
        f"{max(whole):.1f}",
        format_spread(list_percentages(results)),
    ]


def compare_with_cheap(dataset: str, cells: Sequence[Sequence[RunResult]]) -> str:
    """Return the table that compares every setting with the best cheap method, paired by seed, with 90 % intervals."""
    best, rows = find_best_cheap(cells), []
    for cell in cells:
        gains = [one - other for one, other in zip(list_percentages(cell), list_percentages(best), strict=True)]
        validation = 100 * fmean(result.row.validation_accuracy for result in cell)
        size = max(result.row.bytes for result in cell) / 1e6
        low, high, _ = find_interval(gains)
        gain = f"{fmean(gains):+.1f} ({low:+.1f} to {high:+.1f})"
        rows.append(
            [
                cell[0].row.setting,
                f"{size:.2f}",
                format_excess(cell, best),
                f"{validation:.1f}",
                format_spread(list_percentages(cell)),
                gain,
            ]
        )
    heads = ["setting", "MB", EXCESS, "validation %", "test %", f"against {best[0].row.setting}"]
    return f"\n{dataset}: bytes of the whole run\n\n{markdown(heads, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--ladder", choices=("goal", "cheap"), default="goal")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/bytes"))
    args = parser.parse_args()
    every: list[RunResult] = []
    for dataset in args.datasets.split(","):
        planned = runs(dataset, args.seeds, LADDER if args.ladder == "goal" else CHEAP)
        run_missing(args.out, planned, args.jobs)
        found = [result for run in planned if (result := load_result(args.out, run)) is not None]
        cells = [found[start : start + args.seeds] for start in range(0, len(found), args.seeds)]
        if args.ladder == "cheap":
            print(compare_with_cheap(dataset, cells), flush=True)
            continue
        every += found
        rows = [rung(dataset, cell, find_best_cheap(cells)) for cell in cells]
        print(f"\n{dataset}: cost until the validation accuracy reaches {100 * STOP_AT[dataset]:g} %\n")
        heads = ["setting", "reached", "MB", "exchanges", "CPU s", EXCESS, "MB of the whole run", "test %"]
        print(markdown(heads, rows), flush=True)
    if every:
        write_csv(args.out / "ladder.csv", every)


def write_csv(path: Path, results: Sequence[RunResult]) -> None:
    """Write one line per run: the bytes of sampling, training and validation, in total and up to the goal."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["dataset", "setting", "seed", "test_accuracy", "bytes", "bytes_to_goal"])
        for result in results:
            row, first = result.row, find_point_that_reaches(result, STOP_AT[result.row.dataset])
            moved = result.curve[-1].bytes
            until = "" if first is None else first.bytes
            writer.writerow([row.dataset, row.setting, row.seed, f"{row.test_accuracy:.6g}", moved, until])


if __name__ == "__main__":
    main()
