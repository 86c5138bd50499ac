"""How accurate are runs that release representations only once, and what do row noise and randomised labels cost?

    python benchmarks/privacy.py --datasets cora --parts once,noise,labels

The runs use gcnii with four layers and `train.release = "once"`: parties train the first two layers alone, release the
output of the second layer once, and train the layers above it on the fixed aggregate. All other settings have their
defaults. Every party selects its weights on validation nodes, and no setting was chosen on test nodes.

`once` shows the bytes, the test accuracy of the averaged prediction, and the mean test accuracy of the single parties,
each with its own upper layers. `noise` shows epsilon at delta 1e-5 and clip 1, for a zeroed row (sensitivity 1) and for
a replaced row (sensitivity 2). A run releases every row once, and epsilon covers as many runs on the same data as the
column "releases" says. Class probabilities stay at the parties, so the test accuracy is the mean over the parties.
`labels` shows randomised response of the training labels. These runs have no noise on the rows, and either release
representations once or train in ordinary rounds (Q = 4).

The three baselines are the parties alone, the mean of their class probabilities (ensemble), and this mean after
propagation (smooth). Only the parties alone release nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

import glasu
from glasu.privacy.accounting import compute_epsilon, find_multiplier
from glasu.protocol.state import ClientProgress
from glasu.runtime.baselines import train_baselines
from glasu.runtime.simulation import SimulationOptions, simulate
from tables import markdown, place, positive, show

EPSILONS, RELEASES, LABEL_EPSILONS, DELTA = (1.0, 4.0, 8.0), (1, 4, 10), (None, 4.0, 3.0, 2.0, 1.0), 1e-5


def make_config(args: argparse.Namespace, dataset: str, aggregation: str, seed: int) -> glasu.RunConfig:
    """Return the settings without noise."""
    return glasu.RunConfig(
        data=glasu.DataConfig(name=dataset),
        model=glasu.ModelConfig(hidden=args.hidden, aggregation=aggregation),
        train=glasu.TrainConfig(release="once", seed=seed, num_rounds=args.rounds, evaluate_every=5),
    )


class LowerStage:
    """The trained layers below the release. A run that differs only in noise continues from them."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.progress = ClientProgress(best_weights=weights)


@dataclass
class Outcome:
    """The result of one run."""

    test: float  # accuracy of the mean prediction, or the mean accuracy if probabilities stay at the parties
    test_alone: list[float]  # accuracy of each party with its own classifier
    validation: float
    validation_alone: list[float]
    bytes: int


