"""A party's folder: party.toml names the columns, nodes and edges are Parquet or CSV files."""

from __future__ import annotations

import difflib
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
import tomli_w

from glasu.data.party import MISSING_REMEDY, Graph, PartyData, Splits
from glasu.data.tables import FORMATS, Table, read_table, write_table
from glasu.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from glasu.config import Missing

SCHEMA = 1
MANIFEST = "party.toml"
SPLIT_NAMES = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What party.toml says: the columns of nodes and edges; all other columns of the nodes are features."""

    name: str
    id: str = "id"
    source: str = "source"
    target: str = "target"
    weight: str | None = None
    label: str | list[str] | None = None  # a list: one 0/1 column per class
    split: str | None = None
    classes: list[str] | None = None  # in the order of the label numbers; None: sorted names
    id_type: str | None = None  # "integer" or "string"; None: as the files look
    nodes: str | None = None  # file names; None: nodes.parquet or nodes.csv
    edges: str | None = None
    schema: int = SCHEMA


def write_party(party: PartyData, folder: str | Path, file_format: Literal["parquet", "csv"] = "parquet") -> None:
    """Write a party's folder, complete or not at all; `read_party` gives the same party back, bit for bit."""
    folder = Path(folder)
    if file_format not in FORMATS:
        raise DataError(f"file format {file_format!r}: must be one of {', '.join(FORMATS)}.")
    manifest = _manifest_of(party, file_format)
    names = (f"nodes.{file_format}", f"edges.{file_format}", MANIFEST)
    refuse_existing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        fresh = Path(temporary) / "party"  # a folder within: the temporary one is not readable by the group
        fresh.mkdir()
        write_table(_node_columns(party, manifest), fresh / names[0])
        write_table(_edge_columns(party, manifest), fresh / names[1])
        content = {item.name: getattr(manifest, item.name) for item in fields(manifest)}
        (fresh / MANIFEST).write_bytes(
            tomli_w.dumps({key: value for key, value in content.items() if value is not None}).encode()
        )
        if not folder.exists():
            fresh.rename(folder)
            return
        for name in names:  # party.toml comes last: without it, the folder is no party
            (fresh / name).rename(folder / name)


def refuse_existing(folder: Path) -> None:
    """Raise DataError where a party's files lie already: they are never overwritten."""
    for name in (MANIFEST, *(f"{table}.{kind}" for table in ("nodes", "edges") for kind in FORMATS)):
        if (folder / name).exists():
            raise DataError(f"{folder / name}: exists and is not overwritten; remove it, or write to another folder.")


def read_party(folder: str | Path, missing: Missing = "refuse") -> PartyData:
    """Read a party's folder; `missing` says what to do with features that are missing."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    nodes, edges = (read_table(file) for file in _tables(folder, manifest))
    if nodes.num_rows == 0:
        raise DataError(f"{nodes.path}: has no rows; a party needs at least one node.")
    ids = nodes.ids(manifest.id, manifest.id_type, f'{MANIFEST} says id_type = "integer"')
    _refuse_duplicates(ids, nodes, manifest.id)
    integers = pa.types.is_integer(ids.type)
    labels, classes = _labels(nodes, manifest)
    return PartyData(
        name=manifest.name,
        ids=np.asarray(ids) if integers else np.array(ids.to_pylist(), np.str_),
        features=_features(nodes, manifest, missing),
        graph=_graph(edges, manifest, ids),
        labels=labels,
        classes=classes,
        splits=_splits(nodes, manifest),
        feature_names=tuple(_feature_columns(nodes, manifest)),
    )


def party_files(folder: Path) -> list[Path]:
    """Return the files of a party's folder that `read_party` reads."""
    return [folder / MANIFEST, *_tables(folder, read_manifest(folder))]


def _tables(folder: Path, manifest: Manifest) -> tuple[Path, Path]:
    return _file(folder, "nodes", manifest.nodes), _file(folder, "edges", manifest.edges)


