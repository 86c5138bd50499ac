"""Reddit, from the two files that PyG downloads: read where they lie, nothing is written beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from glasu.data.npz import UNREADABLE, read_arrays
from glasu.data.partition import WholeGraph
from glasu.data.party import Graph, Splits, compact
from glasu.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

FILES = ("reddit_data.npz", "reddit_graph.npz")
URL = "https://data.dgl.ai/dataset/reddit.zip"
PAPER_SPLIT = (0.66, 0.10, 0.24)  # 66 % train; the rest as in the public split, which has the same shares
STAND_IN = {"num_nodes": 232_965, "average_degree": 492.0, "num_features": 602, "num_classes": 41}  # for "synthetic"


def read_reddit(folder: Path) -> WholeGraph:
    """Read `reddit_data.npz` (feature, label, node_types) and `reddit_graph.npz` (a scipy matrix) from a folder.

    The splits are the public ones: node_types 1, 2, 3 train, validate, test. Time and memory are O(N d + E).
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        sizes = " ".join(f"--set data.{key}={value:g}" for key, value in STAND_IN.items() if key != "num_nodes")
        raise DataError(
            f"reddit: {' and '.join(missing)} not found in {folder}. Fetch {URL}, and unpack it into that folder, or "
            "set data.root or GLASU_DATA_ROOT to the folder above reddit/raw; for a graph of its size, use data.name = "
            f'"synthetic" with --set data.num_nodes={STAND_IN["num_nodes"]} {sizes}.'
        )
    arrays = read_arrays(folder / FILES[0])
    for key in ("feature", "label", "node_types"):
        if key not in arrays:
            raise DataError(f"{folder / FILES[0]}: has no array {key!r}; fetch it again from {URL}.")
    labels, types = arrays["label"].reshape(-1).astype(np.int64), arrays["node_types"]
    classes = tuple(str(label) for label in range(int(labels.max(initial=-1)) + 1))
    splits = Splits(*(np.flatnonzero(types == kind) for kind in (1, 2, 3)))
    graph = _read_graph(folder / FILES[1], len(labels))
    return WholeGraph(np.arange(len(labels)), compact(arrays["feature"]), graph, labels, classes, splits)


def _read_graph(path: Path, num_nodes: int) -> Graph:
    """Return the graph of a saved adjacency matrix, rows as sources; by counting, not by sorting 10^8 edges."""
    try:
        stored = sp.load_npz(path).tocoo()
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read as a scipy matrix ({error}); fetch it again from {URL}.") from None
    if stored.shape != (num_nodes, num_nodes):
        raise DataError(f"{path}: a matrix of shape {stored.shape} for {num_nodes} nodes; fetch both files from {URL}.")
    kept = stored.row != stored.col
    source, target = stored.row[kept].astype(np.int32), stored.col[kept].astype(np.int32)
    into = sp.coo_array((np.ones(len(source), bool), (target, source)), shape=stored.shape).tocsr()
    into.sum_duplicates()  # sorts the sources of each target, too
    return Graph(into.indptr.astype(np.int64), into.indices.astype(np.int32, copy=False))
