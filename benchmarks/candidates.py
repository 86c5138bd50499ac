"""Which settings should `train.preset = "auto"` try?

    python benchmarks/candidates.py --datasets cora,actor --seeds 3

Each setting trains on each data set. The data is divided as in defaults.py, but the seeds are different ones. The score
is the best validation score of the run. Test scores are not read, so the choice of candidates does not depend on them.
The table shows the mean over the seeds, and the megabytes of one run. With `--one-hot`, the features are replaced by
one column per node, and these columns are divided among the parties.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import scipy.sparse as sp

import glasu
from defaults import BINARY, DATASETS, make_config
from tables import markdown, place, positive, show

FIRST_SEED = 100
GCNII = {"backbone": "gcnii", "num_layers": 4, "aggregation_layers": (1, 3)}
SAGE = {"backbone": "sage", "num_layers": 2, "aggregation_layers": (0, 1)}
GCN = {"backbone": "gcn", "num_layers": 2, "aggregation_layers": (0, 1), "residual": True}
EXACT = {"backward": "joint", "optimizer": "adam", "num_local_steps": 1, "num_rounds": 200}
DECAY = {"weight_decay": 0.0005}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "gcnii local": {"model": GCNII},
    "gcnii local, decay": {"model": GCNII, "train": DECAY},
    "gcnii exact .01": {"model": GCNII, "train": {**EXACT, "learning_rate": 0.01}},
    "gcnii exact .03": {"model": GCNII, "train": {**EXACT, "learning_rate": 0.03}},
    "gcnii exact .03, decay": {"model": GCNII, "train": {**EXACT, **DECAY, "learning_rate": 0.03}},
    "sage local, decay": {"model": SAGE, "train": DECAY},
    "sage exact .01, decay": {"model": SAGE, "train": {**EXACT, **DECAY, "learning_rate": 0.01}},
    **{
        f"sage exact .01, decay {decay}": {
            "model": SAGE,
            "train": {**EXACT, "weight_decay": decay, "learning_rate": 0.01},
        }
        for decay in (0.002, 0.005)
    },
    **{f"gcnii local, dropout {rate}": {"model": GCNII, "train": {"party_dropout": rate}} for rate in (0.15, 0.3)},
    **{
        f"sage exact .01, decay 0.002, dropout {rate}": {
            "model": SAGE,
            "train": {**EXACT, "weight_decay": 0.002, "learning_rate": 0.01, "party_dropout": rate},
        }
        for rate in (0.15, 0.3)
    },
    "gcnii local, warm": {"model": GCNII, "train": {"warm_start": 100}},
    "sage exact .03, decay": {"model": SAGE, "train": {**EXACT, **DECAY, "learning_rate": 0.03}},
    "gcn exact .01, decay": {"model": GCN, "train": {**EXACT, **DECAY, "learning_rate": 0.01}},
}


def replace_features(parties: list[glasu.PartyData]) -> list[glasu.PartyData]:
    """Replace the features of the parties by one column per node."""
    count = parties[0].num_nodes
    columns = np.array_split(np.random.default_rng(0).permutation(count), len(parties))
    whole = sp.csc_array(sp.eye_array(count, format="csc"), dtype=np.float32)
    return [
        replace(party, features=sp.csr_array(whole[:, own]), feature_names=(), checked=None)
        for party, own in zip(parties, columns, strict=True)
    ]


def validate(dataset: str, seed: int, partition: str, name: str, *, one_hot: bool = False) -> tuple[float, float]:
    """Return the best validation score of one run, and its megabytes."""
    base, changes = make_config(dataset, seed, partition), SETTINGS[name]
    config = base.replace(model=changes["model"], train={**changes.get("train", {}), "preset": "none"})
    parties = list(glasu.load_parties(config))
    report = glasu.train(replace_features(parties) if one_hot else parties, config, workers=1)
    metric = "roc_auc" if dataset in BINARY else "accuracy"
    return report.validation.metrics[metric], report.traffic.total_bytes / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--partition", default="features", choices=("features", "apart"))
    parser.add_argument("--one-hot", action="store_true", help="replace the features by one column per node")
    parser.add_argument("--seeds", type=positive, default=3, help=f"seeds {FIRST_SEED}..{FIRST_SEED}+N-1")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="names, separated by ';'")
    parser.add_argument("--out", type=place, help="also write the table to this file")
    args = parser.parse_args()
    names = list(SETTINGS) if args.settings == ",".join(SETTINGS) else args.settings.split(";")
    rows = []
    for dataset in args.datasets.split(","):
        cells = []
        for name in names:
            found = []
            for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
                try:
                    found.append(validate(dataset, seed, args.partition, name, one_hot=args.one_hot))
                except glasu.GlasuError as error:
                    print(f"{dataset}, {name}, seed {seed}: {error}", file=sys.stderr)
            scores, sizes = ([pair[place] for pair in found] for place in (0, 1))
            cells.append(f"{100 * fmean(scores):.1f} ({fmean(sizes):.0f})" if len(found) == args.seeds else "failed")
            print(f"{dataset}, {name}: {cells[-1]}", file=sys.stderr, flush=True)
        rows.append([dataset, *cells])
    show(markdown(["data set", *(f"{name} (MB)" for name in names)], rows), args.out)


if __name__ == "__main__":
    main()
