"""The folder of a party: party.toml names the columns; nodes and edges are Parquet or CSV files."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import scipy.sparse as sp
import tomli_w

from glasu.data.alignment_file import ALIGNMENT_FILE, read_alignment
from glasu.data.cache.parties import read_files
from glasu.data.cache.store import Cache
from glasu.data.graph import Graph
from glasu.data.id_rules import IdRules, LetterCase, UnicodeForm, Whitespace, normalize_ids
from glasu.data.party import MISSING_REMEDY, SPLITS, Labels, PartyData, Splits
from glasu.data.party_name import check_member_name
from glasu.data.table_errors import Faults
from glasu.data.tables import FORMATS, Columns, Table, read_table, write_table
from glasu.errors import DataError
from glasu.files import sync_folder
from glasu.records import parse_toml, read_record, to_plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from glasu.config_sections import Missing

PARTY_SCHEMA = 1
PARTY_FILE = "party.toml"


@dataclass(frozen=True, kw_only=True)
class PartyManifest:
    """The content of party.toml: the names of special columns. All other columns in the table of nodes are features."""

    name: str = ""  # "": the name of the folder
    id: str = "id"
    source: str = "source"
    target: str = "target"
    weight: str | None = None
    label: str | tuple[str, ...] | None = None  # several names: one 0/1 column per class
    label_type: Literal["class", "number"] | None = None  # None: class
    split: str | None = None
    classes: tuple[str, ...] | None = None  # class names in the order of the label numbers; None: sorted names
    id_type: Literal["integer", "string"] | None = None  # None: integers if all ids look like integers
    id_unicode: UnicodeForm | None = None  # these three: rules of an alignment; None: the defaults of `IdRules`
    id_case: LetterCase | None = None
    id_whitespace: Whitespace | None = None
    nodes: str | None = None  # file names; None: nodes.parquet or nodes.csv
    edges: str | None = None
    schema: int = PARTY_SCHEMA

    def __post_init__(self) -> None:
        if self.name:
            check_member_name(self.name)
        if self.schema != PARTY_SCHEMA:
            raise DataError(f"schema={self.schema}: this version reads schema {PARTY_SCHEMA}; update GLASU.")
        if self.label_type == "number" and (not isinstance(self.label, str) or self.classes is not None):
            raise DataError('label_type="number": needs one column in label, and no classes.')

    @property
    def id_rules(self) -> IdRules:
        """The rules that normalise ids for an alignment."""
        default = IdRules()
        return IdRules(
            unicode=self.id_unicode or default.unicode,
            case=self.id_case or default.case,
            whitespace=self.id_whitespace or default.whitespace,
        )


def write_party(party: PartyData, folder: str | Path, file_format: Literal["parquet", "csv"] = "parquet") -> None:
    """Write the folder of a party atomically; `read_party` returns the same party, bit for bit."""
    folder = Path(folder)
    if file_format not in FORMATS:
        raise DataError(f"file format {file_format!r}: must be one of {', '.join(FORMATS)}.")
    manifest = _make_manifest(party, file_format)
    names = (f"nodes.{file_format}", f"edges.{file_format}", PARTY_FILE)
    refuse_existing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        fresh = Path(temporary) / "party"  # a subfolder, because the temporary folder is private to its owner
        fresh.mkdir()
        write_table(_make_node_columns(party, manifest), fresh / names[0])
        write_table(_make_edge_columns(party, manifest), fresh / names[1])
        (fresh / PARTY_FILE).write_bytes(tomli_w.dumps(to_plain(manifest)).encode())
        if not folder.exists():
            fresh.rename(folder)
            sync_folder(folder.parent)
            return
        for name in names:  # move party.toml last: a folder without this file is not a party
            (fresh / name).rename(folder / name)


def refuse_existing(folder: Path) -> None:
    """Raise DataError if the folder contains files of a party, because they are never overwritten."""
    for name in (PARTY_FILE, *(f"{table}.{kind}" for table in ("nodes", "edges") for kind in FORMATS)):
        if (folder / name).exists():
            raise DataError(f"{folder / name}: exists and is not overwritten; remove it, or write to another folder.")


def read_party(folder: str | Path, missing: Missing = "refuse") -> PartyData:
    """Read the folder of a party, or raise DataError with all faults of its files.

    Args:
        folder: the folder with party.toml and the tables of nodes and edges.
        missing: what to do with missing feature values.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    paths = _find_tables(folder, manifest)
    faults = Faults()
    with faults.collect():
        nodes = read_table(paths[0])
        if nodes.num_rows == 0:
            raise DataError(f"{nodes.path}: has no rows; a party needs at least one node.")
    with faults.collect():
        edges = read_table(paths[1])
    faults.raise_if_any()
    for table, names in ((nodes, _list_named_node_columns(manifest)), (edges, _list_named_edge_columns(manifest))):
        for name, key in names.items():
            with faults.collect():
                table.column(name, key)
    # If a CSV file has no header, its column names are data, and errors about features would quote them.
    faults.raise_if_any()
    with faults.collect():
        ids = nodes.ids(manifest.id, manifest.id_type, f'{PARTY_FILE} sets id_type = "integer"')
        with faults.collect():
            nodes.refuse_duplicates(manifest.id, ids)
        with faults.collect():
            graph = _read_graph(edges, manifest, ids)
    features = _read_features(nodes, manifest, missing, faults)
    with faults.collect():
        labels, classes = _read_labels(nodes, manifest)
    with faults.collect():
        splits = _read_splits(nodes, manifest)
    faults.raise_if_any()
    party = PartyData(
        name=manifest.name,
        ids=np.asarray(ids) if pa.types.is_integer(ids.type) else np.array(ids.to_pylist(), np.str_),
        features=features,
        graph=graph,
        labels=labels,
        classes=classes,
        splits=splits,
        feature_names=tuple(_list_feature_columns(nodes, manifest)),
    )
    common = read_alignment(folder)
    return party if common is None else common.apply(party, manifest.id_rules, folder / ALIGNMENT_FILE)


