"""How much time does the ledger take per round, and how much does syncing it before each message add?

The ledger of a party records its releases: the tensors, node sets, losses and metrics that the party sends. One process
trains on Cora three times: with ledgers that only count totals, with a ledger file per party, and a second time with
ledgers that only count totals, to show the measurement noise. Then the script measures one ledger entry for a release
of Cora's size. The entry is only counted in the totals, or written as a line with a digest, or written and synced. In a
run between machines, a party syncs the line before it sends the release.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from glasu.config import RunConfig
from glasu.data.sources.catalog import load_parties
from glasu.privacy.ledger import Ledger
from glasu.runtime.ledger_file import open_ledger
from glasu.runtime.simulation import SimulationOptions, simulate
from glasu.wire.message_key import Key, Phase
from tables import markdown, place, positive, show

KEY = Key(bytes(12), Phase.TRAINING, 0, 0, 1)


def train(rounds: int, folder: Path | None) -> tuple[float, float]:
    """Return the CPU and wall seconds of a training run."""
    config = RunConfig.from_dict(
        {
            "data": {"name": "cora"},
            "train": {"preset": "none", "num_rounds": rounds, "evaluate_every": rounds, "patience": 0},
        },
        "benchmark",
    )
    parties = load_parties(config)
    cpu, wall = time.process_time(), time.perf_counter()
    simulate(parties, config, SimulationOptions(ledgers=folder))
    return time.process_time() - cpu, time.perf_counter() - wall


def compare_rounds(rounds: int, root: Path) -> str:
    """Return the table of whole rounds."""
    rows = []
    train(2, None)  # this run compiles kernels and converts the data
    for name, folder in (("totals only", None), ("ledger files", root / "ledger"), ("totals only, again", None)):
        cpu, wall = train(rounds, folder)
        rows.append([name, f"{1e3 * cpu / rounds:.2f}", f"{1e3 * wall / rounds:.2f}"])
    return markdown(["in one process, three parties", "CPU ms per round", "wall ms per round"], rows)


def measure(action: Callable[[], None], times: int) -> tuple[float, float]:
    """Return the median CPU and wall milliseconds of an action."""
    cpu, wall = [], []
    for _ in range(times):
        before, start = time.process_time(), time.perf_counter()
        action()
        cpu.append(time.process_time() - before)
        wall.append(time.perf_counter() - start)
    return 1e3 * statistics.median(cpu), 1e3 * statistics.median(wall)


def compare_entries(times: int, root: Path) -> str:
    """Return the table of single entries."""
    payload = np.random.default_rng(0).standard_normal((2708, 64)).astype("<f4")

    def enter(ledger: Ledger) -> None:
        ledger.record(
            "representation", KEY, lambda: (payload,), size=payload.nbytes, rows=len(payload), columns=payload.shape[1]
        )
        ledger.sync()

    kinds = {
        "totals only": Ledger(),
        "digest and line, written": open_ledger(root / "written.jsonl", "a", durable=False),
        "digest and line, written and synced": open_ledger(root / "synced.jsonl", "a"),
    }
    rows = []
    for name, ledger in kinds.items():
        cpu, wall = measure(partial(enter, ledger), times)
        rows.append([name, f"{cpu:.3f}", f"{wall:.3f}"])
    return markdown([f"one release of {payload.nbytes:,} bytes", "CPU ms", "wall ms"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=100)
    parser.add_argument("--times", type=positive, default=200)
    parser.add_argument("--out", type=place, help="also write the tables to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        text = f"{compare_entries(args.times, Path(name))}\n\n{compare_rounds(args.rounds, Path(name))}"
    show(text, args.out)


if __name__ == "__main__":
    main()
