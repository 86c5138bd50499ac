"""Which settings are best on validation? Search for the settings of `glasu reproduce`, method by method.

    python benchmarks/tune.py --datasets cora --methods glasu-4,glasu-1 --seeds 2 --jobs 2 --out runs/tune

Each search writes its best settings to src/glasu/experiments/tuned/<data set>/<method>.toml and its trials to
benchmarks/results/search/<data set>-<method>.csv. The same command resumes a search. Test nodes are not used.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path

import tomli_w

from glasu.experiments.plan import METHOD_SETTINGS, TUNED_AS, find_tuned_file
from glasu.experiments.search import SearchOptions, search

# Numbers of rounds: with one local step per round, and with four.
ROUNDS = {"cora": (100, 60), "citeseer": (100, 60), "pubmed": (80, 50)}
OTHERS = (60, 40)
SILENT = ("centralized", "standalone")  # these methods send no bytes
RESULTS = Path(__file__).parent / "results" / "search"
SPACES = Path(__file__).parent / "spaces"


def run_file(folder: Path, dataset: str, method: str, backbone: str) -> Path:
    """Write the run file with the settings that do not vary."""
    rounds = ROUNDS.get(dataset, OTHERS)[method == "glasu-4"]
    settings = {
        "data": {"name": dataset},
        "model": {"backbone": backbone},
        "train": {**METHOD_SETTINGS[method], "num_rounds": rounds, "evaluate_every": 2 if method in SILENT else 5},
    }
    path = folder / f"{dataset}-{method}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(settings))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="cora,citeseer,pubmed")
    parser.add_argument("--methods", default=",".join(name for name in METHOD_SETTINGS if name not in TUNED_AS))
    parser.add_argument("--backbone", default="gcnii")
    parser.add_argument("--space", default="settings")
    parser.add_argument("--sampler", default="grid")
    parser.add_argument("--trials", type=int)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/tune"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    for dataset in args.datasets.split(","):
        for method in args.methods.split(","):
            name = find_tuned_file(dataset, method, args.backbone).stem
            folder = args.out / f"{dataset}-{name}-{args.space}"
            print(f"{dataset} {name}", flush=True)
            options = SearchOptions(
                run_file=run_file(folder, dataset, method, args.backbone),
                out=folder,
                space=SPACES / f"{args.space}.toml",
                sampler=args.sampler,
                trials=args.trials,
                seeds=args.seeds,
                jobs=args.jobs,
            )
            result = search(options)
            print(result.summary(), flush=True)
            for source, target in (
                (result.best_file, find_tuned_file(dataset, method, args.backbone)),
                (folder / "trials.csv", RESULTS / f"{dataset}-{name}.csv"),
            ):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


if __name__ == "__main__":
    main()