class Bench:
    """Train with one release. Runs that differ only in noise use the same lower stage; results are cached in files."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.cache = args, args.cache
        self.cache.mkdir(parents=True, exist_ok=True)

    def run(self, dataset: str, aggregation: str, seed: int, **privacy: float | bool) -> Outcome:
        """Train one model, or read the result of an earlier process from the cache."""
        config = make_config(self.args, dataset, aggregation, seed).replace(privacy=privacy)
        file = self.cache / f"{config.digest()}.json"
        if file.is_file():
            return Outcome(**json.loads(file.read_text()))
        name = "-".join(map(str, (dataset, aggregation, seed, privacy.get("label_epsilon"), self.args.hidden)))
        lower = self.cache / f"{name}-{self.args.rounds}.pt"
        found = torch.load(lower) if lower.is_file() else []
        options = SimulationOptions(
            trained=[LowerStage(weights) for weights in found],  # type: ignore[misc]
            checkpoints=None if found else self.cache / config.digest(),
        )
        done = simulate(glasu.load_parties(config), config, options)
        torch.save([client.progress.lower for client in done.clients], lower)
        test, validation = done.report.test, done.report.validation
        outcome = Outcome(
            test.accuracy,
            [each or 0.0 for each in test.per_client or ()],
            validation.accuracy,
            [each or 0.0 for each in validation.per_client or ()],
            done.report.traffic.total_bytes,
        )
        print(f"# {dataset} {aggregation} seed {seed} {privacy}: {outcome}", flush=True)
        file.write_text(json.dumps(asdict(outcome)))
        return outcome

    def list_baselines(self, dataset: str) -> str:
        """Return the mean test accuracy of each baseline over the seeds."""
        scores: dict[str, list[float]] = {}
        for seed in range(self.args.seeds):
            config = make_config(self.args, dataset, "mean", seed)
            file = self.cache / f"baselines-{config.digest()}.json"
            if not file.is_file():
                found = train_baselines([config], glasu.load_parties)
                accuracies = {method: each.test.accuracy for method, each in found.items() if each.test is not None}
                print(f"# {dataset} baselines seed {seed}: {accuracies}", flush=True)
                file.write_text(json.dumps(accuracies))
            for method, accuracy in json.loads(file.read_text()).items():
                scores.setdefault(method, []).append(accuracy)
        return ", ".join(f"{method} {percent(found)}" for method, found in scores.items())


def train_in_rounds(args: argparse.Namespace, dataset: str, seed: int, privacy: dict[str, float]) -> float:
    """Return the test accuracy of a run that exchanges representations in every round, with Q = 4."""
    config = glasu.RunConfig(
        data=glasu.DataConfig(name=dataset),
        model=glasu.ModelConfig(hidden=args.hidden),
        train=glasu.TrainConfig(preset="none", seed=seed, num_rounds=args.rounds, evaluate_every=5),
    )
    config = config.replace(privacy=privacy)
    return glasu.train(glasu.load_parties(config), config).test.accuracy


def percent(scores: list[float]) -> str:
    return f"{100 * fmean(scores):.1f}"


def main() -> None:
    """Train all combinations and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="cora,citeseer,pubmed")
    parser.add_argument("--aggregations", default="mean,concat")
    parser.add_argument("--parts", default="once,noise,labels")
    parser.add_argument("--hidden", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=100)
    parser.add_argument("--seeds", type=positive, default=2)
    parser.add_argument("--cache", type=Path, default=Path("privacy-results"), help="folder of finished runs")
    parser.add_argument("--out", type=place)
    args = parser.parse_args()
    bench, seeds, parts = Bench(args), range(args.seeds), args.parts.split(",")
    lines: list[str] = []
    for dataset in args.datasets.split(","):
        once, noisy = [], []
        for aggregation in args.aggregations.split(","):
            reports = [bench.run(dataset, aggregation, seed) for seed in seeds]
            size = f"{fmean(report.bytes for report in reports) / 1e6:.2f}"
            joint = percent([report.test for report in reports])
            once.append([aggregation, joint, percent([fmean(report.test_alone) for report in reports]), size])
            for epsilon in EPSILONS if "noise" in parts else ():
                for releases in RELEASES:
                    multiplier = find_multiplier(epsilon, DELTA, releases)
                    keys = {"dp_noise_multiplier": multiplier, "release_probabilities": False}
                    found = [bench.run(dataset, aggregation, seed, **keys).test for seed in seeds]
                    replaced = compute_epsilon(multiplier / releases**0.5 / 2, DELTA)
                    row = [aggregation, f"{epsilon:g}", f"{replaced:.1f}", str(releases), f"{multiplier:.2f}"]
                    noisy.append([*row, percent(found)])
        title = f"{dataset}; baselines: {bench.list_baselines(dataset)}"
        lines += [title, "", markdown(["aggregation", "mean of parties", "parties alone", "MB"], once), ""]
        header = ["aggregation", "epsilon zeroed", "epsilon replaced", "releases", "multiplier", "test"]
        lines += [markdown(header, noisy), ""] if noisy else []
        if "labels" in parts:
            rows = []
            for label_epsilon in LABEL_EPSILONS:
                keys = {} if label_epsilon is None else {"label_epsilon": label_epsilon}
                found = [bench.run(dataset, "mean", seed, **keys).test for seed in seeds]
                rounds = [train_in_rounds(args, dataset, seed, keys) for seed in seeds]
                name = "none" if label_epsilon is None else f"{label_epsilon:g}"
                rows.append([name, percent(found), percent(rounds)])
            lines += [markdown(["label epsilon", "one release", "rounds"], rows), ""]
        print("\n".join(lines), flush=True)
    show("\n".join(lines), args.out)


if __name__ == "__main__":
    main()
