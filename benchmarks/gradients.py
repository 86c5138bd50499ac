"""Which gradient should the Q local steps of a round use?

    python benchmarks/gradients.py --seeds 5            # prints the table of docs/experiments.md

The script compares five gradients. It runs the steps of all clients itself, without messages. Every step reads the
whole graph. The batch contains all training nodes, and the optimizer is Adam.

local        Q = 4: client m descends its own loss, and the others' parts are constant (Algorithm 1)
joint        Q = 1: all clients descend the sum of the losses; its gradient is g_joint
repeat       Q = 4: every step uses the g_joint of step 0
corrected    Q = 4: step q uses (g_m(W_q) - g_m(W_0)) + g_joint(W_0), where g_m is the gradient of "local"
activation   Q = 4: client m descends L_m + sum over l in I of <C_l, H_m^+[l]> / M, where C_l is the gradient at H[l+1]
             summed over all clients, minus the client's own gradient there; at step 0 the gradient of this sum is
             g_joint

The last three gradients use the dropout masks of step 0 in all steps of a round. All gradients are compared at the same
budget, which is either a number of exchanges or a CPU time. A round with K aggregation layers costs K exchanges with
"local" and 2 K exchanges with the other gradients. Every gradient trains for a fixed number of rounds, and the CPU
budget is the CPU time of the shortest of these runs. For each budget and gradient, the step size is chosen from STEPS
so that neither the next larger nor the next smaller step has a better mean validation score. "corrected" needs one more
forward pass than the other gradients, because each forward pass allows only one backward pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from glasu.data.graph import Graph
from glasu.data.party import PartyData
from glasu.data.sources.catalog import load_parties
from glasu.model.step import ForwardStep, Step
from glasu.model.task import Targets
from glasu.protocol.sampling import client_sampling
from glasu.runtime.simulation import make_clients
from tables import markdown, place, positive, show

STEPS = [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
CENTER = 0.03
EVERY = 5  # rounds between two evaluations
EXCHANGES = 240
Result = TypeVar("Result")


@dataclass(frozen=True)
class Case:
    """A data set, its partition and the settings of the runs on it."""

    data: str
    partition: str
    num_clients: int
    model: dict[str, Any]
    weight_decay: float
    score: str = "accuracy"
    # Whether to descend the mean of the losses. With Adam, this equals descending their sum with M times the decay.
    mean_of_losses: bool = False

    @property
    def name(self) -> str:
        """Return the name of the case in the table."""
        return f"{self.data} {self.partition}" + (", mean of losses" if self.mean_of_losses else "")

    def config(self, seed: int, step: float) -> RunConfig:
        """Return the settings of one training run."""
        decay = self.weight_decay * (self.num_clients if self.mean_of_losses else 1)
        train = TrainConfig(
            sampler="full", batch_size=0, learning_rate=step, weight_decay=decay, seed=seed, num_rounds=1
        )
        data = DataConfig(name=self.data, features="none")
        return RunConfig(data=data, model=ModelConfig(hidden=32, **self.model), train=train)


@dataclass(frozen=True)
class Method:
    """One of the compared gradients, and the length and cost of its runs."""

    Q: int
    rounds: int  # number of rounds that are computed
    exchanges: int = 2  # exchanges per round and aggregation layer


METHODS = {
    "local": Method(Q=4, rounds=120, exchanges=1),
    "joint": Method(Q=1, rounds=240),
    "repeat": Method(Q=4, rounds=240),
    "corrected": Method(Q=4, rounds=60),
    "activation": Method(Q=4, rounds=60),
}
GCNII = {"backbone": "gcnii", "num_layers": 4, "aggregation_layers": (1, 3), "dropout": 0.5}
SAGE = {"backbone": "sage", "num_layers": 2, "aggregation_layers": (0, 1), "dropout": 0.0}
CASES = [
    Case("cora", "features", 3, GCNII, 1e-3),
    Case("cora", "apart", 3, GCNII, 1e-3),
    Case("minesweeper", "apart", 2, SAGE, 5e-4, "ROC-AUC"),
]


def divide(case: Case, seed: int) -> list[PartyData]:
    """Return the parties. In the partition "apart", the last party has all edges; the others have the features."""
    config = case.config(seed, STEPS[0])
    if case.partition == "features":
        return load_parties(config)
    (whole,) = load_parties(config.replace(train={"method": "centralized"}))
    columns, nothing = sp.csr_array(whole.features), np.zeros((whole.num_nodes, 1), np.float32)
    none = np.empty(0, np.int64)
    edgeless = Graph.from_edges(none, none, whole.num_nodes)
    bounds = [index * columns.shape[1] // (case.num_clients - 1) for index in range(case.num_clients)]
    views: list[tuple[Any, Graph]] = [(columns[:, start:stop], edgeless) for start, stop in pairwise(bounds)]
    views.append((nothing, whole.graph))
    return [
        dataclasses.replace(whole, name="abc"[m], features=features, graph=graph, feature_names=(), checked=None)
        for m, (features, graph) in enumerate(views)
    ]


Combine = Callable[[int, list[Tensor]], list[Tensor]]  # l and a tensor per client -> a tensor per client


class Training:
    """All clients of one training run."""

    def __init__(self, case: Case, parties: list[PartyData], method: str, step: float, seed: int) -> None:
        self.case, self.method = case, method
        self.clients = make_clients(case.config(seed, step), parties)
        self.model, self.num_clients = self.clients[0].config.model, len(parties)
        self.learners = [client.learner for client in self.clients]
        batch = self.clients[0].data.find_targets(self.clients[0].data.training_examples())
        samples = [drain(client_sampling(client, [0], [batch])) for client in self.clients]
        self.batches = [own.gather(sample) for own, (sample,) in zip(self.learners, samples, strict=True)]

    def round(self, index: int) -> None:
        """Compute one round: JointInference, then Q steps."""
        others: dict[int, list[Tensor]] = {}  # layer l -> H_{-m}[l+1] of every client
        constants: dict[int, list[Tensor]] = {}  # layer l -> C_l / M of every client

        def join(layer: int, partials: list[Tensor]) -> list[Tensor]:
            mean = self._mean(partials)
            each = [own.aggregation for own in self.learners]
            others[layer] = [one.extract_others(mean, part) for one, part in zip(each, partials, strict=True)]
            return [mean] * self.num_clients

        def merge(layer: int, partials: list[Tensor]) -> list[Tensor]:
            about = zip(self.learners, others[layer], partials, strict=True)
            return [own.aggregation.merge(rest, partial) for own, rest, partial in about]

        def exact(layer: int, gradients: list[Tensor]) -> list[Tensor]:
            share = self._mean(gradients)
            constants[layer] = [share - gradient / self.num_clients for gradient in gradients]
            return [share] * self.num_clients

        def own_part(layer: int, gradients: list[Tensor]) -> list[Tensor]:
            return [gradient / self.num_clients for gradient in gradients]

        def corrected_part(layer: int, gradients: list[Tensor]) -> list[Tensor]:
            parts = zip(gradients, constants[layer], strict=True)
            return [gradient / self.num_clients + constant for gradient, constant in parts]

        steps = range(1, METHODS[self.method].Q)
        if self.method == "local":
            self._compute(index, 0, join, own_part)
            self._descend()
            for step in steps:  # each step has new dropout masks
                self._compute(index, step, merge, own_part)
                self._descend()
            return
        self._compute(index, 0, join, exact)
        found = self._gradients()
        start = found
        if self.method == "corrected":
            self._compute(index, 0, merge, own_part)
            start = self._gradients()
            self._set_gradients(found)
        self._descend()
        for _ in steps:
            if self.method == "repeat":
                self._set_gradients(found)
            elif self.method == "activation":
                self._compute(index, 0, merge, corrected_part)
            else:
                self._compute(index, 0, merge, own_part)
                now = self._gradients()
                self._set_gradients([(g - g0) + g_joint for g, g0, g_joint in zip(now, start, found, strict=True)])
            self._descend()

    def _mean(self, tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors).sum(dim=0) / self.num_clients

    def _compute(self, index: int, masks: int, combine: Combine, share: Combine) -> None:
        """Compute one forward and backward pass of every client with the dropout masks of the given local step."""
        batches = [dataclasses.replace(batch, round=index) for batch in self.batches]
        steps = [own.step(batch, masks) for own, batch in zip(self.learners, batches, strict=True)]
        hidden, gradients = self._forward(steps, combine), []
        for own, step, joint, batch in zip(self.learners, steps, hidden, batches, strict=True):
            step.begin_backward()
            gradients.append(own.loss_and_gradient(step, joint, batch)[1])
        self._backward(steps, gradients, share)

    def _forward(self, steps: Sequence[ForwardStep], combine: Combine) -> list[Tensor]:
        hidden: list[Any] = [step.encode() for step in steps]
        for layer in range(self.model.num_layers):
            about = zip(steps, hidden, strict=True)
            hidden = [drain(step.layer_in_parts(layer, own, lambda share: None)) for step, own in about]
            if layer in self.model.aggregation_layers:
                hidden = combine(layer, hidden)
        return hidden

    def _backward(self, steps: Sequence[Step], gradients: list[Any], share: Combine) -> None:
        for layer in reversed(range(self.model.num_layers)):
            if layer in self.model.aggregation_layers:
                gradients = share(layer, gradients)
            gradients = [step.backward_layer(layer, own) for step, own in zip(steps, gradients, strict=True)]
        for step, own in zip(steps, gradients, strict=True):
            step.backward_encoder(own)

    def _gradients(self) -> list[NDArray[Any]]:
        return [own.optimizer.gradients.copy() for own in self.learners]

    def _set_gradients(self, gradients: Sequence[NDArray[Any]]) -> None:
        for own, gradient in zip(self.learners, gradients, strict=True):
            own.optimizer.gradients[:] = gradient

    def _descend(self) -> None:
        for own in self.learners:
            own.optimizer.step()

    def score(self) -> tuple[float, float]:
        """Return the scores on validation and test nodes, in per cent."""
        splits, labels = self.clients[0].party.splits, self.clients[0].party.labels
        assert splits is not None
        assert labels is not None
        nodes = np.concatenate([splits.validation, splits.test])
        steps = [own.exact_inference(nodes) for own in self.learners]
        hidden = self._forward(steps, lambda layer, partials: [self._mean(partials)] * self.num_clients)
        targets = Targets.of_nodes(nodes)
        each = [own.scores(joint, targets) for own, joint in zip(self.learners, hidden, strict=True)]
        found, count = self._mean(each).numpy(), len(splits.validation)
        if not np.isfinite(found).all():
            return 0.0, 0.0
        metric = accuracy if self.case.score == "accuracy" else roc_auc
        return metric(found[:count], labels[splits.validation]), metric(found[count:], labels[splits.test])


def drain(script: Generator[Any, Any, Result]) -> Result:
    """Run a script to its end and return its result. The script must not exchange messages."""
    while True:
        try:
            next(script)
        except StopIteration as stop:
            result: Result = stop.value
            return result


def accuracy(found: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the percentage of correct predictions."""
    return 100 * float((found.argmax(axis=1) == labels).mean())