def read_normalized_ids(folder: Path) -> tuple[PartyManifest, NDArray[np.str_]]:
    """Return party.toml and the normalised ids of all nodes. No other column is read."""
    manifest = read_manifest(folder)
    nodes = read_table(_find_tables(folder, manifest)[0])
    nodes.column(manifest.id, "id")
    ids = nodes.ids(manifest.id, manifest.id_type, f'{PARTY_FILE} sets id_type = "integer"')
    if len(ids) == 0:
        raise DataError(f"{nodes.path}: has no rows; a party needs at least one node.")
    return manifest, normalize_ids(ids.to_pylist(), manifest.id_rules, f"{nodes.path}: column {manifest.id!r}")


def read_party_once(folder: Path, missing: Missing, cache: Cache | None = None) -> PartyData:
    """Return `read_party(folder, missing)`. Large files are converted once; later calls open the converted data."""
    files = [folder / PARTY_FILE, *_find_tables(folder, read_manifest(folder))]
    common = read_alignment(folder)
    if common is not None:
        files.append(folder / ALIGNMENT_FILE)
    names = [folder.resolve().name, *(file.name for file in files)]
    about = {"kind": "folder", "names": names, "missing": missing}
    party = read_files(cache or Cache(), about, files, lambda _: [read_party(folder, missing)])[0]
    return party if common is None else replace(party, alignment_key=common.key)  # the cache does not store the key


def find_query_nodes(path: Path, folder: Path, party: PartyData) -> NDArray[np.int64]:
    """Return the node position of each id in a table. The table's id column is named as in party.toml, or `id`.

    If the party is aligned, the ids of the table are normalised first.

    Args:
        path: a .parquet or .csv file.
        folder: the folder of the party; its party.toml names the id column.
        party: the data of the party.
    """
    if path.suffix.removeprefix(".") not in FORMATS:
        raise DataError(f"{path}: the file of ids must end in .{' or .'.join(FORMATS)}.")
    if not path.is_file():
        raise DataError(f"{path}: does not exist; --predict takes a table with the ids to predict.")
    table, manifest = read_table(path), read_manifest(folder)
    own = manifest.id
    name = own if own in table.columns else "id"
    if name not in table.columns:
        expected = " or ".join(repr(known) for known in dict.fromkeys((own, "id")))
        raise DataError(f"{path}: has no column {expected}; {table.names()}. Rename the id column.")
    if table.num_rows == 0:
        raise DataError(f"{path}: has no rows; list at least one id, or use --predict without a file.")
    if party.alignment_key is not None:
        rules = manifest.id_rules
        normalized = [rules.normalize(str(each)) for each in table.ids(name).to_pylist()]
        table = replace(table, columns={**table.columns, name: pa.chunked_array([pa.array(normalized, pa.string())])})
    return table.positions(
        name,
        pa.array(party.ids.tolist()),
        "the ids of this party are",
        "is not the id of a node of this party; remove the row, or write the id as in the party's table of nodes.",
    )


def _find_tables(folder: Path, manifest: PartyManifest) -> tuple[Path, Path]:
    return _find_table(folder, "nodes", manifest.nodes), _find_table(folder, "edges", manifest.edges)


