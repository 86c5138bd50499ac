"""Parties as cache entries. They are written once and opened without reading features or edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from glasu import registry
from glasu.config import DataConfig
from glasu.data.cache.arrays import Workspace
from glasu.data.cache.store import Cache, CacheEntry, EntryFacts
from glasu.data.graph import Graph
from glasu.data.partition import Partition, partition
from glasu.data.party import SPLITS, CheckedArrays, PartyData, Splits
from glasu.data.preprocessing import CSR_PARTS, make_csr
from glasu.records import read_record, to_plain


@dataclass(frozen=True)
class PartyFacts:
    """The values that an entry holds about one party, in addition to its arrays."""

    name: str
    classes: tuple[str, ...]
    feature_names: tuple[str, ...]
    feature_shape: tuple[int, int]
    ids_sha256: str
    mean_length: float
    arrays: Mapping[str, str]  # name in `PartyData.arrays` -> name in the entry; parties may share an array


def read_files(
    cache: Cache, about: Mapping[str, object], files: Sequence[Path], read: Callable[[Workspace], list[PartyData]]
) -> list[PartyData]:
    """Read files. Large files are converted once; later calls open the converted data.

    Args:
        cache: holds the converted data.
        about: all inputs that decide the result, except the content of the files, as JSON.
        files: all files that `read` reads.
        read: reads the files; it may write large arrays to the workspace.
    """
    if not cache.is_worth_caching(files):
        return read(Workspace())
    return open_parties(cache.open_for_files(files, about, lambda workspace: write_parties(workspace, read(workspace))))


def compute_once(
    cache: Cache,
    about: Mapping[str, object],
    compute: Callable[[Workspace], list[PartyData]],
    whole: PartyData | None = None,
) -> list[PartyData]:
    """Return the parties that `about` describes; compute them once and then open them.

    Args:
        cache: holds the parties.
        about: all inputs that decide the result, as JSON.
        compute: makes the parties; it may write large arrays to the workspace.
        whole: the graph that is divided among the parties. The entry does not store the arrays of this graph again.
    """
    entry = cache.open(about, lambda workspace: write_parties(workspace, compute(workspace), whole))
    return open_parties(entry, whole)


def partition_once(cache: Cache, whole: PartyData, data: DataConfig, seed: int) -> list[PartyData]:
    """Return `partition(whole, ...)`. If the graph comes from the cache, its partition is cached, too."""
    key = whole.cache_key()
    if key is None:
        return partition(whole, data, seed)
    chosen: Partition = registry.load("partition", data.partition)
    about = {
        "kind": "division",
        "source": key,
        "partition": data.partition,
        "extension": str(registry.find_extension("partition", data.partition) or ""),
        "seed": seed if chosen.draws(data) else None,
        **{key: getattr(data, key) for key in ("num_clients", *chosen.keys)},
    }
    # The entry holds no labels or splits, because the settings decide the splits, and a prediction needs neither.
    bare = replace(whole, labels=None, classes=(), splits=None)
    parties = compute_once(cache, about, lambda workspace: partition(bare, data, seed, workspace), bare)
    return [replace(party, labels=whole.labels, classes=whole.classes, splits=whole.splits) for party in parties]


def write_parties(workspace: Workspace, parties: Sequence[PartyData], whole: PartyData | None = None) -> EntryFacts:
    """Write parties; return the facts that `open_parties` needs. An array that parties share is written once."""
    names = {id(array): name for name, array in _list_arrays(whole).items()}  # names of arrays that need not be written
    every = []
    for number, party in enumerate(parties):
        arrays = party.arrays()
        for role, array in arrays.items():
            if id(array) not in names:
                names[id(array)] = workspace.keep(f"{number}.{role}", array)
        facts = PartyFacts(
            name=party.name,
            classes=party.classes,
            feature_names=party.feature_names,
            feature_shape=(party.num_nodes, party.num_features),
            ids_sha256=party.ids_digest(),
            mean_length=party.mean_length(),
            arrays={role: names[id(array)] for role, array in arrays.items()},
        )
        every.append(to_plain(facts))
    return {"parties": every}


def open_parties(entry: CacheEntry, whole: PartyData | None = None) -> list[PartyData]:
    """Return the parties of an entry; `whole` is the graph that was passed to `write_parties`."""
    arrays = {**entry.arrays, **_list_arrays(whole)}
    parties = []
    for number, plain in enumerate(entry.facts["parties"]):
        facts = read_record(PartyFacts, plain, entry.key)
        own = {role: arrays[name] for role, name in facts.arrays.items()}
        parties.append(_open_party(f"{entry.key}/{number}", facts, own))
    return parties


def _open_party(key: str, facts: PartyFacts, arrays: Mapping[str, NDArray[Any]]) -> PartyData:
    dense = arrays.get("x")
    sparse = (arrays.get(f"x_{part}") for part in CSR_PARTS)
    checked = CheckedArrays(
        ids=arrays["ids"],
        ids_sha256=facts.ids_sha256,
        features=make_csr(facts.feature_shape, *sparse) if dense is None else dense,
        mean_length=facts.mean_length,
        graph=Graph.without_checks(arrays["indptr"], arrays["indices"], arrays.get("weights"), arrays.get("degree")),
        key=key,
    )
    return PartyData(
        facts.name,
        checked.ids,
        checked.features,
        checked.graph,
        arrays.get("labels"),
        facts.classes,
        Splits(*(arrays[part] for part in SPLITS)) if SPLITS[0] in arrays else None,
        facts.feature_names,
        checked,
    )


def _list_arrays(whole: PartyData | None) -> dict[str, NDArray[Any]]:
    """Return the arrays of the undivided graph. The prefix "whole." tells them from the arrays of the parties."""
    return {} if whole is None else {f"whole.{name}": array for name, array in whole.arrays().items()}
