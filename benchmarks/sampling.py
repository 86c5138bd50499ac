"""How fast are sampling and blocks, compared with dense matrices and Python lists?

The script measures one round of all clients: it draws S_m[0..L], forms the unions of the node sets below aggregation
layers, and builds the blocks. The plain programs are those of reference.py. "Same sets" builds induced blocks from the
sets that the plain program has drawn. "lean" draws sets and builds blocks with default settings. Times are CPU time.
The programs run in alternating turns, and each ratio is the median over the turns.

With --large, the script measures one client of a graph of Reddit's size. It compares the time of all draws and blocks
of a round with the time of one dense block, which a plain program builds with a mask over all edges. There are two
dense blocks for comparison: the smallest of the round (the one of the batch) and the largest.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from glasu.config import DataConfig, RunConfig
from glasu.data.party import PartyData
from glasu.data.sources.catalog import load_parties
from glasu.data.sources.reddit import STAND_IN
from glasu.model.blocks import Draw
from glasu.model.sampler import Sampler, draw_batch, find_sampler
from glasu.runtime.inprocess import open_client_map
from paper import paper_settings
from reference import PlainRounds, by_dict, induced_block
from tables import markdown, place, show
from timing import in_turns, per_call, ratio


def lean_round(config: RunConfig, samplers: Sequence[Sampler], training: np.ndarray, index: int) -> None:
    """Draw the node sets of one round and build its blocks, without messages."""
    batch = draw_batch(config, training, index)
    sets, draws = [[batch] for _ in samplers], [[] for _ in samplers]  # type: ignore[var-annotated]
    for layer in reversed(range(config.model.num_layers)):
        drawn = [sampler.draw(own[0], index, layer) for sampler, own in zip(samplers, sets, strict=True)]
        agreed = [draw.nodes for draw in drawn]
        if layer - 1 in config.model.aggregation_layers:
            agreed = [np.unique(np.concatenate(agreed))] * len(agreed)
        for own, kept, nodes, draw in zip(sets, draws, agreed, drawn, strict=True):
            own.insert(0, nodes)
            kept.insert(0, draw)
    for sampler, own, kept in zip(samplers, sets, draws, strict=True):
        sampler.blocks(own, kept)


def induced_round(samplers: Sequence[Sampler], config: RunConfig, sets: Sequence[Sequence[np.ndarray]]) -> None:
    """Draw neighbours of the given sets, then build the induced blocks of these sets."""
    for sampler, own in zip(samplers, sets, strict=True):
        draws = [sampler.draw(own[layer + 1], 0, layer) for layer in range(config.model.num_layers)]
        sampler.blocks(own, draws)


def report(parties: Sequence[PartyData], name: str, turns: int) -> str:
    """Return the table of this benchmark."""
    lean, same = paper_settings(), paper_settings(blocks="induced")
    plain, with_dicts = PlainRounds(lean, parties), PlainRounds(lean, parties, by_dict)
    assert parties[0].splits is not None
    training, rounds = parties[0].splits.train, itertools.count()
    kind, graphs = find_sampler(lean.train), [party.graph for party in parties]
    by_default = [kind(lean, graph, index, lean.train.seed) for index, graph in enumerate(graphs)]
    induced = [kind(same, graph, index, same.train.seed) for index, graph in enumerate(graphs)]
    sets = [[np.array(nodes) for nodes in own] for own in plain.sample()]
    contenders = {
        "lean": partial(per_call, lambda: lean_round(lean, by_default, training, next(rounds)), 20),
        "same sets": partial(per_call, lambda: induced_round(induced, same, sets), 20),
        "plain": partial(per_call, lambda: plain.batches(plain.sample()), 3),
        "plain, dicts": partial(per_call, lambda: with_dicts.batches(with_dicts.sample()), 3),
    }
    found = in_turns(contenders, turns)
    rows = [
        [own, f"{1e6 * statistics.median(seconds):.0f}"]
        + [f"{ratio(found[plainly], seconds):.0f}" for plainly in ("plain", "plain, dicts")]
        for own, seconds in found.items()
    ]
    text = f"{name}, M = 3, K = 2, batch 16, fan-out 2: all clients' draws and blocks of a round, {turns} turns\n\n"
    return text + markdown(["program", "us / round", "plain x", "plain with dicts x"], rows)


def drawn_sets(config: RunConfig, sampler: Sampler, training: np.ndarray, index: int) -> list[np.ndarray]:
    """Draw the node sets of one client in a round, build its blocks and return S_m[0..L]."""
    sets, draws = [draw_batch(config, training, index)], list[Draw]()
    for layer in reversed(range(config.model.num_layers)):
        draws.insert(0, sampler.draw(sets[0], index, layer))
        sets.insert(0, draws[0].nodes)
    sampler.blocks(sets, draws)
    return sets


def large_report(party: PartyData, turns: int) -> str:
    """Return the table for one client of a large graph."""
    config, rounds = paper_settings(), itertools.count()
    sampler = find_sampler(config.train)(config, party.graph, 0, config.train.seed)
    assert party.splits is not None
    training = np.asarray(party.splits.train)
    sets = [nodes.tolist() for nodes in drawn_sets(config, sampler, training, next(rounds))]
    edges = party.graph.edge_index()
    block = partial(induced_block, edges, party.num_nodes)
    contenders = {
        "ours: all draws and blocks": partial(
            per_call, lambda: drawn_sets(config, sampler, training, next(rounds)), 20
        ),
        f"plain: one block of {len(sets[-1])} rows": partial(per_call, lambda: block(sets[-2], sets[-1]), 1),
        f"plain: one block of {len(sets[1])} rows": partial(per_call, lambda: block(sets[0], sets[1]), 1),
    }
    found = in_turns(contenders, turns)
    own = next(iter(found.values()))
    rows = [
        [name, f"{1e3 * statistics.median(seconds):.2f}", f"{ratio(seconds, own):.0f}"]
        for name, seconds in found.items()
    ]
    text = (
        f"{party.num_nodes} nodes, {party.graph.num_edges} edges of one client, batch 16, fan-out 2, {turns} turns\n\n"
    )
    return text + markdown(["program", "ms", "times ours"], rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--out", type=place, help="also write the table to this Markdown file")
    parser.add_argument("--large", type=Path, metavar="CACHE", help="a cache folder that scale.py --cache filled")
    args = parser.parse_args()
    if args.large is not None:
        os.environ["GLASU_CACHE"] = str(args.large)
        data = DataConfig(name="synthetic", num_clients=3, **STAND_IN)  # type: ignore[arg-type]
        text = large_report(load_parties(RunConfig(data=data))[0], 2 if args.quick else 5)
        show(text, args.out)
        return
    name = "cora" if os.environ.get("GLASU_DATA_ROOT") else "demo"
    text = report(load_parties(RunConfig(data=DataConfig(name=name))), name, 3 if args.quick else 15)
    show(text, args.out)


if __name__ == "__main__":
    with open_client_map():
        main()
