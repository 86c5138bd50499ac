"""Data sets as one `.npz` file: labels, sparse features, and the edges of one or several relations.

y                      class numbers, -1 if unknown; or floats to predict, NaN if unknown
relations              names of the relations
edges_<relation>       shape (2, E); each undirected edge is listed once
x_data, x_indices,     features as a CSR matrix
x_indptr, x_shape
weight_<relation>      optional: E edge weights
feature_blocks         optional: boundaries of the feature columns; each relation has one block
num_nodes              optional: number of nodes
class_names            optional: names of the classes
ids or flickr_id       optional: ids of the nodes
train_idx, ...         optional: splits, see STORED_SPLITS

No pickle is read.
"""

from __future__ import annotations

import difflib
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from glasu import registry
from glasu.data.cache.parties import read_files
from glasu.data.graph import Graph, make_undirected
from glasu.data.partition import name_client
from glasu.data.party import Labels, PartyData, Splits, are_numbers, have_labels
from glasu.data.preprocessing import Features
from glasu.data.sources import PYG_PREFIX, DataSource, RawData, find_data_root
from glasu.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from glasu.config import RunConfig
    from glasu.data.cache.store import Cache

UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)  # errors of np.load for a bad .npz file
FEATURES = ("x_data", "x_indices", "x_indptr", "x_shape")
IDS = ("ids", "flickr_id")
STORED_SPLITS = (  # names of the splits in the file, in the order of preference
    ("train_idx", "val_idx", "test_idx"),
    ("repo_train_idx", "repo_val_idx", "repo_test_idx"),
    ("train_60", "val_60", "test_60"),
)


def read_arrays(path: Path, *, without: tuple[str, ...] = ()) -> dict[str, NDArray[Any]]:
    """Return the arrays of an `.npz` file by name; refuse arrays of Python objects."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files if key not in without}
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read as .npz without pickle ({error}); fetch it again.") from None


def read_npz(path: Path) -> list[PartyData]:
    """Read a file in the format above; see `make_parties`."""
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
    labels = arrays["y"]  # PartyData converts floats to double precision
    labels = labels if are_numbers(labels) else labels.astype(np.int64)
    nodes = int(arrays["num_nodes"].item()) if "num_nodes" in arrays else len(labels)
    try:
        features = sp.csr_array(tuple(arrays[key] for key in FEATURES[:3]), shape=tuple(arrays["x_shape"].tolist()))
        features.check_format(full_check=True)
    except ValueError as error:
        raise DataError(f"{path}: x_data, x_indices, x_indptr and x_shape are not a CSR matrix ({error}).") from None
    if {len(labels), features.shape[0]} != {nodes}:
        raise DataError(f"{path}: {nodes} nodes, {len(labels)} labels and {features.shape[0]} feature rows differ.")
    graphs = []
    for name in names:
        ends, weights = arrays[f"edges_{name}"], arrays.get(f"weight_{name}")
        if ends.ndim != 2 or ends.shape[0] != 2 or (weights is not None and len(weights) != ends.shape[1]):
            raise DataError(f"{path}: edges_{name} of shape {ends.shape}; must be (2, E), with E weights or none.")
        try:
            graphs.append(make_undirected(ends, nodes, weights))
        except DataError as error:
            raise DataError(f"{path}: edges_{name}: {error}") from None
    blocks = _divide_columns(features, arrays.get("feature_blocks"), len(graphs))
    ids = next((arrays[key] for key in IDS if key in arrays), np.arange(nodes))
    classes = _find_class_names(labels, arrays.get("class_names"))
    return make_parties(ids, graphs, blocks, labels, classes, _read_splits(path, arrays, labels))


def make_parties(
    ids: NDArray[Any],
    graphs: Sequence[Graph],
    blocks: Sequence[Features],
    labels: Labels,
    classes: tuple[str, ...],
    splits: Splits | None = None,
) -> list[PartyData]:
    """Return one party per relation (a, b, c, ...), with its own feature columns.

    If there is only one relation, return the whole graph as the party "all".
    """
    names = [name_client(client) for client in range(len(graphs))] if len(graphs) > 1 else ["all"]
    return [
        PartyData(name, ids, features, graph, labels, classes, splits)
        for name, graph, features in zip(names, graphs, blocks, strict=True)
    ]


def _check_kinds(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise one DataError that lists all arrays with wrong dimensions or a wrong type of values."""
    names = np.atleast_1d(arrays["relations"]).tolist()
    checks = [
        ("y", arrays["y"].ndim == 1 and arrays["y"].dtype.kind in "iuf", "one class number or float per node"),
        ("relations", arrays["relations"].ndim <= 1 and len(set(names)) == len(names), "a list of distinct names"),
        ("x_shape", arrays["x_shape"].shape == (2,), "two numbers"),
        ("num_nodes", arrays.get("num_nodes", np.int64(0)).size == 1, "one number"),
        ("class_names", arrays.get("class_names", np.empty(0)).ndim == 1, "a list of names"),
        *((f"edges_{name}", arrays[f"edges_{name}"].dtype.kind in "iu", "integers") for name in names),
    ]
    faults = [
        f"{key} of shape {arrays[key].shape} and type {arrays[key].dtype} must be {expected}"
        for key, fits, expected in checks
        if not fits
    ]
    if faults:
        raise DataError(f"{path}: {'; '.join(faults)}.")


