"""Does the exact gradient vanish at the rate of Theorem 1 in the paper, although training is sampled, local and stale?

The plot shows the mean over t and q of |grad L(W^{t,q}; D)|^2 as a function of TQ. Each run is one point, and its step
size is c (TQ)^-1/2. L is the sum of the clients' losses over all training nodes with all edges. Autograd computes the
gradient of L through all clients together, at some of the TQ updates. To choose them, the script divides the TQ updates
into at most 64 intervals of growing length. It measures one update of each interval and weights it by the length of the
interval. Tables show the bias and variance of the sampled gradient, and the angle between the gradient of Algorithm 1
and the exact gradient.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from departments import three_networks
from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from glasu.data.partition import draw_splits_by_fraction, partition, pool_parties
from glasu.data.party import PartyData
from glasu.model.dropout import make_no_dropout
from glasu.protocol.client import Client
from glasu.protocol.training import client_script, server_script
from glasu.runtime.inprocess import ScriptRun, open_client_map, run_together
from glasu.runtime.simulation import make_clients, make_server
from glasu.runtime.telemetry import TrafficCounter
from glasu.timing import Stopwatch
from tables import markdown

STEP = 1.0  # c; the step size is c (TQ)^-1/2 for all Q, K and M
NUM_USERS = 2000
SPLIT = (0.5, 0.1, 0.1)  # many training nodes: if the network could memorise all of them, the noise would vanish
UNSAMPLED: dict[str, Any] = {"sampler": "full", "batch_size": 0, "num_rounds": 1, "num_local_steps": 1}
LAST = 0.25  # "late" means this last fraction of a run


def base_config() -> RunConfig:
    """Return the base setting: two of three layers aggregate, four local steps per round, sampled neighbours."""
    return RunConfig(
        model=ModelConfig(
            backbone="sage",
            num_layers=3,
            hidden=16,
            aggregation_layers=(1, 2),
            dropout=0.0,
            normalization="layer",
        ),
        train=TrainConfig(
            weight_decay=0.0,
            num_local_steps=4,
            batch_size=32,
            sampler="neighbor",
            fanout=3,
            optimizer="sgd",
            evaluate_every=10**6,
        ),
    )


def build(config: RunConfig, parties: Sequence[PartyData]) -> list[Client]:
    """Make the clients with a smooth activation, because assumption A1 excludes ReLU."""
    clients = make_clients(config.replace(data={"num_clients": len(parties)}), parties)
    for client in clients:
        client.learner.model.activation = nn.functional.elu
    return clients


def run(clients: Sequence[Client]) -> None:
    """Train to the end."""
    server = make_server(clients[0].config, clients)
    running = [ScriptRun(client.name, client_script(client), client.watch) for client in clients]
    serving = ScriptRun("server", server_script(server), Stopwatch(time.perf_counter))
    run_together(serving, running, TrafficCounter())


class ExactGradient:
    """Compute the gradient of the summed loss of the clients over all training nodes, with all edges."""

    def __init__(self, config: RunConfig, parties: Sequence[PartyData]) -> None:
        self.clients = build(config, parties)
        nodes, train = np.arange(parties[0].num_nodes), self.clients[0].data.training_examples()
        targets = [nodes] * (config.model.num_layers - 1) + [train]
        self.blocks = [[client.learner.sampler.exact_block(rows) for rows in targets] for client in self.clients]
        self.features = [client.data.features(nodes) for client in self.clients]
        self.labels = self.clients[0].data.labels(train)

    def at(self, weights: Sequence[Tensor]) -> tuple[float, Tensor]:
        """Return the loss and its flat gradient at the given weights; `weights` contains one vector per client."""
        off, hidden = make_no_dropout(), list(self.features)
        models = [client.learner.model for client in self.clients]
        for model, vector in zip(models, weights, strict=True):
            vector_to_parameters(vector, model.parameters())
        for layer, blocks in enumerate(zip(*self.blocks, strict=True)):
            partials = [
                model.sublayer(layer, value, None, block, off)
                for model, value, block in zip(models, hidden, blocks, strict=True)
            ]
            shared = layer in models[0].aggregation_layers
            hidden = [torch.stack(partials).mean(dim=0)] * len(partials) if shared else list(partials)
        loss = torch.zeros(())
        for client, joint in zip(self.clients, hidden, strict=True):
            assert isinstance(joint, Tensor)
            loss = loss + nn.functional.cross_entropy(client.learner.model.classify(joint, off), self.labels)
        parameters = [parameter for model in models for parameter in model.parameters()]
        return loss.item(), torch.cat([part.ravel() for part in torch.autograd.grad(loss, parameters)])


def weights_of(clients: Sequence[Client]) -> list[Tensor]:
    """Return a copy of all weights, one vector per client."""
    return [parameters_to_vector(client.learner.model.parameters()).detach().clone() for client in clients]


def protocol_gradients(config: RunConfig, parties: Sequence[PartyData], weights: Sequence[Tensor]) -> Tensor:
    """Return the gradients that the protocol computes at fixed weights. A row contains the gradients of one round."""
    clients, rows = build(config, parties), []
    for client, vector in zip(clients, weights, strict=True):
        vector_to_parameters(vector.clone(), client.learner.model.parameters())
        found: list[Tensor] = []
        rows.append(found)

        def keep(parts: object, client: Client = client, found: list[Tensor] = found) -> None:
            found.append(torch.cat([_gradient_of(parameter) for parameter in client.learner.model.parameters()]))

        assert not client.learner.model.backbone.fused_step  # a fused SGD step leaves no gradients
        client.learner.optimizer.step = keep  # type: ignore[method-assign, assignment]
    run(clients)
    return torch.cat([torch.stack(found) for found in rows], dim=1)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return gradient.detach().ravel().clone()


@dataclass(frozen=True)
class Point:
    """One run with TQ updates: squared norms of the exact gradient, and the loss at the end."""

    updates: int  # TQ
    average: float  # mean of the squared norms over all (t, q)
    late: float  # mean of the squared norms over the last quarter of the updates
    loss: float  # training loss at the end, summed over the clients


def choose_updates(updates: int, count: int) -> tuple[list[int], NDArray[np.float64]]:
    """Choose the updates to measure, one in each of a series of growing intervals; also return the interval lengths."""
    edges = np.unique(np.rint(np.geomspace(1, updates, count)).astype(int))
    starts, ends = np.concatenate([[0], edges[:-1]]), edges
    rng = np.random.default_rng(0)
    return rng.integers(starts, ends).tolist(), (ends - starts).astype(np.float64)


def descend(config: RunConfig, parties: Sequence[PartyData], updates: int, count: int) -> tuple[Point, list[Tensor]]:
    """Train with TQ updates and measure the exact gradient; also return the weights at the last measured update."""
    rounds, step = updates // config.train.num_local_steps, STEP / math.sqrt(updates)
    config = config.replace(train={"num_rounds": rounds, "learning_rate": step})
    chosen, weight = choose_updates(updates, count)
    clients, traces = build(config, parties), []
    for client in clients:
        trace: list[Tensor] = []
        traces.append(trace)
        _record(client, set(chosen), trace)
    run(clients)
    exact = ExactGradient(config, parties)
    seen = [exact.at(weights) for weights in zip(*traces, strict=True)]
    norms = np.array([float(gradient.square().sum()) for _, gradient in seen])
    late = np.asarray(chosen) >= (1 - LAST) * updates
    average, last = (float(np.average(norms[part], weights=weight[part])) for part in (late | True, late))
    return Point(updates, average, last, seen[-1][0]), [trace[-1] for trace in traces]


def _record(client: Client, chosen: set[int], trace: list[Tensor]) -> None:
    """Record the weights before each chosen update."""
    take_step, done = client.learner.optimizer.step, 0

    def step(parts: Sequence[slice]) -> None:
        nonlocal done
        if done in chosen:
            trace.append(parameters_to_vector(client.learner.model.parameters()).detach().clone())
        done += 1
        take_step(parts)

    client.learner.optimizer.step = step  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Curve:
    """The runs of one setting. Each value of TQ has one run, which is one point of the curve."""

    num_clients: int
    layers: int  # K
    steps: int  # Q
    pooled: bool  # True: data was pooled and divided among M clients; False: the three departments are the clients
    points: list[Point]

    def slope(self, late: bool = False) -> float:
        """Return the slope of log(average) against log(TQ), or of log(late), fitted by least squares."""
        values = [point.late if late else point.average for point in self.points]
        return float(np.polyfit(np.log([point.updates for point in self.points]), np.log(values), 1)[0])


def departments(num_users: int) -> list[PartyData]:
    """Return three departments; half of the users are training nodes."""
    parties = three_networks(0, num_users)
    labels = parties[0].labels
    assert labels is not None
    splits = draw_splits_by_fraction(labels, SPLIT, 0)
    return [replace(party, splits=splits) for party in parties]


def pool_and_divide(parties: Sequence[PartyData], num_clients: int) -> list[PartyData]:
    """Pool the departments and divide columns and edges among M clients; each client has 80 % of the edges."""
    return partition(pool_parties(parties), DataConfig(num_clients=num_clients, edge_fraction=0.8), 0)


def list_last_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Return the last K layers."""
    return tuple(range(num_layers - count, num_layers))


