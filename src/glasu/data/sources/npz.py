"""Data sets as one `.npz` file: nodes, labels, sparse features, and the edges of one or several relations.

Keys: `y` (int, -1 where unknown), `relations` (names), `edges_<relation>` (2, E), each undirected edge once, optionally
`weight_<relation>`; `x_data`, `x_indices`, `x_indptr`, `x_shape` (features as CSR), optionally `feature_blocks` (column
boundaries, one block per relation), `num_nodes`, `class_names`, `ids` or `flickr_id`, index splits. No pickle is read.
"""

from __future__ import annotations

import zipfile
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from glasu.data.party import Features, Splits
from glasu.data.sources.multi_relational import Relations, undirected_graph
from glasu.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)  # how a file that is no good .npz fails
FEATURES = ("x_data", "x_indices", "x_indptr", "x_shape")
IDS = ("ids", "flickr_id")
SPLITS = (  # the splits that a source ships, in the order of preference
    ("train_idx", "val_idx", "test_idx"),
    ("repo_train_idx", "repo_val_idx", "repo_test_idx"),
    ("train_60", "val_60", "test_60"),
)


def read_arrays(path: Path, *, without: tuple[str, ...] = ()) -> dict[str, NDArray[Any]]:
    """Return the arrays of an `.npz` file by name; an array of Python objects is refused."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files if key not in without}
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read as .npz without pickle ({error}); fetch it again.") from None


def read_npz(path: Path) -> Relations:
    """Read a file of the format above; with several relations, each gets the block of columns of its place."""
    arrays = read_arrays(path, without=("y_soft", "y_value"))
    names = np.atleast_1d(arrays.get("relations", np.empty(0, str))).tolist()
    needed = ("y", "relations", *(f"edges_{name}" for name in names), *FEATURES)
    missing = [key for key in needed if key not in arrays]
    if missing or not names:
        what = f"has no {', '.join(missing)}" if missing else "names no relation"
        raise DataError(
            f"{path}: {what}; a graph needs labels y, relations with edges_<relation>, and {FEATURES[0]}, ..."
        )
    _check_kinds(path, arrays)
    labels = arrays["y"].astype(np.int64)
    nodes = int(arrays["num_nodes"].item()) if "num_nodes" in arrays else len(labels)
    try:
        features = sp.csr_array(tuple(arrays[key] for key in FEATURES[:3]), shape=tuple(arrays["x_shape"].tolist()))
        features.check_format(full_check=True)
    except ValueError as error:
        raise DataError(f"{path}: x_data, x_indices, x_indptr and x_shape are no CSR matrix ({error}).") from None
    if {len(labels), features.shape[0]} != {nodes}:
        raise DataError(f"{path}: {nodes} nodes, {len(labels)} labels and {features.shape[0]} feature rows differ.")
    graphs = {}
    for name in names:
        ends, weights = arrays[f"edges_{name}"], arrays.get(f"weight_{name}")
        if ends.ndim != 2 or ends.shape[0] != 2 or (weights is not None and len(weights) != ends.shape[1]):
            raise DataError(f"{path}: edges_{name} of shape {ends.shape}; needed is (2, E), with E weights if any.")
        try:
            graphs[str(name)] = undirected_graph(ends, nodes, weights)
        except DataError as error:
            raise DataError(f"{path}: edges_{name}: {error}") from None
    blocks = _blocks(features, arrays.get("feature_blocks"), len(graphs))
    ids = next((arrays[key] for key in IDS if key in arrays), np.arange(nodes))
    count = int(labels.max(initial=-1)) + 1
    classes = tuple(map(str, arrays["class_names"].tolist() if "class_names" in arrays else range(count)))
    return Relations(ids, graphs, blocks, labels, classes, _splits(path, arrays, labels))


def _check_kinds(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise DataError where an array has the wrong number of dimensions or the wrong kind of values."""
    names = np.atleast_1d(arrays["relations"]).tolist()
    checks = [
        ("y", arrays["y"].ndim == 1 and arrays["y"].dtype.kind in "iu", "one integer per node"),
        ("relations", arrays["relations"].ndim <= 1 and len(set(names)) == len(names), "a list of distinct names"),
        ("x_shape", arrays["x_shape"].shape == (2,), "two numbers"),
        ("num_nodes", arrays.get("num_nodes", np.int64(0)).size == 1, "one number"),
        ("class_names", arrays.get("class_names", np.empty(0)).ndim == 1, "a list of names"),
        *((f"edges_{name}", arrays[f"edges_{name}"].dtype.kind in "iu", "integers") for name in names),
    ]
    for key, fits, expected in checks:
        if not fits:
            raise DataError(
                f"{path}: {key} of shape {arrays[key].shape} and type {arrays[key].dtype}: must be {expected}."
            )


def _blocks(features: sp.csr_array, bounds: NDArray[np.integer] | None, count: int) -> tuple[Features, ...]:
    """Cut the columns at the bounds or, where these make another number of blocks, into nearly equal ones."""
    columns = features.shape[1]
    if columns < count:
        raise DataError(f"{columns} feature columns cannot be divided among {count} relations.")
    edges = [] if bounds is None else bounds.tolist()
    rising = len(edges) == count + 1 and sorted(set(edges)) == edges and (edges[0], edges[-1]) == (0, columns)
    if not rising:
        edges = [block * columns // count for block in range(count + 1)]
    return tuple(features[:, start:stop] for start, stop in pairwise(edges))


def _splits(path: Path, arrays: Mapping[str, NDArray[Any]], labels: NDArray[np.int64]) -> Splits | None:
    """Return the labelled nodes of the splits that came with the file, or None; positions or masks."""
    for keys in SPLITS:
        if all(key in arrays for key in keys):
            parts = []
            for key in keys:
                part = arrays[key]
                is_mask = part.dtype == bool and part.shape == labels.shape
                part = np.flatnonzero(part) if is_mask else part
                inside = part.ndim == 1 and part.dtype.kind in "iu" and (not part.size or part.max() < len(labels))
                if not inside or (part.size and part.min() < 0):
                    raise DataError(f"{path}: {key} must list node positions in 0..{len(labels) - 1}, or be a mask.")
                parts.append(np.sort(part[labels[part] >= 0]).astype(np.int64))
            return Splits(*parts)
    return None