def _divide_columns(features: sp.csr_array, bounds: NDArray[np.integer] | None, count: int) -> tuple[Features, ...]:
    """Divide the columns at the bounds. If the bounds do not give `count` blocks, return nearly equal blocks."""
    columns = features.shape[1]
    if columns < count:
        raise DataError(f"{columns} feature columns cannot be divided among {count} relations.")
    edges = [] if bounds is None else bounds.tolist()
    rising = len(edges) == count + 1 and sorted(set(edges)) == edges and (edges[0], edges[-1]) == (0, columns)
    if not rising:
        edges = [block * columns // count for block in range(count + 1)]
    return tuple(features[:, start:stop] for start, stop in pairwise(edges))


def _find_class_names(labels: Labels, names: NDArray[Any] | None) -> tuple[str, ...]:
    """Return the class names in the file, or else the class numbers; empty for numeric labels."""
    if are_numbers(labels):
        return ()
    return tuple(map(str, range(int(labels.max(initial=-1)) + 1) if names is None else names.tolist()))


def _read_splits(path: Path, arrays: Mapping[str, NDArray[Any]], labels: Labels) -> Splits | None:
    """Return the splits in the file, without unlabelled nodes; None if the file has no splits.

    The file stores each split as a list of positions or as a mask.
    """
    for keys in STORED_SPLITS:
        if all(key in arrays for key in keys):
            parts = []
            for key in keys:
                part = arrays[key]
                is_mask = part.dtype == bool and part.shape == labels.shape
                part = np.flatnonzero(part) if is_mask else part
                inside = part.ndim == 1 and part.dtype.kind in "iu" and (not part.size or part.max() < len(labels))
                if not inside or (part.size and part.min() < 0):
                    raise DataError(f"{path}: {key} must list node positions in 0..{len(labels) - 1}, or be a mask.")
                parts.append(np.sort(part[have_labels(labels[part])]).astype(np.int64))
            return Splits(*parts)
    return None


def find_npz(root: Path, name: str) -> Path:
    """Return the path of a data set below the data root."""
    return root / name / f"{name}.npz"


def read_npz_once(path: Path, cache: Cache) -> list[PartyData]:
    """Read a file, or open its converted form."""
    return read_files(cache, {"kind": "npz"}, [path], lambda _: read_npz(path))


def _make_source(origin: str = "", per_class: int | None = None) -> DataSource:
    """Return the source of an `.npz` file below the data root. Users make this file from the files at `origin`."""

    def read(config: RunConfig, cache: Cache) -> RawData:
        name, root = config.data.name, find_data_root(config.data.root)
        path = find_npz(root, name)
        if name and Path(name).name == name and path.is_file():
            return RawData(read_npz_once(path, cache))
        if not origin:
            raise _describe_unknown_name(name, root)
        raise ConfigError(
            f"data.name={name!r}: {path} does not exist; convert {origin} to the format of docs/datasets.md."
        )

    return DataSource(read, per_class=per_class)


OWN_FILE = _make_source()
DBLP_AUTHORS = _make_source("data/dblp of the repository liun-online/HeCo (relations APA, APCPA, APTPA)", 60)
IMDB_MOVIES = _make_source("data/imdb5k.mat of the repository chenzl23/AMOGCN (relations MAM, MDM, MYM)", 60)
FACEBOOK_PAGES = _make_source("the Facebook pages of the repository benedekrozemberczki/MUSAE", 60)


def _describe_unknown_name(name: str, root: Path) -> ConfigError:
    own = sorted(path.stem for path in root.glob("*/*.npz") if path.stem == path.parent.name)
    known = list(dict.fromkeys([*registry.choices("data"), *own]))
    listed = ", ".join([*known, f"{PYG_PREFIX}Class/name for a PyG data set"])
    if not name:
        return ConfigError(f"data.name: name a data set, one of {listed}, or list folders in data.parties.")
    match = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {match[0]!r}?" if match else ";"
    return ConfigError(
        f"data.name={name!r}: no such data set{hint} known are {listed}. A file of your own goes to "
        f"{find_npz(root, name)}; {registry.EXTENSION_HINT}."
    )