def check_exactness(config: RunConfig, parties: Sequence[PartyData]) -> float:
    """Compare the joint gradient without sampling to autograd through all clients; return the relative difference."""
    exact = ExactGradient(config, parties)
    weights = weights_of(exact.clients)
    mine = exact.at(weights)[1]
    theirs = protocol_gradients(config.replace(train=UNSAMPLED | {"backward": "joint"}), parties, weights)[0]
    return float((mine - theirs).norm() / mine.norm())


def sampling_error(
    config: RunConfig, parties: Sequence[PartyData], weights: Sequence[Tensor], draws: int
) -> tuple[float, float, float, float]:
    """Measure how far sampled gradients are from the exact gradient.

    Returns the squared norm of the exact gradient, then three values of the sampled gradient: its squared bias, the
    standard error of the squared bias, and its variance.

    The draws use another seed, because the weights were trained on the draws of the first seed.
    """
    exact = ExactGradient(config, parties).at(weights)[1].double()
    frozen = config.replace(train={"backward": "joint", "num_local_steps": 1, "num_rounds": draws, "seed": 1})
    deviations = protocol_gradients(frozen, parties, weights).double() - exact
    variance, mean = float(deviations.var(dim=0).sum()), deviations.mean(dim=0)
    bias = float(mean.square().sum()) - variance / draws  # corrected for the finite number of draws
    error = 2 * float((deviations @ mean).std()) / math.sqrt(draws)
    return float(exact.square().sum()), bias, error, variance


