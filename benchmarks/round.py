"""How fast is a round, compared with plain implementations and with the peak of the machine?

The script measures the CPU time of one process with one torch thread. The implementations run in alternating turns, and
each ratio is the median over the turns. Our time covers the whole round of all parties and the server: sampling,
exchange, encoding, ledger and optimiser.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from glasu.config import DataConfig, RunConfig
from glasu.data.party import PartyData
from glasu.data.sources.catalog import load_parties
from glasu.protocol.learner import Batch
from glasu.runtime.inprocess import open_client_map
from paper import dense_twin, paper_settings
from reference import PlainRounds, PyGPasses, by_dict
from tables import markdown, place, show
from timing import Timing, in_turns, per_call, ratio, timed_rounds

METHODS: dict[int, dict[str, object]] = {1: {"backward": "joint", "num_local_steps": 1}, 4: {"num_local_steps": 4}}
PLAIN_ROUNDS = 4  # the plain program runs this many rounds per turn
HIDDEN = 192
SIZE, COPIED = 768, 2**24  # matrix size and number of copied values of the peak measurements


@dataclass(frozen=True)
class Comparison:
    """One setting: CPU seconds per round for each implementation and turn, and the timings of our rounds."""

    seconds: dict[str, list[float]]
    same: Timing  # our round with the same edges and rows as the plain one
    lean: Timing  # our round with default settings

    def times(self, other: str, own: str) -> float:
        """Return the time of another implementation divided by that of our round."""
        return ratio(self.seconds[other], self.seconds[own])


def compare(parties: Sequence[PartyData], num_local_steps: int, turns: int) -> Comparison:
    """Compare our round, with equal work and with default settings, to the plain round and to PyG's passes."""
    lean = paper_settings(optimizer="sgd", **METHODS[num_local_steps])
    same = paper_settings(optimizer="sgd", blocks="induced", **METHODS[num_local_steps])
    timings: dict[str, Timing] = {}
    dense = [dense_twin(party) for party in parties]
    plain, with_dicts = PlainRounds(lean, parties), PlainRounds(lean, parties, by_dict)

    def own(name: str, parties: Sequence[PartyData], config: RunConfig) -> Callable[[], float]:
        def measure() -> float:
            timings[name] = timed_rounds(parties, config)
            return timings[name].seconds

        return measure

    contenders = {
        "lean": own("lean", parties, lean),
        "same": own("same", dense, same),
        "plain": lambda: per_call(plain.round, PLAIN_ROUNDS),
        "dicts": lambda: per_call(with_dicts.round, PLAIN_ROUNDS),
        "lean pyg": lambda: pyg_seconds(lean, parties, timings["lean"].batches),
        "same pyg": lambda: pyg_seconds(same, parties, timings["same"].batches),
    }
    found = in_turns(contenders, turns)
    return Comparison(found, timings["same"], timings["lean"])


def pyg_seconds(config: RunConfig, parties: Sequence[PartyData], batches: Sequence[Sequence[Batch]]) -> float:
    """Return the seconds per round of PyG's passes, summed over the clients."""
    total = 0.0
    for party, own in zip(parties, batches, strict=True):
        passes = PyGPasses(config, party.num_features, len(party.classes))
        ready = iter([passes.inputs(batch) for batch in own[: PLAIN_ROUNDS + 1]])
        total += per_call(lambda passes=passes, ready=ready: passes.passes(*next(ready)), PLAIN_ROUNDS)  # type: ignore[misc]
    return total


def gemm_peak() -> float:
    """Return the floating-point operations per second of one torch thread in single precision."""
    left, right, out = (torch.randn(SIZE, SIZE) for _ in range(3))
    return 2 * SIZE**3 / per_call(lambda: torch.mm(left, right, out=out), 5)


def copy_peak() -> float:
    """Return the bytes per second that one thread reads and writes when it copies more than fits into the caches."""
    source, target = torch.zeros(COPIED), torch.zeros(COPIED)
    return 2 * 4 * COPIED / per_call(lambda: target.copy_(source), 3)