def read_manifest(folder: Path) -> Manifest:
    """Read and check party.toml; the party's name is by default the folder's."""
    path = folder / MANIFEST
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); a party's folder holds {MANIFEST}, nodes and edges."
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8; save it as UTF-8.") from None
    except ValueError as error:
        raise DataError(f"{path}: is not valid TOML: {error}.") from None
    known = [item.name for item in fields(Manifest)]
    for key, value in content.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise DataError(
                f"{path}: unknown key {key!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}.")
            )
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        fits = {"schema": isinstance(value, int), "classes": is_list, "label": is_list or isinstance(value, str)}
        if not fits.get(key, isinstance(value, str)):
            raise DataError(f"{path}: {key}={value!r} is of the wrong type; it must be text.")
    if content.get("schema", SCHEMA) != SCHEMA:
        raise DataError(f"{path}: schema={content['schema']}: this version reads schema {SCHEMA}; update GLASU.")
    if content.get("id_type", "string") not in ("integer", "string"):
        raise DataError(f'{path}: id_type={content["id_type"]!r}: must be "integer" or "string".')
    return Manifest(**{"name": folder.resolve().name, **content})


def _manifest_of(party: PartyData, file_format: str) -> Manifest:
    multilabel = party.labels is not None and party.labels.ndim == 2
    repeated = [name for name, count in Counter(party.classes).items() if count > 1 or not name]
    if repeated:
        raise DataError(f"party {party.name!r}: class names must be distinct and not empty; {len(repeated)} are not.")

    def free(name: str) -> str:
        return free(f"{name}_") if name in party.feature_names else name

    label = [free(f"label_{name}") for name in party.classes] if multilabel else free("label")
    return Manifest(
        name=party.name,
        id=free("id"),
        weight=None if party.graph.weights is None else "weight",
        label=None if party.labels is None else label,
        split=None if party.splits is None else free("split"),
        classes=list(party.classes) or None,
        id_type="integer" if party.ids.dtype.kind == "i" else "string",
        nodes=f"nodes.{file_format}",
        edges=f"edges.{file_format}",
    )


def _node_columns(party: PartyData, manifest: Manifest) -> dict[str, Any]:
    columns: dict[str, Any] = {manifest.id: pa.array(party.ids.tolist())}
    features: Any = party.features
    if sp.issparse(features):
        features = features.tocsc()
    for column in range(party.num_features):
        values = features[:, [column]]
        name = party.feature_names[column] if party.feature_names else f"x{column}"
        columns[name] = (values.toarray() if sp.issparse(values) else values).ravel()
    labels, names = party.labels, np.array([*party.classes, ""], object)
    if labels is not None and isinstance(manifest.label, list):
        for name, values in zip(manifest.label, labels.T, strict=True):
            columns[name] = pa.array(values, pa.int8(), mask=values < 0)
    elif labels is not None and isinstance(manifest.label, str):
        columns[manifest.label] = pa.array(names[labels], pa.string(), mask=labels < 0)
    if party.splits is not None and manifest.split is not None:
        split = np.full(party.num_nodes, None, object)
        for name in SPLIT_NAMES:
            split[getattr(party.splits, name)] = name
        columns[manifest.split] = pa.array(split, pa.string())
    return columns


def _edge_columns(party: PartyData, manifest: Manifest) -> dict[str, Any]:
    ids = pa.array(party.ids.tolist())
    source, target = party.graph.edge_index()
    columns: dict[str, Any] = {manifest.source: ids.take(pa.array(source)), manifest.target: ids.take(pa.array(target))}
    if manifest.weight is not None:
        columns[manifest.weight] = party.graph.weights
    return columns


def _file(folder: Path, what: str, name: str | None) -> Path:
    """Return the path of the nodes or edges file."""
    if name is not None:
        if Path(name).suffix.removeprefix(".") not in FORMATS:
            raise DataError(f"{folder / MANIFEST}: {what}={name!r}: the file must end in .{' or .'.join(FORMATS)}.")
        return folder / name
    present = [path for path in (folder / f"{what}.{suffix}" for suffix in FORMATS) if path.exists()]
    if len(present) == 1:
        return present[0]
    problem = "has both" if present else "has neither"
    files = " and ".join(f"{what}.{suffix}" for suffix in FORMATS)
    raise DataError(f"{folder}: {problem} of {files}; provide one of them, or name it in {MANIFEST}.")


def _refuse_duplicates(ids: Any, nodes: Table, name: str) -> None:
    first = np.asarray(pc.index_in(ids, pc.unique(ids)))  # rows numbered by first appearance
    repeated = first != np.maximum.accumulate(np.concatenate([[-1], first[:-1]])) + 1
    if repeated.any():
        raise nodes.wrong(name, repeated, "the id stands in an earlier row too; every node has one row.")