def local_against_joint(
    config: RunConfig, parties: Sequence[PartyData], weights: Sequence[Tensor]
) -> tuple[float, float, float]:
    """Compare the gradient of the first step of Algorithm 1 with the exact gradient.

    Returns the cosine over all weights, the cosine over the weights below H[L], and the ratio of the norms.
    """
    exact = ExactGradient(config, parties)
    joint = exact.at(weights)[1]
    local = protocol_gradients(config.replace(train=UNSAMPLED | {"backward": "local"}), parties, weights)[0]
    below = torch.cat(
        [
            torch.full((parameter.numel(),), name.startswith("layers"))
            for client in exact.clients
            for name, parameter in client.learner.model.named_parameters()
        ]
    )
    cosine = nn.functional.cosine_similarity
    ratio = float(local.norm() / joint.norm())
    return float(cosine(local, joint, dim=0)), float(cosine(local[below], joint[below], dim=0)), ratio


COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73")  # Okabe and Ito: colour-blind readers can distinguish them
MARKERS = ("o", "s", "^", "D")


def draw(curves: Sequence[Curve], out: Path) -> None:
    """Plot the curves for each Q, K and M with the two slopes of the paper, and the late means for each Q."""
    own = [curve for curve in curves if not curve.pooled]
    middle = base_config()
    two, four = len(middle.model.aggregation_layers), middle.train.num_local_steps
    by_steps = [(f"Q = {curve.steps}", curve) for curve in own if curve.layers == two]
    by_layers = [(f"K = {curve.layers}", curve) for curve in own if curve.steps == four]
    by_clients = [(f"M = {curve.num_clients}", curve) for curve in curves if curve.pooled]
    norm = r"\|\nabla\mathcal{L}(W^{t,q};\mathcal{D})\|^2"
    panels = [
        ("Stale updates: K = 2, M = 3", by_steps, f"mean of ${norm}$", False),
        ("Lazy aggregation: Q = 4, M = 3, L = 3", by_layers, f"mean of ${norm}$", False),
        ("Clients: Q = 4, K = 2, the loss divided by M", by_clients, f"mean of ${norm}$ / $M^2$", False),
        ("As the first, but only the last quarter of each run", by_steps, f"late mean of ${norm}$", True),
    ]
    figure = Figure(figsize=(10, 7.6), layout="constrained")
    for axes, (title, lines, label, late) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for (name, curve), colour, marker in zip(
            sorted(lines, key=lambda item: item[0]), COLOURS, MARKERS, strict=False
        ):
            scale = curve.num_clients**-2 if lines is by_clients else 1.0
            updates = [point.updates for point in curve.points]
            values = [scale * (point.late if late else point.average) for point in curve.points]
            text = f"{name}   (slope {curve.slope(late):+.2f})"
            axes.loglog(updates, values, color=colour, marker=marker, markersize=5, linewidth=1.6, label=text)
        _guides(axes, [point.updates for point in lines[0][1].points])
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("TQ, updates of every client")
        axes.set_ylabel(label)
        axes.grid(True, which="major", color="0.9", linewidth=0.6)
        axes.legend(fontsize=8.5, frameon=False, loc="lower left")
    figure.suptitle("The exact gradient under sampled, local, stale training; step (TQ)$^{-1/2}$", fontsize=12.5)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def _guides(axes: Axes, updates: Sequence[int]) -> None:
    """Draw the two slopes of the paper: -1/2 in the bound of Theorem 1, and -1 in its text.

    The lines start above the first points of the curves.
    """
    low, high = axes.get_ylim()
    start, span = high * 1.3, np.array([updates[0], updates[-1]], float)
    for exponent, style, text in ((-0.5, "--", "slope −1/2 (the bound)"), (-1.0, ":", "slope −1 (the text)")):
        heights = start * (span / span[0]) ** exponent
        axes.plot(span, heights, color="0.45", linestyle=style, linewidth=1.2, label=text)
    axes.set_ylim(low * 0.12, start * 1.5)
    axes.set_xticks(updates, [str(count) for count in updates])
    axes.minorticks_off()


