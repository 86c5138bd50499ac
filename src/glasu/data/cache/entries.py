"""What the cache folder holds: large data, and what is made of it, converted once and opened ever after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasu.data.alignment import align_in_clear
from glasu.data.cache.conversion import (
    open_data,
    open_division,
    open_parties,
    open_splits,
    open_whole,
    write_data,
    write_division,
    write_parties,
    write_splits,
    write_whole,
)
from glasu.data.cache.store import stored, stored_from_files
from glasu.data.cache.workspace import Memory, Workspace
from glasu.data.folders import party_files, read_party
from glasu.data.partition import WholeGraph, partition, splits_by_fraction
from glasu.data.sources.synthetic import synthetic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from glasu.config import Missing, RunConfig
    from glasu.data.party import PartyData, Splits

WORTH_CONVERTING = 4_000_000  # bytes of files: reading so many takes a quarter of a second or more, opening does not
WORTH_DRAWING_ONCE = 16_000_000  # bytes of a synthetic graph and its features: to draw them takes as long


def open_files(
    kind: str, files: Sequence[Path], read: Callable[[Workspace], WholeGraph | list[PartyData]]
) -> WholeGraph | list[PartyData]:
    """Read files or, where they are large, open what was made of them once."""
    if not _are_large(files):
        return read(Memory())
    return open_data(stored_from_files(files, {"kind": kind}, lambda workspace: write_data(workspace, read(workspace))))


def _are_large(files: Sequence[Path]) -> bool:
    """Tell whether opening a conversion is much faster than reading the files; those that are missing are not."""
    return all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) >= WORTH_CONVERTING


def open_folder(folder: Path, missing: Missing) -> PartyData:
    """Read a party's folder or, where its files are large, open what was made of them once."""
    files = party_files(folder)
    if not _are_large(files):
        return read_party(folder, missing)
    about = {"kind": "folder", "names": [folder.resolve().name, *(file.name for file in files)], "missing": missing}
    entry = stored_from_files(files, about, lambda workspace: write_parties(workspace, [read_party(folder, missing)]))
    return open_parties(entry)[0]


def open_aligned(parties: Sequence[PartyData]) -> list[PartyData]:
    """Bring the parties into one order; where stored parties are restricted to common ids, that is stored too."""
    keys = [party.stored_as() for party in parties]
    if None in keys or len({party.ids_digest() for party in parties}) == 1:
        return align_in_clear(parties)
    about = {"kind": "aligned", "parties": keys}
    return open_parties(stored(about, lambda workspace: write_parties(workspace, align_in_clear(parties))))


def open_synthetic(config: RunConfig) -> WholeGraph:
    """Draw the graph that the config describes or, where it is large, open it as it was drawn once."""
    data = config.data
    if 4 * data.num_nodes * (data.average_degree + data.num_features) < WORTH_DRAWING_ONCE:
        return synthetic(config)
    about = {
        "kind": "synthetic",
        "seed": config.data_seed,
        **{key: getattr(data, key) for key in ("num_nodes", "average_degree", "num_features", "num_classes")},
    }
    return open_whole(stored(about, lambda workspace: write_whole(workspace, synthetic(config, workspace))))


def open_partition(whole: WholeGraph, num_clients: int, edge_fraction: float, seed: int) -> list[PartyData]:
    """Return `partition` of the graph; of one that is stored, the division is stored too."""
    if whole.known is None:
        return partition(whole, num_clients, edge_fraction, seed)
    about = {
        "kind": "division",
        "source": whole.known.key,
        "num_clients": num_clients,
        "edge_fraction": edge_fraction,
        "seed": seed if edge_fraction < 1 else None,
    }
    entry = stored(about, lambda workspace: write_division(workspace, whole, num_clients, edge_fraction, seed))
    return open_division(entry, whole)


def open_splits_of(source: WholeGraph | PartyData, fractions: tuple[float, float, float], seed: int) -> Splits:
    """Return `splits_by_fraction` of the labels; of labels that are stored, the splits are stored too."""
    labels = source.labels
    assert labels is not None
    if source.known is None or source.known.labels is not labels:
        return splits_by_fraction(labels, fractions, seed)
    about = {"kind": "splits", "source": source.known.key, "fractions": fractions, "seed": seed}
    entry = stored(about, lambda workspace: write_splits(workspace, splits_by_fraction(labels, fractions, seed)))
    return open_splits(entry, entry.facts)
