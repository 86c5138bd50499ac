"""Reddit, from the two files that PyG downloads: read where they lie, nothing is written beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from glasu.data.cache.workspace import Memory, Workspace, row_pieces
from glasu.data.edges import collected
from glasu.data.partition import WholeGraph
from glasu.data.party import Graph, Splits, compact
from glasu.data.sources.npz import UNREADABLE, read_arrays
from glasu.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

FILES = ("reddit_data.npz", "reddit_graph.npz")
URL = "https://data.dgl.ai/dataset/reddit.zip"
PAPER_SPLIT = (0.66, 0.10, 0.24)  # 66 % train; the rest as in the public split, which has the same shares
STAND_IN = {"num_nodes": 232_965, "average_degree": 492.0, "num_features": 602, "num_classes": 41}  # for "synthetic"


def files(folder: Path) -> list[Path]:
    """Return the two files of a folder."""
    return [folder / name for name in FILES]


def read_reddit(folder: Path, workspace: Workspace | None = None) -> WholeGraph:
    """Read `reddit_data.npz` (feature, label, node_types) and `reddit_graph.npz` (a scipy matrix) from a folder.

    The splits are the public ones: node_types 1, 2, 3 train, validate, test. The graph is made in the workspace; memory
    for the features and for the matrix as it is stored is needed besides.
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
    graph = _read_graph(folder / FILES[1], len(labels), workspace or Memory())
    return WholeGraph(np.arange(len(labels)), compact(arrays["feature"]), graph, labels, classes, splits)


def _read_graph(path: Path, num_nodes: int, workspace: Workspace) -> Graph:
    """Return the graph of a saved adjacency matrix, rows as sources."""
    try:
        source, target, shape = _read_ends(path)
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read as a scipy matrix ({error}); fetch it again from {URL}.") from None
    if shape != (num_nodes, num_nodes):
        raise DataError(f"{path}: a matrix of shape {shape} for {num_nodes} nodes; fetch both files from {URL}.")
    pieces = ((source[piece], target[piece]) for piece in row_pieces(source))
    return collected(pieces, num_nodes, len(source), workspace)


def _read_ends(path: Path) -> tuple[NDArray[np.integer], NDArray[np.integer], tuple[int, ...]]:
    """Return rows, columns and shape; of a matrix that lists its entries one by one, without reading the values."""
    with np.load(path, allow_pickle=False) as arrays:
        if "row" in arrays.files and "col" in arrays.files:
            source, target, shape = arrays["row"], arrays["col"], tuple(arrays["shape"].tolist())
            for ends, count in zip((source, target), shape, strict=True):
                if ends.dtype.kind not in "iu" or (len(ends) and (ends.min() < 0 or ends.max() >= count)):
                    raise ValueError("row or col names no row or column")
            if source.shape != target.shape:
                raise ValueError("row and col differ in length")
            return source, target, shape
    stored = sp.load_npz(path).tocoo()
    return stored.row, stored.col, stored.shape