def main() -> None:
    """Measure, print the tables and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer settings and shorter runs, under a minute")
    parser.add_argument("--out", type=Path, help="figure (default: docs/images/convergence.png; none with --quick)")
    args = parser.parse_args()
    picture = args.out or (None if args.quick else Path("docs/images/convergence.png"))
    lengths, count, draws = ((32, 128, 384), 24, 32) if args.quick else ((32, 128, 512, 2048), 64, 1024)
    parties, base = departments(NUM_USERS), base_config()
    settings = [(3, 2, steps, False) for steps in ((1, 4) if args.quick else (1, 2, 4, 8))]
    settings += [(3, layers, 4, False) for layers in (1, 3)]
    settings += [(clients, 2, 4, True) for clients in ((1, 3) if args.quick else (1, 3, 5))]

    error = check_exactness(base, parties)
    print("exact gradient: relative difference between autograd through all clients ", end="")
    print(f"and the protocol's joint backward: {error:.1e}\n")
    curves, trained = [], {}
    for clients, layers, steps, pooled in settings:
        used = pool_and_divide(parties, clients) if pooled else parties
        config = base.replace(
            model={"aggregation_layers": list_last_layers(base.model.num_layers, layers)},
            train={"num_local_steps": steps},
        )
        points = []
        for updates in lengths:
            point, weights = descend(config, used, updates, count)
            points.append(point)
        curves.append(Curve(clients, layers, steps, pooled, points))
        if not pooled and steps == base.train.num_local_steps:
            trained[layers] = weights
        print(f"  M={clients} K={layers} Q={steps}: done", file=sys.stderr)
    header = [
        "data",
        "M",
        "K",
        "Q",
        *(f"TQ = {updates}" for updates in lengths),
        "slope",
        "late slope",
        "last loss / M",
    ]
    rows = [
        [
            "pooled" if curve.pooled else "departments",
            *(str(number) for number in (curve.num_clients, curve.layers, curve.steps)),
            *(f"{point.average:.2f}" for point in curve.points),
            f"{curve.slope():+.2f}",
            f"{curve.slope(late=True):+.2f}",
            f"{curve.points[-1].loss / curve.num_clients:.2f}",
        ]
        for curve in curves
    ]
    print("Mean squared norm of the exact gradient; slope in the paper: -1/2 in the bound, -1 in the text\n")
    print(markdown(header, rows) + "\n")

    start = weights_of(build(base, parties))
    rows = []
    for name, weights in (("initial", start), ("trained", trained[2])):
        norm, bias, error, variance = sampling_error(base, parties, weights, draws)
        ratios = [math.sqrt(max(0.0, bias) / norm), math.sqrt(variance / norm)]
        row = [name, f"{norm:.3f}", f"{bias:.3f} ± {error:.3f}", f"{variance:.2f}"]
        rows.append([*row, *(f"{ratio:.2f}" for ratio in ratios)])
    header = ["weights", "exact, squared", "bias, squared", "variance", "bias / exact", "deviation / exact"]
    print(f"Sampled against exact gradient, {draws} draws; the paper says that the sampled gradient is biased\n")
    print(markdown(header, rows) + "\n")

    rows = []
    for layers, weights in sorted(trained.items()):
        config = base.replace(model={"aggregation_layers": list_last_layers(base.model.num_layers, layers)})
        for name, used_weights in (("initial", weights_of(build(config, parties))), ("trained", weights)):
            cosine, below, ratio = local_against_joint(config, parties, used_weights)
            rows.append([f"{layers}", name, f"{cosine:.3f}", f"{below:.3f}", f"{ratio:.2f}"])
    header = ["K", "weights", "cosine", "cosine, layers only", "norm of local / exact"]
    print("Gradient of Algorithm 1 at q = 0 against the exact gradient, without sampling; ", end="")
    print("the paper assumes that they are equal\n")
    print(markdown(header, rows))
    if picture is not None:
        draw(curves, picture)


if __name__ == "__main__":
    with open_client_map():
        main()