def read_manifest(folder: Path) -> PartyManifest:
    """Read and check party.toml; the default name of a party is the name of its folder."""
    path = folder / PARTY_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); the folder of a party has {PARTY_FILE}, nodes and edges."
        ) from None
    manifest = read_record(PartyManifest, parse_toml(content, str(path)), str(path))
    return manifest if manifest.name else replace(manifest, name=folder.resolve().name)


def _make_manifest(party: PartyData, file_format: str) -> PartyManifest:
    multilabel = party.labels is not None and party.labels.ndim == 2
    repeated = [name for name, count in Counter(party.classes).items() if count > 1 or not name]
    if repeated:
        raise DataError(f"party {party.name!r}: class names must be distinct and not empty; {len(repeated)} are not.")

    def free(name: str) -> str:
        """Return a column name that no feature has."""
        return free(f"{name}_") if name in party.feature_names else name

    label = tuple(free(f"label_{name}") for name in party.classes) if multilabel else free("label")
    return PartyManifest(
        name=party.name,
        id=free("id"),
        weight=None if party.graph.weights is None else "weight",
        label=None if party.labels is None else label,
        label_type="number" if party.has_numeric_labels else None,
        split=None if party.splits is None else free("split"),
        classes=party.classes or None,
        id_type="integer" if party.ids.dtype.kind == "i" else "string",
        nodes=f"nodes.{file_format}",
        edges=f"edges.{file_format}",
    )


def _make_node_columns(party: PartyData, manifest: PartyManifest) -> Columns:
    columns: Columns = {manifest.id: pa.array(party.ids.tolist())}
    features: Any = party.features
    if sp.issparse(features):
        features = features.tocsc()
    for column in range(party.num_features):
        values = features[:, [column]]
        name = party.feature_names[column] if party.feature_names else f"x{column}"
        columns[name] = (values.toarray() if sp.issparse(values) else values).ravel()
    labels, names = party.labels, np.array([*party.classes, ""], object)
    if labels is not None and isinstance(manifest.label, tuple):
        for name, values in zip(manifest.label, labels.T, strict=True):
            columns[name] = pa.array(values, pa.int8(), mask=values < 0)
    elif labels is not None and isinstance(manifest.label, str) and manifest.label_type == "number":
        columns[manifest.label] = pa.array(labels, pa.float64(), mask=np.isnan(labels))
    elif labels is not None and isinstance(manifest.label, str):
        columns[manifest.label] = pa.array(names[labels], pa.string(), mask=labels < 0)
    if party.splits is not None and manifest.split is not None:
        split = np.full(party.num_nodes, None, object)
        for name in SPLITS:
            split[getattr(party.splits, name)] = name
        columns[manifest.split] = pa.array(split, pa.string())
    return columns


def _make_edge_columns(party: PartyData, manifest: PartyManifest) -> Columns:
    ids = pa.array(party.ids.tolist())
    source, target = party.graph.edge_index()
    columns: Columns = {manifest.source: ids.take(pa.array(source)), manifest.target: ids.take(pa.array(target))}
    if manifest.weight is not None:
        columns[manifest.weight] = party.graph.weights
    return columns


def _find_table(folder: Path, what: str, name: str | None) -> Path:
    """Return the path of the table of nodes or edges."""
    if name is not None:
        if Path(name).suffix.removeprefix(".") not in FORMATS:
            raise DataError(f"{folder / PARTY_FILE}: {what}={name!r}: the file must end in .{' or .'.join(FORMATS)}.")
        return folder / name
    present = [path for path in (folder / f"{what}.{suffix}" for suffix in FORMATS) if path.exists()]
    if len(present) == 1:
        return present[0]
    problem = "has both" if present else "has neither"
    files = " and ".join(f"{what}.{suffix}" for suffix in FORMATS)
    raise DataError(f"{folder}: {problem} of {files}; provide one of them, or name it in {PARTY_FILE}.")


def _list_feature_columns(nodes: Table, manifest: PartyManifest) -> list[str]:
    """Return the names of all columns that party.toml does not name."""
    return [name for name in nodes.columns if name not in _list_named_node_columns(manifest)]


def _list_named_node_columns(manifest: PartyManifest) -> dict[str, str]:
    """Map every node column that party.toml names to its key in party.toml: "id", "label" or "split"."""
    labels = manifest.label if isinstance(manifest.label, tuple) else (manifest.label,)
    named = [(manifest.id, "id"), *((label, "label") for label in labels), (manifest.split, "split")]
    return {name: key for name, key in named if name is not None}


def _list_named_edge_columns(manifest: PartyManifest) -> dict[str, str]:
    """Map every edge column that party.toml names to its key in party.toml: "source", "target" or "weight"."""
    named = ((manifest.source, "source"), (manifest.target, "target"), (manifest.weight, "weight"))
    return {name: key for name, key in named if name is not None}


