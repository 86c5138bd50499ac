"""How many bytes and exchanges does one local update cost? Do lazy, stale updates save as much as the paper says?

According to the paper, only K of L layers and one of Q updates communicate, which saves a factor of QL/K. The script
counts the encoded messages of all clients in both directions, including node sets but not evaluations.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import Literal

from departments import three_networks
from glasu.config import ModelConfig, RunConfig, TrainConfig
from glasu.data.party import PartyData
from glasu.runtime.simulation import simulate
from tables import markdown, place, show

NUM_LAYERS = 4
LAYERS = {1: (3,), 2: (1, 3), 4: (0, 1, 2, 3)}  # K -> I
STEPS = (1, 4, 16)  # values of Q
AGGREGATIONS: tuple[Literal["mean", "concat"], ...] = ("mean", "concat")
SAMPLERS: tuple[Literal["full", "shared", "neighbor"], ...] = ("full", "shared", "neighbor")


@dataclass(frozen=True)
class Cost:
    """The cost of one round."""

    tensors: float  # bytes of tensors, with headers and losses
    node_sets: float  # bytes of node sets
    exchanges: float
    first: int  # exchanges before the first round

    @property
    def total(self) -> float:
        return self.tensors + self.node_sets


def cost(
    parties: list[PartyData],
    layers: tuple[int, ...],
    steps: int,
    aggregation: Literal["mean", "concat"],
    sampler: Literal["full", "shared", "neighbor"],
    rounds: int,
) -> Cost:
    """Run some rounds and return the mean cost of one."""
    config = RunConfig(
        model=ModelConfig(
            num_layers=NUM_LAYERS, hidden=64, aggregation=aggregation, aggregation_layers=layers, dropout=0.0
        ),
        train=TrainConfig(
            num_rounds=rounds,
            num_local_steps=steps,
            batch_size=16,
            sampler=sampler,
            fanout=3,
            evaluate_every=rounds,
            prefetch=rounds // 2,
        ),
    )
    traffic = simulate(parties, config).report.traffic
    bytes_in, exchanges = traffic["by_phase"], traffic["exchanges_by_phase"]
    return Cost(
        bytes_in["training"] / rounds,
        bytes_in.get("sampling", 0) / rounds,
        exchanges["training"] / rounds,
        exchanges.get("sampling", 0),
    )


def main() -> None:
    """Print one row per aggregation, sampler and K."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer users and rounds")
    parser.add_argument("--out", type=place, help="also write the table to this Markdown file")
    args = parser.parse_args()
    users, rounds = (500, 2) if args.quick else (1500, 4)
    parties, rows = three_networks(0, users), []
    for aggregation, sampler in product(AGGREGATIONS, SAMPLERS):
        found = {
            (count, steps): cost(parties, LAYERS[count], steps, aggregation, sampler, rounds)
            for count, steps in product(LAYERS, STEPS)
        }
        whole = found[NUM_LAYERS, 1]
        for count in LAYERS:
            here = [found[count, steps] for steps in STEPS]
            updates = list(zip(here, STEPS, strict=True))
            rows.append(
                [
                    aggregation,
                    sampler,
                    f"{count}",
                    " / ".join(f"{item.total / steps / 1e3:.1f}" for item, steps in updates),
                    f"{100 * here[0].node_sets / here[0].total:.1f} %",
                    " / ".join(f"{item.exchanges / steps:.4g}" for item, steps in updates),
                    f"{here[0].first}",
                    " / ".join(f"{steps * whole.total / item.total:.1f}" for item, steps in updates),
                    " / ".join(f"{steps * whole.exchanges / item.exchanges:.0f}" for item, steps in updates),
                    " / ".join(f"{steps * NUM_LAYERS / count:.0f}" for steps in STEPS),
                ]
            )
    header = ["aggregation", "sampler", "K", "kB / update", "node sets", "exchanges / update"]
    header += ["exchanges before round 0"]
    header += ["bytes saved x", "exchanges saved x", "paper QL/K x"]
    text = (
        f"three departments, {users} users, M = 3, L = {NUM_LAYERS}, hidden 64, batch 16, fanout 3, {rounds} rounds;\n"
    )
    text += f"a / b / c: Q = {', '.join(map(str, STEPS))}; "
    text += "saved: compared with K = L and Q = 1 for the same aggregation and sampler\n\n"
    text += markdown(header, rows)
    show(text, args.out)


if __name__ == "__main__":
    main()
