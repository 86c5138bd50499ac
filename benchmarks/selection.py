"""After a warm start, does model selection keep a joint model, or the ensemble of the models that were trained alone?

    python benchmarks/selection.py --datasets cora,citeseer,pubmed --seeds 10
    python benchmarks/selection.py --datasets dblp_authors --rounds 60 --seeds 10

The settings are those of "glasu-1" in equal_budget.py with dropout 0.5, alpha 0.2 and a warm start. Half of the steps
are warm steps. The ensemble is the average of the parties' class probabilities after the warm steps. It is evaluated on
validation nodes before the joint models, and is the selected model unless a joint model has a better score. The table
shows means over the seeds in per cent.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import glasu
from equal_budget import DATASETS, make_config, make_points
from tables import markdown, place, positive, show

METHOD = "glasu-1"


def find_warm_point(rounds: int) -> int:
    """Return the point of the search that has dropout 0.5, alpha 0.2 and a warm start."""
    wanted = {"model.dropout": 0.5, "model.alpha": 0.2}
    points = make_points(METHOD, rounds)
    return next(
        index for index, point in enumerate(points) if "train.warm_start" in point and wanted.items() <= point.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=lambda text: text.split(","), default=list(DATASETS), metavar="A,B")
    parser.add_argument("--seeds", type=positive, default=10, metavar="N", help="seeds 0..N-1")
    parser.add_argument("--rounds", type=positive, default=200, metavar="N", help="warm steps and rounds (default 200)")
    parser.add_argument("--out", type=place, metavar="FILE", help="also write the table here")
    args = parser.parse_args()
    lines = []
    for dataset in args.datasets:
        ensemble, selected, test, joint = [], [], [], 0
        for seed in range(args.seeds):
            config = make_config(dataset, METHOD, find_warm_point(args.rounds), seed, args.rounds)
            report = glasu.train(glasu.load_parties(config), config)
            assert report.warm_start is not None
            ensemble.append(report.warm_start.ensemble["accuracy"])
            selected.append(report.validation.accuracy)
            test.append(report.test.accuracy)
            joint += report.warm_start.selected == "joint"
        means = [f"{100 * fmean(scores):.1f}" for scores in (ensemble, selected, test)]
        lines.append([dataset, f"{joint} of {args.seeds}", *means])
    header = ["data set", "joint model selected", "ensemble, validation", "selected, validation", "selected, test"]
    show(markdown(header, lines), args.out)


if __name__ == "__main__":
    main()
