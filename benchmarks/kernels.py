"""How fast are the compiled kernels, compared with the library functions that they replace?

The script measures the CPU time of one thread. A kernel and its library function run in alternating turns, in one
process. Each ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import scipy.sparse as sp
import torch

from glasu.data.graph import Graph
from glasu.model import kernels
from glasu.model.blocks import Adjacency, Block, draw_layer, draw_neighbors
from glasu.model.layers import multiply_sparse
from glasu.model.sparse import SparseRows
from glasu.randomness import split_key
from glasu.runtime.inprocess import open_client_map
from glasu.wire.encoding import SINGLE
from reference import csr
from tables import markdown, place, show
from timing import Work, in_turns, per_call, ratio

ROWS, COLUMNS, ENTRIES, WIDTH = 428, 906, 1651, 192  # size of a block in the paper's setting


def random_graph(num_nodes: int, degree: int) -> Graph:
    """Return a graph in which every node has `degree` incoming edges from random nodes."""
    rng = np.random.default_rng(0)
    gaps = rng.integers(1, num_nodes // degree, (num_nodes, degree), np.int32)
    sources = np.cumsum(gaps, axis=1, dtype=np.int32)
    return Graph(np.arange(0, degree * num_nodes + 1, degree), sources.ravel())


def make_sampling_work(graph: Graph, sampling: str) -> Work:
    """Return a function that draws four layers with fan-out 3, starting from 16 nodes, and builds the blocks."""
    adjacency = Adjacency(graph, "symmetric", SINGLE)
    draw_edges = draw_neighbors if sampling == "node" else draw_layer
    batch = np.arange(0, graph.num_nodes, graph.num_nodes // 16)[:16]

    def work() -> list[Block]:
        blocks, targets = [], batch
        for layer in range(4):
            draw = draw_edges(graph, targets, 3, layer, adjacency.labels)
            blocks.append(adjacency.block(targets, draw.nodes, draw))
            targets = draw.nodes
        return blocks

    return work


def product_of(multiply: Callable[[torch.Tensor], torch.Tensor]) -> Work:
    """Return a function that applies `multiply` to a random matrix, forward and backward."""
    dense, probe = torch.randn(COLUMNS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)

    def work() -> None:
        dense.grad = None
        multiply(dense).backward(probe)  # type: ignore[no-untyped-call]

    return work


def main() -> None:
    """Print a table of the microseconds of each kernel, and of the library's time divided by the kernel's time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--out", type=place, help="also write the table to this Markdown file")
    args = parser.parse_args()
    turns = 3 if args.quick else 15
    matrix = sp.random_array(
        (ROWS, COLUMNS), density=ENTRIES / ROWS / COLUMNS, rng=np.random.default_rng(0), format="csr", dtype=np.float32
    )
    ours = SparseRows.of(matrix)
    theirs = csr(ours)
    mask = np.empty(COLUMNS * WIDTH, np.float32)
    rows: list[list[str]] = []

    def add(what: str, work: Work, library: str = "-", other: Work | None = None, repeats: int = 20) -> None:
        contenders = [work, *([other] if other else [])]
        measures = {f"{index}": partial(per_call, each, repeats) for index, each in enumerate(contenders)}
        own, *rest = in_turns(measures, turns).values()
        times = f"{ratio(rest[0], own):.1f}" if rest else "-"
        rows.append([what, f"{1e6 * statistics.median(own):.0f}", library, times])

    product = product_of(lambda dense: multiply_sparse(ours, dense))
    add("block x rows, forward and backward", product, "torch CSR", product_of(lambda dense: theirs @ dense))
    add(
        "block x rows, forward only",
        lambda: multiply_sparse(ours, torch.zeros(COLUMNS, WIDTH)),
        "scipy",
        lambda: matrix @ np.zeros((COLUMNS, WIDTH), np.float32),
    )
    add(
        "dropout mask for the same rows",
        lambda: kernels.fill_mask(*split_key(1), np.uint8(128), np.float32(2), mask),
        "Philox",
        lambda: np.random.Philox(key=1).random_raw(len(mask) // 8).view(np.uint8) >= 128,
    )
    chosen = np.arange(0, ROWS, 2)
    add("select half of the block's rows", lambda: ours.rows(chosen), "scipy", lambda: matrix[chosen])
    for name, graph in (("2,708 nodes", random_graph(2_708, 4)), ("200,000 nodes", random_graph(200_000, 50))):
        add(f"four layers, node-wise, {name}", make_sampling_work(graph, "node"))
        add(f"four layers, layer-wise, {name}", make_sampling_work(graph, "layer"), repeats=5)
    header = ["kernel", "us", "library", "library x"]
    text = f"{ROWS} x {COLUMNS} block with {ENTRIES} entries, width {WIDTH}; four layers: batch 16, fan-out 3\n\n"
    text += markdown(header, rows)
    show(text, args.out)


if __name__ == "__main__":
    with open_client_map():
        main()
