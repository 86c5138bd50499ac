"""Reddit from its two published files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from glasu.data.cache.arrays import Workspace, divide_rows
from glasu.data.cache.parties import read_files
from glasu.data.graph import Graph, collect_edges
from glasu.data.party import PartyData, Splits
from glasu.data.sources import DataSource, RawData, Statistics, find_data_root
from glasu.data.sources.npz import UNREADABLE, read_arrays
from glasu.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from glasu.config import RunConfig
    from glasu.data.cache.store import Cache

RAW_FILES = ("reddit_data.npz", "reddit_graph.npz")
URL = "https://data.dgl.ai/dataset/reddit.zip"
REDDIT_SPLIT = (0.66, 0.10, 0.24)  # 66 % as in the paper; the other shares as in the public split
STAND_IN = {"num_nodes": 232_965, "average_degree": 492.0, "num_features": 602, "num_classes": 41}  # as "synthetic"


def read_reddit(folder: Path, workspace: Workspace | None = None) -> PartyData:
    """Read `reddit_data.npz` (feature, label, node_types) and `reddit_graph.npz` (a scipy matrix) from a folder.

    The result has the public splits: node_types 1, 2 and 3 mean train, validation and test. The workspace stores the
    graph. The features and the stored matrix must fit into memory.
    """
    missing = [name for name in RAW_FILES if not (folder / name).is_file()]
    if missing:
        sizes = " ".join(f"--set data.{key}={value:g}" for key, value in STAND_IN.items() if key != "num_nodes")
        raise DataError(
            f"reddit: {' and '.join(missing)} not found in {folder}. Fetch {URL} and unpack it into that folder, or "
            "set data.root or GLASU_DATA_ROOT to the folder above reddit/raw. For a graph of the same size, use "
            f'data.name = "synthetic" with --set data.num_nodes={STAND_IN["num_nodes"]} {sizes}.'
        )
    arrays = read_arrays(folder / RAW_FILES[0])
    absent = [key for key in ("feature", "label", "node_types") if key not in arrays]
    if absent:
        raise DataError(
            f"{folder / RAW_FILES[0]}: has no array {', '.join(map(repr, absent))}; fetch it again from {URL}."
        )
    labels, types = arrays["label"].reshape(-1).astype(np.int64), arrays["node_types"]
    classes = tuple(str(label) for label in range(int(labels.max(initial=-1)) + 1))
    splits = Splits(*(np.flatnonzero(types == kind) for kind in (1, 2, 3)))
    graph = _read_graph(folder / RAW_FILES[1], len(labels), workspace or Workspace())
    return PartyData("all", np.arange(len(labels)), arrays["feature"], graph, labels, classes, splits)


def _read(config: RunConfig, cache: Cache) -> RawData:
    folder = find_data_root(config.data.root) / "reddit" / "raw"
    files = [folder / name for name in RAW_FILES]
    return RawData(read_files(cache, {"kind": "reddit"}, files, lambda workspace: [read_reddit(folder, workspace)]))


REDDIT = DataSource(_read, REDDIT_SPLIT, paper=Statistics(232_965, 114_615_892, 602, 41))


def _read_graph(path: Path, num_nodes: int, workspace: Workspace) -> Graph:
    """Return the graph of a saved adjacency matrix whose rows are sources."""
    try:
        source, target, shape = _read_ends(path)
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read as a scipy matrix ({error}); fetch it again from {URL}.") from None
    if shape != (num_nodes, num_nodes):
        raise DataError(f"{path}: has a matrix of shape {shape} for {num_nodes} nodes; fetch both files from {URL}.")
    pieces = ((source[piece], target[piece]) for piece in divide_rows(source, workspace.piece_bytes))
    return collect_edges(pieces, num_nodes, len(source), workspace)


def _read_ends(path: Path) -> tuple[NDArray[np.integer], NDArray[np.integer], tuple[int, ...]]:
    """Return rows, columns and shape; the values of a COO matrix are not read."""
    with np.load(path, allow_pickle=False) as arrays:
        if "row" in arrays.files and "col" in arrays.files:
            source, target, shape = arrays["row"], arrays["col"], tuple(arrays["shape"].tolist())
            for ends, count in zip((source, target), shape, strict=True):
                if ends.dtype.kind not in "iu" or (len(ends) and (ends.min() < 0 or ends.max() >= count)):
                    raise ValueError("row or col is out of range")
            if source.shape != target.shape:
                raise ValueError("row and col differ in length")
            return source, target, shape
    matrix = sp.load_npz(path).tocoo()
    return matrix.row, matrix.col, matrix.shape
