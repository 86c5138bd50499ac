"""Does a warm start save rounds, and how many steps does it need?

    python benchmarks/warm_start.py --dataset cora --hidden 16,64 --steps 0,50,100,200 --seeds 3

In a warm start, every party takes local steps alone before round 0. The runs have one aggregation layer (K = 1), gcnii,
100 rounds, an evaluation every 5 rounds, and defaults otherwise. The table shows means over seeds in per cent: the
validation accuracy of the ensemble and of the joint model before round 0, the joint model's validation accuracy after
5, 10 and 20 rounds, and the test accuracy of the selected model. "near" is the median number of rounds until the
validation accuracy is at most two points below the best validation accuracy of the run with the same seed but no warm
start. "ensemble selected" is the number of runs in which no joint model was better than the ensemble.
"""

from __future__ import annotations

import argparse
from statistics import fmean, median

import glasu
from tables import markdown, place, positive, show

EARLY = (5, 10, 20)
NEAR = 0.02


def run(dataset: str, hidden: int, steps: int, seed: int, rounds: int) -> glasu.RunReport:
    """Train one model."""
    config = glasu.RunConfig(
        data=glasu.DataConfig(name=dataset),
        model=glasu.ModelConfig(hidden=hidden, aggregation_layers=(3,)),
        train=glasu.TrainConfig(num_rounds=rounds, seed=seed, evaluate_every=5, warm_start=steps),
    )
    return glasu.train(glasu.load_parties(config), config)


def find_first(report: glasu.RunReport, score: float) -> int:
    """Return the number of rounds until a validation accuracy is reached; if it never is, the number of all rounds."""
    reached = [entry.round for entry in report.history if entry.metrics["accuracy"] >= score]
    return reached[0] if reached else report.config.train.num_rounds


def describe(hidden: int, steps: int, reports: list[glasu.RunReport], plain: list[glasu.RunReport]) -> list[str]:
    """Return one row of the table."""

    def validation(round_index: int) -> str:
        found = [entry.metrics["accuracy"] for own in reports for entry in own.history if entry.round == round_index]
        return f"{100 * fmean(found):.1f}" if found else ""

    warm = [report.warm_start for report in reports if report.warm_start is not None]
    near = [find_first(own, best.validation.accuracy - NEAR) for own, best in zip(reports, plain, strict=True)]
    return [
        str(hidden),
        str(steps),
        f"{100 * fmean(each.ensemble['accuracy'] for each in warm):.1f}" if warm else "",
        *map(validation, (0, *EARLY)),
        f"{median(near):g}",
        f"{sum(each.selected == 'ensemble' for each in warm)} of {len(reports)}",
        f"{100 * fmean(report.test.accuracy for report in reports):.1f}",
    ]


def main() -> None:
    """Train all combinations and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--hidden", default="16,64")
    parser.add_argument("--steps", default="0,50,100,200", help="numbers of warm steps; the first must be 0")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--rounds", type=positive, default=100)
    parser.add_argument("--out", type=place)
    args = parser.parse_args()
    rows = []
    for hidden in map(int, args.hidden.split(",")):
        plain: list[glasu.RunReport] = []
        for steps in map(int, args.steps.split(",")):
            reports = [run(args.dataset, hidden, steps, seed, args.rounds) for seed in range(args.seeds)]
            plain = plain or reports
            rows.append(describe(hidden, steps, reports, plain))
    after = [f"after {rounds}" for rounds in EARLY]
    header = ["hidden", "warm steps", "ensemble", "before round 0", *after, "near", "ensemble selected", "test"]
    show(markdown(header, rows), args.out)


if __name__ == "__main__":
    main()