def roc_auc(found: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the area under the ROC curve of class 1, in per cent."""
    ranks, positive = rankdata(found[:, 1]), labels == 1
    count = positive.sum()
    return 100 * float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(labels) - count)))


@dataclass(frozen=True)
class Curve:
    """The scores of one training run, evaluated every EVERY rounds."""

    validation: list[float]
    test: list[float]
    seconds: list[float]  # CPU seconds of training until each evaluation

    def best(self, rounds: int) -> int:
        """Return the index of the best evaluation within a number of rounds; if tied, the first."""
        return int(np.argmax(self.validation[: rounds // EVERY]))


def train(case: Case, parties: list[PartyData], method: str, step: float, seed: int) -> Curve:
    """Train with one gradient and evaluate every EVERY rounds."""
    training, curve, spent = Training(case, parties, method, step, seed), Curve([], [], []), 0.0
    for index in range(METHODS[method].rounds):
        start = time.process_time()
        training.round(index)
        spent += time.process_time() - start
        if (index + 1) % EVERY == 0:
            validation, test = training.score()
            curve.validation.append(validation)
            curve.test.append(test)
            curve.seconds.append(spent)
    return curve


class Comparison:
    """All training runs of one case. A run whose curve is in the log is not repeated."""

    def __init__(self, case: Case, tuning_seeds: range, log: Path) -> None:
        self.case, self.tuning_seeds, self.log = case, tuning_seeds, log
        self.parties: dict[int, list[PartyData]] = {}
        self.curves: dict[tuple[str, float, int], Curve] = {}
        if log.exists():
            for line in log.read_text().splitlines():
                entry = json.loads(line)
                if entry["case"] == case.name:
                    self.curves[entry["method"], entry["step"], entry["seed"]] = Curve(**entry["curve"])

    def curve(self, method: str, step: float, seed: int) -> Curve:
        """Train with a gradient, step size and seed, or return the curve that an earlier call has logged for them."""
        name = method, step, seed
        if name not in self.curves:
            if seed not in self.parties:
                self.parties[seed] = divide(self.case, seed)
            self.curves[name] = train(self.case, self.parties[seed], *name)
            entry = {"case": self.case.name, "method": method, "step": step, "seed": seed}
            with self.log.open("a") as file:
                file.write(json.dumps({**entry, "curve": vars(self.curves[name])}) + "\n")
        return self.curves[name]

    def seconds(self, method: str) -> float:
        """Return the CPU seconds of one round of a method: the median over all training runs."""
        curves = [curve for (own, _, _), curve in self.curves.items() if own == method]
        return statistics.median(curve.seconds[-1] / METHODS[method].rounds for curve in curves)

    def rounds(self, method: str, budget: str) -> int:
        """Return the number of rounds within a budget."""
        if budget == "exchanges":
            return EXCHANGES // (METHODS[method].exchanges * len(self.case.model["aggregation_layers"]))
        known = {method for method, _, _ in self.curves}
        # The CPU budget is the CPU time of the shortest run. The runs of all other methods last at least as long.
        allowed = min(METHODS[each].rounds * self.seconds(each) for each in known)
        return round(allowed / self.seconds(method) / EVERY) * EVERY

    def choose(self, method: str, rounds: int) -> float:
        """Return a step size. Neither the next larger nor the next smaller one has a better mean validation score.

        The search starts at CENTER and moves to better neighbours: first by the score of the first tuning seed, then by
        the mean over all tuning seeds.
        """

        def score(step: float, seeds: range) -> float:
            curves = [self.curve(method, step, seed) for seed in seeds]
            return statistics.fmean(curve.validation[curve.best(rounds)] for curve in curves)

        best = CENTER
        for seeds in (self.tuning_seeds[:1], self.tuning_seeds):
            while True:
                at = STEPS.index(best)
                top = max(STEPS[max(at - 1, 0) : at + 2], key=lambda step: score(step, seeds))
                if score(top, seeds) == score(best, seeds):
                    break
                best = top
        return best


def main() -> None:
    """Print one row per case, budget and gradient."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=positive, default=5)
    parser.add_argument("--tuning-seeds", type=positive, help="choose the step on this many seeds; default: all")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[c.name for c in CASES])
    parser.add_argument("--gradients", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--mean-of-losses", action="store_true", help="descend the mean of the losses, not the sum")
    parser.add_argument(
        "--log", type=place, default=Path("gradients.jsonl"), help="file that stores the curves; later calls reuse them"
    )
    parser.add_argument("--out", type=place, help="also write the table to this Markdown file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        if case.name not in args.cases:
            continue
        case = dataclasses.replace(case, mean_of_losses=args.mean_of_losses)
        comparison = Comparison(case, range(args.tuning_seeds or args.seeds), args.log)
        for budget in ("exchanges", "CPU"):
            for method in args.gradients:
                rounds = comparison.rounds(method, budget)
                step = comparison.choose(method, rounds)
                curves = [comparison.curve(method, step, seed) for seed in range(args.seeds)]
                found = [(curve.validation[at], curve.test[at]) for curve in curves for at in [curve.best(rounds)]]
                validation, test = ([pair[index] for pair in found] for index in (0, 1))
                spread = f"{statistics.stdev(test):.1f}" if len(test) > 1 else "-"
                figures = f"{statistics.fmean(validation):.1f}", f"{statistics.fmean(test):.1f} ± {spread}"
                cost = f"{1000 * comparison.seconds(method):.0f}"
                rows.append(
                    [case.name, budget, method, str(METHODS[method].Q), str(rounds), cost, f"{step:g}", *figures]
                )
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    header = ["case", "equal", "gradient", "Q", "rounds", "CPU ms / round", "step", "validation", "test"]
    show(markdown(header, rows), args.out)


if __name__ == "__main__":
    main()