def operations(batch: Batch, hidden: int, steps: int) -> float:
    """Count the floating-point operations of a client's Q forward and backward passes of gcnii.

    A product of rows and a weight matrix is computed three times (forward, and for two gradients). A product with a
    constant matrix is computed twice.
    """
    entries = batch.features.numel() if isinstance(batch.features, torch.Tensor) else batch.features.nnz
    products = 2 * entries + 3 * hidden * sum(block.matrix.shape[0] for block in batch.blocks)
    return 2.0 * steps * hidden * (products + 2 * sum(block.matrix.nnz for block in batch.blocks))


def traffic(batch: Batch, hidden: int, steps: int) -> float:
    """Count the bytes that a client's Q passes read and write if each pass reads every value from memory once.

    A weight is read in the forward and in the backward pass. Its gradient is written and read. The step reads and
    writes the weight. For a row of a layer's input, the row is read and its gradient is written. For a row of the
    layer's output, three values are written and read again: the input of the product, the result and the gradient.
    """
    width = batch.features.shape[1]
    weights = hidden * (width + hidden * len(batch.blocks))
    rows = sum(2 * block.matrix.shape[1] + 6 * block.matrix.shape[0] for block in batch.blocks)
    return 4.0 * steps * (6 * weights + hidden * rows)


def of_the_peak(timing: Timing, count: Callable[[Batch, int, int], float], steps: int, peak: float) -> float:
    """Return the time that the counted work takes at the machine's peak, divided by the time of the round."""
    counts = [[count(batch, HIDDEN, steps) for batch in own] for own in timing.batches]
    return sum(statistics.fmean(own) for own in counts) / peak / timing.seconds


def report(parties: Sequence[PartyData], name: str, turns: int) -> str:
    """Return the tables of this benchmark."""
    peak, copied = gemm_peak(), copy_peak()
    rows, work = [], []
    for steps in METHODS:
        found = compare(parties, steps, turns)
        for label, own, timing in (("same edges and rows", "same", found.same), ("lean", "lean", found.lean)):
            milliseconds = 1e3 * statistics.median(found.seconds[own])
            row = [
                f"{steps}",
                label,
                f"{milliseconds:.1f}",
                f"{found.times('plain', own):.1f}",
                f"{found.times('dicts', own):.1f}",
            ]
            of_peaks = of_the_peak(timing, operations, steps, peak), of_the_peak(timing, traffic, steps, copied)
            rows.append(
                [*row, f"{found.times(f'{own} pyg', own):.2f}", *(f"{100 * share:.0f} %" for share in of_peaks)]
            )
            shares = [f"{100 * share:.0f} %" for share in timing.shares.values()]
            sent = [f"{timing.bytes / 1e3:.0f}", f"{timing.exchanges:.2f}"]
            work.append([f"{steps}", label, f"{timing.rows:.0f}", f"{timing.edges:.0f}", *shares, *sent])
    header = [
        "Q",
        "ours",
        "ms / round",
        "plain x",
        "plain with dicts x",
        "PyG passes x",
        "of GEMM peak",
        "of copy peak",
    ]
    text = f"{name}, M = 3, K = 2, batch 16, fan-out 2, hidden {HIDDEN}, {turns} turns; "
    text += f"the machine: {peak / 1e9:.0f} GFLOP/s, copies {copied / 1e9:.1f} GB/s\n\n{markdown(header, rows)}\n\n"
    header = ["Q", "ours", "rows", "edges", "sampling", "compute", "communication", "other", "KB / round", "exchanges"]
    return text + f"per round; rows and edges of one client\n\n{markdown(header, work)}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--out", type=place, help="also write the tables to this Markdown file")
    args = parser.parse_args()
    name = "cora" if os.environ.get("GLASU_DATA_ROOT") else "demo"
    text = report(load_parties(RunConfig(data=DataConfig(name=name))), name, 2 if args.quick else 7)
    show(text, args.out)


if __name__ == "__main__":
    with open_client_map():
        main()
