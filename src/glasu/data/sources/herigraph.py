"""HeriGraph (Venice, Suzhou, Amsterdam) from its published CSV files, joined by the posts' ids.

The three files list the posts in different orders. Visual_Features.csv holds `ID`, `IO_Type` and 982 numbers. Three
blocks of these numbers are used: 0-511 (hidden layer), 515-879 (scenes), 880-981 (SUN attributes). The numbers 512-514
(faces) are not used. Attribute_Labels.csv holds `ID`, nine soft labels and `labelled`. Edge_List.csv holds the ends of
an edge in the columns `0` and `1`, and one similarity per relation. A similarity is 0 if its relation does not link the
ends. Columns are separated by tabs or by commas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from glasu.data.cache.parties import read_files
from glasu.data.graph import Graph, make_undirected
from glasu.data.sources import DataSource, RawData, Statistics, find_data_root
from glasu.data.sources.npz import find_npz, make_parties, read_npz_once
from glasu.data.table_errors import read_csv_header, refuse_unreadable
from glasu.data.tables import Table, read_table
from glasu.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from glasu.config import RunConfig
    from glasu.data.cache.store import Cache
    from glasu.data.party import PartyData

VISUAL_FILE, LABEL_FILE, EDGE_FILE = CITY_FILES = ("Visual_Features.csv", "Attribute_Labels.csv", "Edge_List.csv")
CITY_RELATIONS = ("Temporal_Similarity", "Social_Similarity", "Spatial_Similarity")
NUM_VISUAL = 982
IMAGE_BLOCKS = ((0, 512), (515, 880), (880, 982))  # blocks of visual columns, in the order of CITY_RELATIONS
NUM_CLASSES = 9
ONE_COMMIT = "take all files of a city from one commit"
HERIGRAPH_SPLIT = (0.2, 0.3, 0.5)  # fractions of the labelled nodes of each class
REPLACED = (
    "the features are a replacement made from texts and places, not the paper's image features: topology, traffic "
    "and run time are correct, but these features cannot reproduce the paper's accuracy."
)


def read_herigraph(folder: Path) -> list[PartyData]:
    """Read the three files of a city; nodes are in the order of their ids.

    Labels are the argmax of the soft labels if `labelled` is true, else -1. The similarity of a relation is the weight
    of its edges. Each relation has one block of image features: the temporal relation has the hidden layer, the social
    relation has the scenes, and the spatial relation has the attributes.
    """
    visual, ids = _read_visual(folder / VISUAL_FILE)
    order = np.argsort(np.asarray(ids), kind="stable")
    ids = ids.take(pa.array(order))
    labels, classes = _read_labels(folder / LABEL_FILE, ids)
    graphs = _read_edges(folder / EDGE_FILE, ids)
    blocks = [visual[order, start:stop] for start, stop in IMAGE_BLOCKS]
    return make_parties(np.asarray(ids), graphs, blocks, labels, classes)


def _read_visual(path: Path) -> tuple[NDArray[np.float32], Any]:
    separator, names = _read_header(path)
    values = [name for name in names if name not in ("", "Unnamed: 0", "ID", "IO_Type")]
    fits = "ID" in names and len(set(values)) == len(values) == NUM_VISUAL
    _expect(fits, path, names, f"ID, IO_Type and {NUM_VISUAL} distinct columns of image features")
    table = read_table(path, separator, ("ID", *values))
    ids = table.ids("ID").combine_chunks()
    table.refuse_duplicates("ID", ids)
    return np.stack([_read_numbers(table, name) for name in values], axis=1), ids


def _read_labels(path: Path, ids: Any) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    separator, names = _read_header(path)
    first = names.index("ID") + 1 if "ID" in names else 0
    soft, after = names[first : first + NUM_CLASSES], names[first + NUM_CLASSES : first + NUM_CLASSES + 1]
    fits = first > 0 and after == ["category"] and "labelled" in names
    _expect(fits, path, names, f"ID, then {NUM_CLASSES} soft labels, then category, and labelled")
    table = read_table(path, separator, ("ID", *soft, "labelled"))
    table.refuse_duplicates("ID", table.ids("ID"))
    rows = _find_posts(table, "ID", ids)
    if len(rows) != len(ids):
        raise DataError(f"{path}: has {len(rows)} posts, but {VISUAL_FILE} has {len(ids)}; {ONE_COMMIT}.")
    shares = np.stack([_read_numbers(table, name, np.float64) for name in soft], axis=1)
    known = np.array([value in ("True", "true", "TRUE", "1") for value in table.strings("labelled")])
    labels = np.empty(len(ids), np.int64)
    labels[rows] = np.where(known, shares.argmax(axis=1), -1)
    return labels, tuple(soft)


def _read_edges(path: Path, ids: Any) -> list[Graph]:
    separator, names = _read_header(path)
    needed = ("0", "1", *CITY_RELATIONS)
    _expect(set(needed) <= set(names), path, names, ", ".join(needed))
    table = read_table(path, separator, needed)
    ends = np.stack([_find_posts(table, name, ids) for name in needed[:2]])
    weights = (_read_numbers(table, column) for column in CITY_RELATIONS)
    return [make_undirected(ends[:, weight > 0], len(ids), weight[weight > 0]) for weight in weights]


def _read_header(path: Path) -> tuple[str, list[str]]:
    """Return the separator and the names of the columns."""
    refuse_unreadable(path)
    with path.open("rb") as file:
        line = file.readline()
    if line.startswith(b"version https://git-lfs"):
        raise DataError(f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull` and copy it again.")
    separator = "\t" if b"\t" in line else ","
    return separator, read_csv_header(path, separator)


def _expect(fits: bool, path: Path, names: list[str], what: str) -> None:
    """Raise an error unless the columns are the expected ones."""
    if not fits:
        some = ", ".join(repr(name) for name in names[:20]) + (", ..." if len(names) > 20 else "")
        raise DataError(f"{path}: must have {what}, but its {len(names)} columns are {some}.")


def _read_numbers(table: Table, name: str, dtype: Any = np.float32) -> NDArray[Any]:
    values = table.numbers(name, dtype)
    if np.isnan(values).any():
        raise table.explain(name, np.isnan(values), "is empty; fetch the file again.")
    return values


def _find_posts(table: Table, name: str, ids: Any) -> NDArray[np.int64]:
    rule = f"is a post that {VISUAL_FILE} does not have; {ONE_COMMIT}."
    return table.positions(name, ids, f"the ids in {VISUAL_FILE} are", rule)


def _make_source(city: str, nodes: int, edges: int) -> DataSource:
    """Return the source of a city. It reads the CSV files, or an `.npz` file that has other features.

    The name "venice" prefers the CSV files; "heri_venice" prefers the `.npz` file.
    """

    def read(config: RunConfig, cache: Cache) -> RawData:
        name, root = config.data.name, find_data_root(config.data.root)
        folder, stand_in = root / "heri" / city, find_npz(root, f"heri_{city.lower()}")
        files = [folder / file for file in CITY_FILES]
        absent = [file.name for file in files if not file.is_file()]
        if name == stand_in.stem and stand_in.is_file():
            return RawData(read_npz_once(stand_in, cache), f"{name}: {REPLACED}")
        if not absent:
            return RawData(read_files(cache, {"kind": "heri"}, files, lambda _: read_herigraph(folder)))
        if len(absent) == len(files) and stand_in.is_file():
            return RawData(read_npz_once(stand_in, cache), f"{name}: read from {stand_in}: {REPLACED}")
        raise DataError(
            f"{name}: {', '.join(absent)} not found in {folder}. Fetch {', '.join(CITY_FILES)} from the folder "
            f"dataset/{city} of github.com/zzbn12345/Heri_Graphs (with Git LFS) and put them there, or set "
            f"data.root or GLASU_DATA_ROOT to the folder above heri/{city}."
        )

    return DataSource(read, HERIGRAPH_SPLIT, paper=Statistics(nodes, edges, 979, NUM_CLASSES, "undirected"))


VENICE = _make_source("Venice", 2_951, 534_513)
SUZHOU = _make_source("Suzhou", 3_137, 916_496)
AMSTERDAM = _make_source("Amsterdam", 3_727, 1_271_171)