def _feature_columns(nodes: Table, manifest: Manifest) -> list[str]:
    """Return all columns that party.toml does not name."""
    named = manifest.label if isinstance(manifest.label, list) else [manifest.label]
    return [name for name in nodes.columns if name not in (manifest.id, manifest.split, *named)]


def _features(nodes: Table, manifest: Manifest, missing: str) -> NDArray[np.float32]:
    """Return the feature columns, with missing values replaced."""
    names = _feature_columns(nodes, manifest)
    if not names:
        raise DataError(f"{nodes.path}: has no feature column besides those that {MANIFEST} names; add at least one.")
    features = np.empty((nodes.num_rows, len(names)), np.float32)
    for position, name in enumerate(names):
        values = nodes.numbers(name)
        absent = np.isnan(values)
        if absent.any():
            if missing == "refuse":
                raise nodes.wrong(name, absent, f"the value is missing; {MISSING_REMEDY}.")
            known = values[~absent]
            mean = known.mean(dtype=np.float64) if missing == "mean" and len(known) else 0.0
            values = np.where(absent, np.float32(mean), values)
        features[:, position] = values
    return features


def _labels(nodes: Table, manifest: Manifest) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    if manifest.label is None:
        return None, ()
    if isinstance(manifest.label, list):
        return _multilabels(nodes, manifest.label), tuple(manifest.classes or manifest.label)
    names = nodes.strings(manifest.label)
    classes = manifest.classes or _sorted_classes({name for name in names if name is not None})
    number = {name: position for position, name in enumerate(classes)}
    labels = np.array([-1 if name is None else number.get(name, -2) for name in names], np.int64)
    if (labels == -2).any():
        rule = f"is not among the {len(classes)} classes that {MANIFEST} lists; add it there, or leave it empty."
        raise nodes.wrong(manifest.label, labels == -2, rule)
    return labels, tuple(classes)


def _multilabels(nodes: Table, names: list[str]) -> NDArray[np.int64]:
    labels = np.empty((nodes.num_rows, len(names)), np.int64)
    for position, name in enumerate(names):
        values = nodes.numbers(name)
        absent = np.isnan(values)
        wrong = ~absent & (values != 0) & (values != 1)
        if wrong.any():
            raise nodes.wrong(name, wrong, "must be 0 or 1, or empty where unknown, for it is one of several labels.")
        labels[:, position] = np.where(absent, -1, values)
    return labels


def _sorted_classes(names: set[str]) -> list[str]:
    """Sort class names, as numbers where all are integers."""
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)


def _splits(nodes: Table, manifest: Manifest) -> Splits | None:
    if manifest.split is None:
        return None
    values = np.array([name or "" for name in nodes.strings(manifest.split)], np.str_)
    other = ~np.isin(values, ["", *SPLIT_NAMES])
    if other.any():
        raise nodes.wrong(manifest.split, other, f"must be one of {', '.join(SPLIT_NAMES)}, or empty.")
    return Splits(*(np.flatnonzero(values == name) for name in SPLIT_NAMES))


def _graph(edges: Table, manifest: Manifest, ids: Any) -> Graph:
    kind = "integer" if pa.types.is_integer(ids.type) else "string"
    ends: list[NDArray[np.integer]] = []
    for name in (manifest.source, manifest.target):
        found = pc.index_in(edges.ids(name, kind, "the ids of the nodes are"), ids.combine_chunks())
        unknown = np.asarray(pc.is_null(found))
        if unknown.any():
            raise edges.wrong(
                name, unknown, "the id is not among this party's nodes; remove the edge, or add the node."
            )
        ends.append(np.asarray(found))
    weights = None
    if manifest.weight is not None:
        weights = edges.numbers(manifest.weight)
        if np.isnan(weights).any():
            raise edges.wrong(manifest.weight, np.isnan(weights), "the weight is missing; give every edge one.")
        if (weights < 0).any():
            raise edges.wrong(manifest.weight, weights < 0, "the weight is negative; use weights of 0 or more.")
    return Graph.from_edges(ends[0], ends[1], len(ids), weights)
