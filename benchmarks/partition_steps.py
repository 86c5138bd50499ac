"""Which step size suits each method of `glasu reproduce partitions`?

    python benchmarks/partition_steps.py --datasets cora,minesweeper

All methods try the same step sizes with the same seeds. The published tables do not use these seeds. The score is the
best score on the validation nodes; test nodes are not read. The score of "standalone" is the mean over the parties.
`ensemble` and `smooth` train in the same way as `standalone`, so they use its step size. Pooled data is the same for
every partition.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from glasu.experiments.partitions import find_undivided, list_partition_names, make_settings
from glasu.experiments.plan import DATASETS
from glasu.experiments.trial import Terms, run_trial
from tables import markdown, place, positive, show

SEED = 100
CANDIDATES = (0.003, 0.01, 0.03, 0.1)  # step sizes that each method tries
TUNED = ("standalone", "glasu", "centralized")


def list_cases(dataset: str) -> Iterator[tuple[str, str]]:
    """Yield the partitions and methods to tune. All other partitions use the step sizes of the first one."""
    for partition in [way for way in list_partition_names(dataset) if way in (find_undivided(dataset), "apart")]:
        for method in TUNED:
            if method != "centralized" or partition != "apart":
                yield partition, method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", default=",".join(DATASETS["partitions"]))
    parser.add_argument("--seeds", type=positive, default=1, help=f"seeds {SEED}..{SEED}+N-1")
    parser.add_argument("--out", type=place, help="also write the table to this file")
    args = parser.parse_args()
    rows = []
    for dataset in args.datasets.split(","):
        for partition, method in list_cases(dataset):
            config = make_settings(dataset, partition, method).replace(train={"seed": SEED})
            scores = {}
            for step in CANDIDATES:
                outcome = run_trial(Terms(config, args.seeds), {"train.learning_rate": step})
                scores[step] = -1.0 if outcome.score is None else outcome.score
                where = f"{dataset} {partition} {method} {step}"
                told = f"{where}: {scores[step]:.4f}, round {outcome.best_round}, {outcome.seconds:.1f} s"
                print(told, outcome.note, file=sys.stderr, flush=True)
            best = max(scores, key=lambda step: scores[step])
            cells = [f"{100 * scores[step]:.1f}" if scores[step] >= 0 else "failed" for step in CANDIDATES]
            rows.append([dataset, partition, method, *cells, str(best)])
    show(markdown(["data set", "partition", "method", *map(str, CANDIDATES), "best"], rows), args.out)


if __name__ == "__main__":
    main()
