"""How much time and memory does a graph of Reddit's size need, from its generation to the evaluation of a model?

A synthetic graph is divided among three clients in this process. Like Reddit, it has 232,965 nodes, 602 features, 41
classes and 492 edges per node. Each client has 80 % of the edges. The size of the clients' raw data is counted as 4
bytes per edge and 4 bytes per feature value. The peak is the largest resident size of the process, including the pages
of memory maps that were read. The last column splits the resident memory at the end of a step into process memory and
file pages, which the system can reclaim. The paper trains on Reddit, but reports neither memory nor seconds per round.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from glasu.data.party import PartyData
from glasu.data.sources.catalog import load_data
from glasu.data.sources.reddit import STAND_IN
from glasu.protocol.requests import Evaluated, Event, RoundDone
from glasu.runtime.simulation import SimulationOptions, simulate
from tables import markdown, place, positive, show

OPENINGS = 5


def peak_bytes() -> int:
    """Return the largest resident size of this process so far, including the pages of memory maps that were read."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resident() -> str:
    """Return the current resident memory: process memory plus file pages, or "-" if the system does not report it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return "-"
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return " + ".join(f"{int(lines[name].split()[0]) / 2**20:.2f}" for name in ("RssAnon", "RssFile"))


@dataclass(frozen=True)
class Moment:
    """A point in time, or a difference of two: wall time and CPU time in seconds."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Moment) -> Moment:
        return Moment(self.wall - start.wall, self.cpu - start.cpu)


def settings(args: argparse.Namespace) -> RunConfig:
    """Return the settings for a large graph, with one validation and one test at the end."""
    data = DataConfig(
        name="synthetic",
        num_nodes=round(args.nodes / args.part),
        average_degree=args.degree,
        num_features=args.features,
        num_classes=args.classes,
        num_clients=args.clients,
    )
    train = TrainConfig(
        num_rounds=args.rounds,
        evaluate_every=args.rounds,
        sampler="neighbor",
        batch_size=args.batch,
        fanout=args.fanout,
    )
    return RunConfig(data=data, model=ModelConfig(backbone=args.backbone), train=train)


def bytes_per_edge(parties: Sequence[PartyData]) -> float:
    """Return the bytes per edge of the clients' graphs, as stored on disk and in memory maps."""
    graphs = [party.graph for party in parties]
    return sum(graph.indptr.nbytes + graph.indices.nbytes for graph in graphs) / sum(g.num_edges for g in graphs)


def main() -> None:
    """Make the graph, open it, train and evaluate. Print the time of each step and the peak memory after it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=float, default=1, help="divide the number of nodes by this; the degree stays")
    parser.add_argument("--nodes", type=positive, default=int(STAND_IN["num_nodes"]))
    parser.add_argument("--degree", type=float, default=STAND_IN["average_degree"])
    parser.add_argument("--features", type=int, default=int(STAND_IN["num_features"]))
    parser.add_argument("--classes", type=int, default=int(STAND_IN["num_classes"]))
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batch", type=positive, default=64, help="nodes per round; GLASU's default is 512")
    parser.add_argument("--fanout", type=int, default=TrainConfig().fanout)
    parser.add_argument("--backbone", choices=["gcn", "gcnii", "gat", "sage"], default=ModelConfig().backbone)
    parser.add_argument("--cache", type=Path, help="folder that stores the graph; by default, a temporary folder")
    parser.add_argument("--out", type=place, help="also write the tables to this Markdown file")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the nodes, 20 rounds")
    args = parser.parse_args()
    if args.quick:
        args.part, args.rounds = 16, 20
    with tempfile.TemporaryDirectory(prefix="glasu-scale-") as temporary:
        os.environ["GLASU_CACHE"] = str(args.cache or temporary)
        text = measure_run(settings(args))
    show(text, args.out)


def measure_run(config: RunConfig) -> str:
    """Return the tables."""
    steps: list[tuple[str, Moment]] = []
    peaks: list[tuple[int, str]] = []

    def step(name: str, start: Moment) -> Moment:
        steps.append((name, Moment.now().since(start)))
        peaks.append((peak_bytes(), resident()))
        print(f"{name}: {steps[-1][1].wall:.1f} s, peak {peaks[-1][0] / 2**30:.2f} GiB", file=sys.stderr, flush=True)
        return Moment.now()

    start = Moment.now()
    parties = load_data(config).parties
    start = step("make, store, divide", start)
    openings = []
    for _ in range(OPENINGS):
        del parties
        before = time.perf_counter()
        parties = load_data(config).parties
        openings.append(time.perf_counter() - before)
    step("open, five times", start)

    rounds: list[Moment] = []
    evaluations: list[Moment] = []

    def observe(event: Event) -> None:
        if isinstance(event, RoundDone):
            rounds.append(Moment.now())
            if len(rounds) % 20 == 0:
                print(f"{len(rounds)} rounds, peak {peak_bytes() / 2**30:.2f} GiB", file=sys.stderr, flush=True)
        elif isinstance(event, Evaluated):
            evaluations.append(Moment.now())

    start = Moment.now()
    report = simulate(parties, config, SimulationOptions(observer=observe)).report
    step(f"train {config.train.num_rounds} rounds, evaluate twice", start)
    nodes, edges = parties[0].num_nodes, sum(party.graph.num_edges for party in parties)
    raw = 4 * edges + 4 * nodes * config.data.num_features
    undivided = round(4 * nodes * (config.data.average_degree + config.data.num_features))
    training = rounds[-2].since(rounds[0])  # the last round ends with an evaluation
    per_second = (len(rounds) - 2) / training.wall, (len(rounds) - 2) / training.cpu
    evaluation = evaluations[1].since(evaluations[0])
    tested = 0 if parties[0].splits is None else len(parties[0].splits.test)
    table = [
        [name, *(f"{part:.1f}" for part in (spent.wall, spent.cpu)), *_in_gib(peak, raw, undivided), left]
        for (name, spent), (peak, left) in zip(steps, peaks, strict=True)
    ]
    train = config.train
    figures = [
        ["opening, best and median", f"{1e3 * min(openings):.1f}, {1e3 * sorted(openings)[OPENINGS // 2]:.1f} ms"],
        ["graph on disk", f"{bytes_per_edge(parties):.3f} bytes per edge"],
        ["rounds per second, and per CPU second", f"{per_second[0]:.2f}, {per_second[1]:.2f}"],
        ["one exact evaluation", f"{evaluation.wall:.1f} s, {evaluation.cpu:.1f} CPU s ({tested} nodes)"],
        ["test accuracy", f"{100 * report.test.accuracy:.1f} %"],
    ]
    return (
        f"synthetic, {nodes} nodes, {edges} edges of {len(parties)} clients, {config.data.num_features} features, "
        f"raw data {raw / 2**30:.2f} GiB, {undivided / 2**30:.2f} GiB before the division;\n"
        f"backbone {config.model.backbone}, batch {train.batch_size}, fan-out {train.fanout}, sampler {train.sampler}, "
        f"Q = {train.num_local_steps}, hidden {config.model.hidden}, {config.model.num_layers} layers\n\n"
        + markdown(["step", "s", "CPU s", "peak, GiB", "/ raw", "/ undivided", "left: own + files, GiB"], table)
        + "\n\n"
        + markdown(["figure", "value"], figures)
    )


def _in_gib(peak: int, raw: int, undivided: int) -> list[str]:
    return [f"{peak / part:.2f}" for part in (2**30, raw, undivided)]


if __name__ == "__main__":
    main()
