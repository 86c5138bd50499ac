"""How many rounds per second does one core compute, where does the time go, and does the size of the graph matter?

CPU time of one process with one torch thread, all clients and the server in it. The paper's seconds are those of
another machine; printed beside ours is what the authors' program was once seen to take on a machine like this one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from glasu.data.datasets import load_parties
from glasu.data.partition import partition, splits_per_class
from glasu.data.party import PartyData
from glasu.data.synthetic import synthetic
from glasu.protocol.actor import Batch, Client
from glasu.protocol.client import client_script
from glasu.protocol.messages import Event, RoundDone
from glasu.protocol.sampling import Sample
from glasu.protocol.server import server_script
from glasu.runtime.inprocess import one_thread_each, run_in_process
from glasu.runtime.meter import Meter
from glasu.runtime.simulation import make_clients, make_server
from glasu.timing import Stopwatch
from tables import markdown

WINDOW = 16  # rounds whose node sets are drawn together: only whole windows are timed
AUTHORS = {("cora", 2): "194"}  # ms of CPU per round of the authors' program, Q = 4; a note, not measured here
PHASES = ("sampling", "compute", "communication")


def settings(rounds: int, fanout: int) -> RunConfig:
    """K = 2, Q = 4, batch 16, hidden 192, as in the paper; evaluation is short and not timed."""
    return RunConfig(
        model=ModelConfig(hidden=192),
        train=TrainConfig(
            num_rounds=rounds,
            num_local_steps=4,
            batch_size=16,
            sampler="neighbor",
            fanout=fanout,
            evaluate_every=10**6,
            evaluate_nodes=64,
            sampled_evaluation=True,
            prefetch=WINDOW,
        ),
    )


@dataclass(frozen=True)
class Timing:
    """CPU seconds of one run's whole windows."""

    per_round: float
    rows: float  # |S_m[0]| of the first client, the mean over the rounds
    shares: dict[str, float]  # of the whole run without evaluation


def timed(parties: Sequence[PartyData], fanout: int, num_windows: int) -> Timing:
    """Train one window to warm up, then time the next ones."""
    config = settings(WINDOW * (num_windows + 1) + 1, fanout)
    watch = Stopwatch(time.process_time)
    ends: list[tuple[float, dict[str, float]]] = []

    def observe(event: Event) -> None:
        if isinstance(event, RoundDone):
            watches = [watch, *(client.watch for client in clients)]
            spent = {name: sum(each.seconds[name] for each in watches) for name in PHASES}
            ends.append((time.process_time(), spent))

    clients = make_clients(config, parties, time.process_time)
    rows = _count_rows(clients[0])
    scripts = [client_script(client) for client in clients]
    run_in_process(server_script(make_server(config, clients)), scripts, Meter(), watch, observe)
    (start, before), (stop, after) = ends[WINDOW - 1], ends[WINDOW * (num_windows + 1) - 1]
    shares = {name: (after[name] - before[name]) / (stop - start) for name in PHASES}
    per_round = (stop - start) / (WINDOW * num_windows)
    return Timing(per_round, statistics.fmean(rows), shares | {"other": 1 - sum(shares.values())})


def _count_rows(client: Client) -> list[int]:
    """Have the client note how many rows of features each round reads."""
    gather, rows = client.batch, []

    def batch(sample: Sample) -> Batch:
        rows.append(len(sample.nodes[0]))
        return gather(sample)

    client.batch = batch  # type: ignore[method-assign, assignment]
    return rows


def grown(num_nodes: int) -> list[PartyData]:
    """Return a synthetic graph divided among three clients; only its size differs, not the number of labels."""
    config = RunConfig(data=DataConfig(name="synthetic", num_nodes=num_nodes))
    whole = synthetic(config)
    assert whole.labels is not None
    splits = splits_per_class(whole.labels, 60, 64, 64, 0)
    return partition(replace(whole, splits=splits), config.data.num_clients, config.data.edge_fraction, 0)


def main() -> None:
    """Time the paper's setting, then the same on growing graphs, turn by turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller graphs")
    parser.add_argument("--out", type=Path, help="also write the tables to this Markdown file")
    args = parser.parse_args()
    repeats, num_windows, smallest = (1, 1, 5_000) if args.quick else (3, 1, 20_000)
    name = "cora" if os.environ.get("GLASU_DATA_ROOT") else "demo"
    parties = load_parties(RunConfig(data=DataConfig(name=name)))
    rows = []
    for fanout in (2,) if args.quick else (2, 3):
        best = min((timed(parties, fanout, num_windows) for _ in range(repeats)), key=lambda found: found.per_round)
        row = [f"{fanout}", f"{1e3 * best.per_round:.1f}", f"{1 / best.per_round:.1f}"]
        row += [f"{100 * share:.0f} %" for share in best.shares.values()]
        rows.append([*row, AUTHORS.get((name, fanout), "-")])
    header = ["fanout", "ms / round", "rounds / s", *PHASES, "other", "authors' program, ms"]
    text = f"{name}, M = 3, K = 2, Q = 4, batch 16, hidden 192, best of {repeats}\n\n" + markdown(header, rows) + "\n\n"

    sizes = [smallest * factor for factor in (1, 4, 16)]
    graphs = {size: grown(size) for size in sizes}
    found: dict[int, list[Timing]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size in sizes:
            found[size].append(timed(graphs[size], 2, num_windows))
    rows = []
    for size, timings in found.items():
        pairs = list(zip(timings, found[sizes[0]], strict=True))
        ratio = statistics.median(here.per_round / base.per_round for here, base in pairs)
        work = timings[0].rows / found[sizes[0]][0].rows
        best_here = min(timing.per_round for timing in timings)
        row = [f"{size}", f"{graphs[size][0].graph.num_edges}", f"{timings[0].rows:.0f}", f"{1e3 * best_here:.1f}"]
        rows.append([*row, f"{ratio:.2f}", f"{ratio / work:.2f}"])
    header = ["nodes", "edges of a client", "rows drawn", "ms / round", "ratio", "ratio per row drawn"]
    text += "synthetic, the same with fanout 2, turn by turn, median ratio; per row drawn it should be 1\n"
    text += f"(in a small graph the draws overlap more, so fewer rows are read)\n\n{markdown(header, rows)}"
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    with one_thread_each():
        main()
