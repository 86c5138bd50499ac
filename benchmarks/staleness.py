"""Why do stale updates lose accuracy on CiteSeer, and what helps?

    python benchmarks/staleness.py --seeds 3 --jobs 2

The script compares Q = 4 with Q = 1 and four times as many rounds. Both runs take the same number of local steps and
are evaluated after the same steps, but only the run with Q = 4 has stale updates. If staleness were the cause, Q = 4
would be worse after the same number of steps. "every 40" is the best score if only every tenth evaluation counts, that
is, one evaluation per 40 local steps. A run with Q = 4 and evaluate_every = 10 would make only these evaluations.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from glasu.config import RunConfig
from glasu.experiments.plan import Run
from glasu.experiments.reproduce import run_missing
from glasu.experiments.results import RunResult, load_result
from glasu.experiments.tables import format_spread, list_percentages
from tables import markdown

STEPS, Q = 240, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "step 0.01, no decay": {"train": {"learning_rate": 0.01, "weight_decay": 0.0}},
    "step 0.005, no decay": {"train": {"learning_rate": 0.005, "weight_decay": 0.0}},
    "step 0.005, decay 0.001": {},
    "step 0.002, decay 0.001": {"train": {"learning_rate": 0.002}},
    "step 0.005, decay 0.001, dropout 0.7": {"model": {"dropout": 0.7}},
}


def run(dataset: str, name: str, changes: dict[str, Any], steps: int, seed: int) -> Run:
    """Return a run of STEPS local steps. It takes `steps` of them per round and evaluates after every Q local steps."""
    train = {"num_rounds": STEPS // steps, "num_local_steps": steps, "evaluate_every": Q // steps, "seed": seed}
    base = RunConfig.from_dict({"data": {"name": dataset}, "train": train})
    return Run(dataset, "glasu-4", f"Q={steps} {name}", seed, base.replace(**changes))


def row(name: str, steps: int, results: list[RunResult]) -> list[str]:
    """Return the table row of one setting over all seeds."""
    curves = [result.curve for result in results]
    best = [max(point.val_accuracy for point in curve) for curve in curves]
    coarse = [max(point.val_accuracy for point in curve[9::10]) for curve in curves]
    first = [
        next(point.round for point in curve if point.val_accuracy == top) * steps
        for curve, top in zip(curves, best, strict=True)
    ]
    last = [curve[-1].val_accuracy for curve in curves]
    shares = [f"{100 * fmean(values):.1f}" for values in (best, coarse, last)]
    return [name, f"{steps}", *shares, f"{fmean(first):.0f}", format_spread(list_percentages(results))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="citeseer")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    args = parser.parse_args()
    cells = [
        (name, steps, [run(args.dataset, name, changes, steps, seed) for seed in range(args.seeds)])
        for name, changes in SETTINGS.items()
        for steps in (1, Q)
    ]
    run_missing(args.out, [item for _, _, runs in cells for item in runs], args.jobs)
    rows = []
    for name, steps, runs in cells:
        found = [load_result(args.out, item) for item in runs]
        rows.append(row(name, steps, [result for result in found if result is not None]))
    print(f"{args.dataset}, {STEPS} local steps, K = 2, validation accuracy in per cent, {args.seeds} seeds\n")
    print(markdown(["setting", "Q", "best", "every 40", "last", "best after steps", "test of the best"], rows))


if __name__ == "__main__":
    main()
