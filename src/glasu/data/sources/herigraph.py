"""HeriGraph (Venice, Suzhou, Amsterdam) from its published CSV files, joined by the posts' ids.

The three files list the posts in different orders. Visual_Features.csv holds `ID`, `IO_Type` and 982 numbers, of which
three blocks are used: 0-511 (hidden layer), 515-879 (scenes), 880-981 (SUN attributes); 512-514 describe faces.
Attribute_Labels.csv holds `ID`, nine soft labels and `labelled`. Edge_List.csv holds the ends `0` and `1` and one
similarity per relation, 0 if the relation does not link them. Columns are separated by tabs or by commas.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from glasu.data.cache.parties import read_files
from glasu.data.graph import Graph, make_undirected
from glasu.data.paths import data_root
from glasu.data.sources.multi_relational import Relations
from glasu.data.sources.npz import npz_path, read_npz_once
from glasu.data.sources.source import DataSource, RawData, Statistics
from glasu.data.table_errors import explain_csv
from glasu.data.tables import Table
from glasu.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from glasu.config import RunConfig
    from glasu.data.cache.store import Cache

VISUAL, LABELS, EDGES = FILES = ("Visual_Features.csv", "Attribute_Labels.csv", "Edge_List.csv")
RELATIONS = {"TEM": "Temporal_Similarity", "SOC": "Social_Similarity", "SPA": "Spatial_Similarity"}
NUM_VISUAL = 982
IMAGE_BLOCKS = ((0, 512), (515, 880), (880, 982))  # of the visual columns, in the order of RELATIONS
NUM_CLASSES = 9
PAPER_SPLIT = (0.2, 0.3, 0.5)  # of the labelled nodes of each class
REPLACED = (
    "the features are a replacement made from texts and places, not the paper's image features: right for topology, "
    "traffic and run time, but they cannot reproduce the paper's accuracy."
)


@dataclass(frozen=True)
class _File:
    """A CSV file whose header has been read."""

    path: Path
    separator: str
    names: list[str]

    @classmethod
    def read_header(cls, path: Path) -> _File:
        try:
            with path.open(encoding="utf-8-sig") as file:
                header = file.readline().rstrip("\r\n")
        except OSError as error:
            raise DataError(f"{path}: cannot be opened ({error.strerror}); give this user read permission.") from None
        except UnicodeDecodeError:
            raise explain_csv(path) from None
        if header.startswith("version https://git-lfs"):
            raise DataError(f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull` and copy it again.")
        separator = "\t" if "\t" in header else ","
        return cls(path, separator, [name.strip('"') for name in header.split(separator)])

    def expect(self, holds: bool, what: str) -> None:
        """Raise an error unless the columns are the expected ones."""
        if not holds:
            some = ", ".join(repr(name) for name in self.names[:20]) + (", ..." if len(self.names) > 20 else "")
            raise DataError(f"{self.path}: must have {what}, but its {len(self.names)} columns are {some}.")

    def read(self, types: dict[str, object]) -> Table:
        """Return these columns with these types; no value may be missing."""
        try:
            table = csv.read_csv(
                self.path,
                parse_options=csv.ParseOptions(delimiter=self.separator),
                convert_options=csv.ConvertOptions(column_types=types, include_columns=list(types)),
            )
        except (pa.ArrowException, OSError) as error:
            column = re.search(r"In CSV column #(\d+)", str(error))  # the rest of the message quotes the value
            if column is None:
                raise explain_csv(self.path, self.separator) from None
            name = self.names[int(column[1])]
            raise DataError(
                f"{self.path}: column {name!r}: a value is not of type {types[name]}; fetch the file again."
            ) from None
        found = Table(self.path, dict(zip(table.column_names, table.columns, strict=True)), table.num_rows)
        for name, column in found.columns.items():
            if column.null_count:
                raise found.explain(name, np.asarray(pc.is_null(column)), "is empty; fetch the file again.")
        return found


def read_herigraph(folder: Path) -> Relations:
    """Read the three files of a city; nodes are in the order of their ids.

    Labels are the argmax of the soft labels if `labelled` is true, else -1. The edges of a relation are weighted by its
    similarity, and each relation has one block of image features: temporal and hidden layer, social and scenes,
    spatial and attributes.
    """
    visual, ids = _read_visual(folder / VISUAL)
    order = np.argsort(np.asarray(ids), kind="stable")
    ids = ids.take(pa.array(order))
    labels, classes = _read_labels(folder / LABELS, ids)
    return Relations(
        np.asarray(ids),
        _read_edges(folder / EDGES, ids),
        tuple(visual[order, start:stop] for start, stop in IMAGE_BLOCKS),
        labels,
        classes,
    )


def _read_visual(path: Path) -> tuple[NDArray[np.float32], Any]:
    file = _File.read_header(path)
    values = [name for name in file.names if name not in ("", "Unnamed: 0", "ID", "IO_Type")]
    distinct = len(set(values)) == len(values) == NUM_VISUAL
    file.expect("ID" in file.names and distinct, f"ID, IO_Type and {NUM_VISUAL} distinct columns of image features")
    table = file.read({"ID": pa.string(), **dict.fromkeys(values, pa.float32())})
    features = np.stack([np.asarray(table.column(name), np.float32) for name in values], axis=1)
    return features, _distinct_ids(table)


def _read_labels(path: Path, ids: Any) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    file = _File.read_header(path)
    first = file.names.index("ID") + 1 if "ID" in file.names else 0
    soft = file.names[first : first + NUM_CLASSES]
    ends = file.names[first + NUM_CLASSES : first + NUM_CLASSES + 1] == ["category"]
    file.expect(
        first > 0 and ends and "labelled" in file.names,
        f"ID, then {NUM_CLASSES} soft labels, then category, and labelled",
    )
    table = file.read({"ID": pa.string(), **dict.fromkeys(soft, pa.float64()), "labelled": pa.bool_()})
    own = pc.cast(_distinct_ids(table), pa.string())
    rows = np.asarray(pc.index_in(pc.cast(ids, pa.string()), value_set=own).fill_null(-1))
    if (rows < 0).any() or table.num_rows != len(ids):
        raise DataError(
            f"{path}: its ids differ from those of {VISUAL}: {table.num_rows} ids against {len(ids)}, "
            f"{int((rows >= 0).sum())} in common; take all files of a city from one commit."
        )
    shares = np.stack([np.asarray(table.column(name)) for name in soft], axis=1)[rows]
    known = np.asarray(table.column("labelled"))[rows]
    return np.where(known, shares.argmax(axis=1), -1).astype(np.int64), tuple(soft)


def _read_edges(path: Path, ids: Any) -> dict[str, Graph]:
    file = _File.read_header(path)
    needed = ("0", "1", *RELATIONS.values())
    file.expect(set(needed) <= set(file.names), ", ".join(needed))
    table = file.read({"0": pa.string(), "1": pa.string(), **dict.fromkeys(needed[2:], pa.float32())})
    ends = np.stack([_find_positions(table, name, ids) for name in needed[:2]])
    graphs = {}
    for relation, column in RELATIONS.items():
        weights = np.asarray(table.column(column))
        graphs[relation] = make_undirected(ends[:, weights > 0], len(ids), weights[weights > 0])
    return graphs


def _find_positions(table: Table, name: str, ids: Any) -> NDArray[np.int64]:
    """Return the position of each id of a column in the list of nodes."""
    column = table.ids(name, "string").combine_chunks()
    found = np.asarray(pc.index_in(column, value_set=pc.cast(ids, pa.string())).fill_null(-1), np.int64)
    if (found < 0).any():
        raise table.explain(name, found < 0, f"is a post that {VISUAL} does not have; take both files from one commit.")
    return found


def _distinct_ids(table: Table) -> Any:
    """Return the ids as one array, as integers if all look like integers."""
    ids = table.ids("ID")
    ids = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
    if len(ids.unique()) != len(ids):
        raise DataError(f"{table.path}: an ID is in two rows; a post has one row.")
    return ids


@dataclass(frozen=True)
class City:
    """A city, from its CSV files or from an `.npz` file with other features.

    The name "venice" means the CSV files if there are any, "heri_venice" always means the `.npz` file.
    """

    name: str

    def read(self, config: RunConfig, cache: Cache) -> RawData:
        """Read the files below the data root."""
        name, root = config.data.name, data_root(config.data.root)
        folder, stand_in = root / "heri" / self.name, npz_path(root, f"heri_{self.name.lower()}")
        files = [folder / file for file in FILES]
        absent = [file.name for file in files if not file.is_file()]
        if name == stand_in.stem and stand_in.is_file():
            return RawData(read_npz_once(stand_in, cache), f"{name}: {REPLACED}")
        if not absent:
            about = {"kind": "heri"}
            return RawData(read_files(cache, about, files, lambda _: read_herigraph(folder).make_parties()))
        if len(absent) == len(files) and stand_in.is_file():
            return RawData(read_npz_once(stand_in, cache), f"{name}: read from {stand_in}: {REPLACED}")
        raise DataError(
            f"{name}: {', '.join(absent)} not found in {folder}. Fetch {', '.join(FILES)} from the folder "
            f"dataset/{self.name} of github.com/zzbn12345/Heri_Graphs (with Git LFS) and put them there, or set "
            f"data.root or GLASU_DATA_ROOT to the folder above heri/{self.name}."
        )


def _make_source(name: str, nodes: int, edges: int) -> DataSource:
    statistics = Statistics(nodes, edges, 979, NUM_CLASSES, "undirected")
    return DataSource(City(name).read, PAPER_SPLIT, paper=statistics)


VENICE = _make_source("Venice", 2_951, 534_513)
SUZHOU = _make_source("Suzhou", 3_137, 916_496)
AMSTERDAM = _make_source("Amsterdam", 3_727, 1_271_171)
