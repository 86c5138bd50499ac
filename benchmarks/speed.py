"""How many rounds per second does one core compute, which phases take the time, and does the graph size matter?

The script measures CPU time of one process with one torch thread for all clients and the server. The paper's seconds
come from another machine. The last column of the first table is the time of the authors' program, measured once on a
similar machine.

All synthetic graphs have an average degree of at least 16, so nearly every node has more neighbours than are drawn. A
round therefore reads almost the same number of rows in a denser graph. "ratio" compares the time of a round with that
of the smallest graph, and "ratio per row drawn" compares the time of a row.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace

from glasu.config import DataConfig, RunConfig
from glasu.data.partition import draw_splits_per_class, partition
from glasu.data.party import PartyData
from glasu.data.sources.catalog import load_parties
from glasu.data.sources.synthetic import draw_graph
from glasu.runtime.inprocess import open_client_map
from paper import paper_settings
from tables import markdown, place, show
from timing import PHASES, Timing, timed_rounds

AUTHORS = {("cora", 2): "194"}  # CPU ms per round of the authors' program, Q = 4; not measured by this script
GROWTH = (1, 4, 16)
# Average degrees: DEGREE of all graphs in the table with more nodes, DENSE of the first graph in the table with more
# edges. At a lower degree than DENSE, clients often draw the same nodes.
DEGREE, DENSE = 16.0, 64.0


def draw_parties(num_nodes: int, average_degree: float) -> list[PartyData]:
    """Return a synthetic graph divided among three clients. Graphs of all sizes have the same number of labels."""
    config = RunConfig(data=DataConfig(name="synthetic", num_nodes=num_nodes, average_degree=average_degree))
    whole = draw_graph(config)
    assert whole.labels is not None
    splits = draw_splits_per_class(whole.labels, 60, 64, 64, 0)
    return partition(replace(whole, splits=splits), config.data, 0)


def growth(graphs: dict[str, list[PartyData]], repeats: int) -> str:
    """Time the same rounds on graphs of several sizes in alternating turns, and compare each with the first graph."""
    found: dict[str, list[Timing]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, parties in graphs.items():
            found[name].append(timed_rounds(parties, paper_settings()))
    base, rows = next(iter(found.values())), []
    for name, timings in found.items():
        graph, pairs = graphs[name][0].graph, list(zip(timings, base, strict=True))
        ratio = statistics.median(here.seconds / there.seconds for here, there in pairs)
        stored = (graph.indptr.nbytes + graph.indices.nbytes) / graph.num_edges
        row = [name, f"{graph.num_nodes}", f"{graph.num_edges}", f"{stored:.2f}", f"{timings[0].rows:.0f}"]
        best = min(timing.seconds for timing in timings)
        rows.append([*row, f"{1e3 * best:.1f}", f"{ratio:.2f}", f"{ratio * base[0].rows / timings[0].rows:.2f}"])
    header = ["size", "nodes", "edges", "bytes / edge", "rows drawn", "ms / round", "ratio", "ratio per row drawn"]
    return markdown(header, rows)


def main() -> None:
    """Time the paper's setting, then the same setting on graphs with more nodes and with more edges."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller graphs")
    parser.add_argument("--out", type=place, help="also write the tables to this Markdown file")
    args = parser.parse_args()
    repeats, smallest = (1, 5_000) if args.quick else (3, 20_000)
    name = "cora" if os.environ.get("GLASU_DATA_ROOT") else "demo"
    parties = load_parties(RunConfig(data=DataConfig(name=name)))
    rows = []
    for fanout in (2,) if args.quick else (2, 3):
        runs = (timed_rounds(parties, paper_settings(fanout=fanout)) for _ in range(repeats))
        best = min(runs, key=lambda found: found.seconds)
        row = [f"{fanout}", f"{1e3 * best.seconds:.1f}", f"{1 / best.seconds:.1f}"]
        row += [f"{100 * share:.0f} %" for share in best.shares.values()]
        row += [f"{best.bytes / 1e3:.0f}", f"{best.exchanges:.2f}"]
        rows.append([*row, AUTHORS.get((name, fanout), "-")])
    header = ["fanout", "ms / round", "rounds / s", *PHASES, "other", "KB", "exchanges", "authors' program, ms"]
    text = f"{name}, M = 3, K = 2, Q = 4, batch 16, hidden 192, best of {repeats}\n\n" + markdown(header, rows) + "\n\n"
    text += "synthetic graphs in the same setting with fanout 2, in alternating turns; "
    text += "ratio: time / time of the smallest graph,\nmedian; edges and bytes of one client\n"
    text += "(in a small graph the draws overlap more, so fewer rows are read)\n\n"
    more_nodes = {f"{factor} x the nodes": draw_parties(smallest * factor, DEGREE) for factor in GROWTH}
    more_edges = {f"{factor} x the edges": draw_parties(smallest, DENSE * factor) for factor in GROWTH}
    text += f"{growth(more_nodes, repeats)}\n\n{growth(more_edges, repeats)}"
    show(text, args.out)


if __name__ == "__main__":
    with open_client_map():
        main()
