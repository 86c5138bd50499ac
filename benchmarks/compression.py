"""How much accuracy is lost, and how many bytes are saved, if numbers are sent with 16 or 8 bits instead of 32?

    python benchmarks/compression.py --datasets cora,pubmed --seeds 5 --jobs 2

The modes send different tensors. Stale updates send representations. Exact gradients also send gradients. A label
owner also sends the gradient at H[L]. Runs are paired by seed: paired runs have the same data, split, initial weights
and dropout. Runs that are in the output folder are not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from glasu.config import RunConfig
from glasu.data.sources.catalog import load_parties
from glasu.experiments.plan import Run, read_settings
from glasu.experiments.reproduce import run_missing
from glasu.experiments.results import RunResult, load_result
from glasu.experiments.tables import format_spread, list_percentages
from glasu.runtime.simulation import simulate
from tables import markdown

PRECISIONS = ("fp32", "bf16", "int8")
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "stale": ("glasu-4", {}),
    "exact": ("glasu-1", {}),
    "owner": ("glasu-4", {"train": {"labels": "a"}}),
}
WIDTHS = (64, 128, 192)
ALLOWED_LOSS = 0.3  # int8 may lose this many points of accuracy
ALLOWED_SHARE = 0.27  # at widths of 128 and more, int8 tensors may have this share of the bytes of fp32 tensors


def make_config(dataset: str, mode: str, precision: str, **train: Any) -> RunConfig:
    """Return the settings of a mode on a data set. The keyword arguments change keys of [train]."""
    method, changes = MODES[mode]
    return read_settings(dataset, method).replace(**changes).replace(wire={"precision": precision}, train=train)


def runs(dataset: str, mode: str, precision: str, seeds: int, rounds: int | None) -> list[Run]:
    """Return the runs of one table row, one per seed."""
    keys = {} if rounds is None else {"num_rounds": rounds}
    configs = [make_config(dataset, mode, precision, seed=seed, **keys) for seed in range(seeds)]
    return [Run(dataset, MODES[mode][0], f"{mode} {precision}", config.train.seed, config) for config in configs]


def results_of(folder: Path, planned: Sequence[Run]) -> list[RunResult]:
    """Return the stored results."""
    return [result for run in planned if (result := load_result(folder, run)) is not None]


def row(mode: str, precision: str, results: Sequence[RunResult], exact: Sequence[RunResult]) -> list[str]:
    """Return a row of the accuracy table. It contains the mean difference from fp32 over the seeds, in points."""
    gains = [one - other for one, other in zip(list_percentages(results), list_percentages(exact), strict=True)]
    error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    share = fmean(result.row.bytes for result in results) / fmean(result.row.bytes for result in exact)
    paired = "-" if precision == "fp32" else f"{fmean(gains):+.2f} ± {error:.2f}"
    return [mode, precision, format_spread(list_percentages(results)), paired, f"{share:.3f}"]


def tensor_bytes(dataset: str, mode: str, precision: str, hidden: int) -> int:
    """Train until the first evaluation; return the tensor bytes of the rounds, of this evaluation and of the test."""
    config = make_config(dataset, mode, precision)
    config = config.replace(model={"hidden": hidden}, train={"num_rounds": config.train.evaluate_every})
    return int(simulate(load_parties(config), config).report.traffic["by_kind"]["tensor"])


def main() -> None:
    """Print the accuracies on every data set, then the tensor bytes at every width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="cora")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="number of rounds (default: as in the settings)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/compression"))
    args = parser.parse_args()
    modes = args.modes.split(",")
    for dataset in args.datasets.split(","):
        planned = {
            (mode, precision): runs(dataset, mode, precision, args.seeds, args.rounds)
            for mode in modes
            for precision in PRECISIONS
        }
        run_missing(args.out, [run for some in planned.values() for run in some], args.jobs)
        found = {cell: results_of(args.out, some) for cell, some in planned.items()}
        lines = [row(*cell, results, found[cell[0], "fp32"]) for cell, results in found.items()]
        print(f"\n{dataset}, {args.seeds} seeds; int8 may lose at most {ALLOWED_LOSS} points against fp32\n")
        print(markdown(["mode", "precision", "test %", "against fp32", "bytes"], lines), flush=True)
    dataset, lines = args.datasets.split(",")[0], []
    for mode in modes:
        for hidden in WIDTHS:
            sizes = [tensor_bytes(dataset, mode, precision, hidden) for precision in PRECISIONS]
            lines.append([mode, str(hidden), *(f"{size / sizes[0]:.4f}" for size in sizes)])
    print(f"\n{dataset}: bytes of the tensors, divided by the bytes with fp32.")
    print(f"At widths of 128 and more, at most {ALLOWED_SHARE} is allowed for int8.\n")
    print(markdown(["mode", "hidden", *PRECISIONS], lines))


if __name__ == "__main__":
    main()