def _read_features(nodes: Table, manifest: PartyManifest, missing: Missing, faults: Faults) -> NDArray[np.float32]:
    """Return the feature columns with missing values replaced; collect the faults of all columns."""
    names = _list_feature_columns(nodes, manifest)
    features = np.empty((nodes.num_rows, len(names)), np.float32)
    with faults.collect():
        if not names:
            raise DataError(f"{nodes.path}: has no feature column: {PARTY_FILE} names all its columns; add a feature.")
    for position, name in enumerate(names):
        with faults.collect():
            features[:, position] = _replace_missing(nodes, name, missing)
    return features


def _replace_missing(nodes: Table, name: str, missing: Missing) -> NDArray[np.float32]:
    values = nodes.numbers(name, required=f"the value is missing; {MISSING_REMEDY}." if missing == "refuse" else "")
    absent = np.isnan(values)
    if not absent.any():
        return values
    known = values[~absent]
    mean = known.mean(dtype=np.float64) if missing == "mean" and len(known) else 0.0
    return np.where(absent, np.float32(mean), values)


def _read_labels(nodes: Table, manifest: PartyManifest) -> tuple[Labels | None, tuple[str, ...]]:
    if manifest.label is None:
        return None, ()
    if isinstance(manifest.label, tuple):
        classes = manifest.classes or manifest.label
        _refuse_one_class(nodes, manifest.label, classes)
        return _read_multilabels(nodes, manifest.label), classes
    if manifest.label_type == "number":
        return nodes.numbers(manifest.label, np.float64), ()
    names = nodes.strings(manifest.label)
    classes = manifest.classes or tuple(_sort_classes({name for name in names if name is not None}))
    number = {name: position for position, name in enumerate(classes)}
    labels = np.array([-1 if name is None else number.get(name, -2) for name in names], np.int64)
    if (labels == -2).any():
        rule = f"is not among the {len(classes)} classes that {PARTY_FILE} lists; list it, or leave the cell empty."
        raise nodes.explain(manifest.label, labels == -2, rule)
    _refuse_one_class(nodes, (manifest.label,), classes)
    return labels, classes


def _refuse_one_class(nodes: Table, columns: tuple[str, ...], classes: tuple[str, ...]) -> None:
    """Refuse labels of fewer than two classes."""
    if len(classes) < 2:
        named = f"column{'s' * (len(columns) != 1)} {', '.join(map(repr, columns))}"
        found = "no class" if not classes else "only one class"
        raise DataError(
            f"{nodes.path}: {named}: the labels have {found}; a classifier needs at least two. Fill in labels, or "
            f"remove label from {PARTY_FILE} if this party has none."
        )


def _read_multilabels(nodes: Table, names: tuple[str, ...]) -> NDArray[np.int64]:
    labels = np.empty((nodes.num_rows, len(names)), np.int64)
    faults, rule = Faults(), "must be 0, 1, or empty if unknown, because it is one of several labels."
    for position, name in enumerate(names):
        with faults.collect():
            values = nodes.numbers(name)
            absent = np.isnan(values)
            nodes.refuse(name, ~absent & (values != 0) & (values != 1), rule)
            labels[:, position] = np.where(absent, -1, values)
    faults.raise_if_any()
    return labels


def _sort_classes(names: set[str]) -> list[str]:
    """Sort class names, as numbers if all are integers."""
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)


def _read_splits(nodes: Table, manifest: PartyManifest) -> Splits | None:
    if manifest.split is None:
        return None
    values = np.array([name or "" for name in nodes.strings(manifest.split)], np.str_)
    other = ~np.isin(values, ["", *SPLITS])
    if other.any():
        raise nodes.explain(manifest.split, other, f"must be one of {', '.join(SPLITS)}, or empty.")
    return Splits(*(np.flatnonzero(values == name) for name in SPLITS))


def _read_graph(edges: Table, manifest: PartyManifest, ids: Any) -> Graph:
    unknown = "the id is not among this party's nodes; remove the edge, or add the node."
    faults, ends = Faults(), []
    for name in (manifest.source, manifest.target):
        with faults.collect():
            ends.append(edges.positions(name, ids, "the ids of the nodes are", unknown))
    weights = None
    if manifest.weight is not None:
        with faults.collect():
            weights = edges.numbers(manifest.weight, required="the weight is missing; give every edge one.")
            edges.refuse(manifest.weight, weights < 0, "the weight is negative; use weights of 0 or more.")
    faults.raise_if_any()
    source, target = ends
    return Graph.from_edges(source, target, len(ids), weights)
