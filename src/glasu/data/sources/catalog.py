"""Load the parties of a run: from a named data set, or from party folders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from glasu import registry
from glasu.config import refuse_other_count
from glasu.data.alignment import align_in_clear, check_parties, keep_labels
from glasu.data.alignment_file import ALIGNMENT_FILE
from glasu.data.cache.parties import compute_once, partition_once
from glasu.data.cache.store import Cache
from glasu.data.folders import read_party_once
from glasu.data.methods import find_method, override_settings
from glasu.data.partition import Partition, draw_splits_by_fraction, draw_splits_per_class
from glasu.data.party import PartyData
from glasu.data.sources import DataSource, Statistics, find_source
from glasu.data.statistics import count_statistics
from glasu.errors import AlignmentError, ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from glasu.config import RunConfig
    from glasu.config_sections import Split
    from glasu.data.party import Splits

NUM_VALIDATION, NUM_TEST = 500, 1000  # sizes of the "paper" split if it has a fixed number of training nodes per class


@dataclass(frozen=True)
class LoadedParties:
    """The parties of a run, and facts about their data set."""

    parties: list[PartyData]
    statistics: Statistics  # statistics of the undivided data
    notes: tuple[str, ...] = ()


def load_parties(config: RunConfig, *, for_prediction: bool = False) -> list[PartyData]:
    """Return the parties of a run, aligned and checked. The method decides which edges and features each party has.

    Args:
        config: the settings.
        for_prediction: whether labels and splits may be missing.
    """
    return load_data(config, for_prediction=for_prediction).parties


def load_data(config: RunConfig, *, for_prediction: bool = False, cache: Cache | None = None) -> LoadedParties:
    """Return the parties, as `load_parties` does, with statistics and notes about the data set."""
    cache = cache or Cache()
    data, notes = _read(config, cache, with_labels=not for_prediction)
    parties = _divide(config, data, cache)
    if not for_prediction:
        used, _ = override_settings(config)
        check_parties(parties, used.train.label_owner, used.train.task, used.data.split)
    return LoadedParties(parties, count_statistics(data, cache, divided=_is_one_graph(config, data)), notes)


def choose_splits(party: PartyData, split: Split, seed: int) -> PartyData:
    """Return the party with the splits of its folder. If it has labels but no splits, draw splits by class."""
    if party.splits is not None or party.labels is None:
        return party
    fractions = _choose_fractions(split, DataSource.fractions, party.name)
    return replace(party, splits=draw_splits_by_fraction(party.labels, fractions, seed))


def _is_one_graph(config: RunConfig, data: Sequence[PartyData]) -> bool:
    """Return whether the data is one graph to divide among the clients. A folder always holds the data of one party."""
    return len(data) == 1 and not config.data.parties


def _divide(config: RunConfig, data: list[PartyData], cache: Cache) -> list[PartyData]:
    """Divide the data if it is one graph. Return parties with the edges and features that the method requires."""
    settings, method = config.data, find_method(config)
    chosen: Partition = registry.load("partition", settings.partition)
    where = repr(settings.name or "data.parties")
    if _is_one_graph(config, data):
        if method.one_party:
            return data
        parties = partition_once(cache, data[0], override_settings(config)[0].data, config.data_seed)
        return method.prepare(keep_labels(parties, config.train.label_owner))
    if not chosen.keeps_parties:
        raise ConfigError(
            f"data.partition={settings.partition!r}: only one graph can be divided, and {where} consists of "
            f"{len(data)} parties already; remove data.partition."
        )
    if not method.one_party and settings.num_clients != type(settings).num_clients:
        refuse_other_count(settings.num_clients, len(data), f"the number of parties in {where} is")
    return method.prepare(data)


def _read(config: RunConfig, cache: Cache, *, with_labels: bool) -> tuple[list[PartyData], tuple[str, ...]]:
    """Return the data set with its splits, and the notes about it.

    If the data set consists of parties, only the parties that `train.labels` selects keep their labels.
    """
    if config.data.parties:
        return _read_folders(config, cache, with_labels=with_labels), ()
    source = find_source(config.data.name)
    raw = source.read(config, cache)
    data, notes = raw.parties, (raw.note,) if raw.note else ()
    if not with_labels:
        return data, notes
    splits = _choose_splits(data[0], source, config)
    data = [replace(party, splits=splits) for party in data]
    return data if _is_one_graph(config, data) else keep_labels(data, config.train.label_owner), notes


def _read_folders(config: RunConfig, cache: Cache, *, with_labels: bool) -> list[PartyData]:
    data = config.data
    parties = [read_party_once(Path(folder), data.missing, cache) for folder in data.parties]
    _refuse_mixed_alignments(parties, data.parties)
    parties = _align(parties, cache)
    if not with_labels:
        return parties
    parties = keep_labels(parties, config.train.label_owner)
    return [choose_splits(party, data.split, config.data_seed) for party in parties]


def _refuse_mixed_alignments(parties: Sequence[PartyData], folders: Sequence[str]) -> None:
    """Refuse folders if only some of them are aligned, or if they were not aligned together: their nodes may differ."""
    aligned = [folder for folder, party in zip(folders, parties, strict=True) if party.alignment_key is not None]
    if aligned and len(aligned) < len(folders):
        others = ", ".join(folder for folder in folders if folder not in aligned)
        raise AlignmentError(
            f"data.parties: {ALIGNMENT_FILE} is in {', '.join(aligned)}, but not in {others}; run glasu align with all "
            "of these folders, or remove the file from all of them."
        )
    if len({party.alignment_key for party in parties}) > 1:
        raise AlignmentError(
            f"data.parties: {ALIGNMENT_FILE} in {', '.join(folders)} comes from different alignments; run glasu align "
            "with all of these folders."
        )


def _align(parties: Sequence[PartyData], cache: Cache) -> list[PartyData]:
    """Return `align_in_clear(parties)`. If the parties come from the cache, the result is cached, too."""
    keys = [party.cache_key() for party in parties]
    if None in keys or len({party.ids_digest() for party in parties}) == 1:
        return align_in_clear(parties)
    return compute_once(cache, {"kind": "aligned", "parties": keys}, lambda _: align_in_clear(parties))


def _choose_splits(party: PartyData, source: DataSource, config: RunConfig) -> Splits:
    """Return the splits that `data.split` selects: the public splits, the splits of the paper, or fractions."""
    name, split, seed = config.data.name, config.data.split, config.data_seed
    if party.labels is None:
        raise DataError(f"data.name={name!r}: has no labels to learn from.")
    if split == "public" and party.splits is not None:
        return party.splits
    if split == "paper" and source.per_class is not None and party.classes:
        return draw_splits_per_class(party.labels, source.per_class, NUM_VALIDATION, NUM_TEST, seed)
    return draw_splits_by_fraction(party.labels, _choose_fractions(split, source.fractions, name), seed)


def _choose_fractions(split: Split, paper: tuple[float, float, float], name: str) -> tuple[float, float, float]:
    if split == "public":
        raise ConfigError(f'data.split="public": {name!r} has no public split; use "paper" or fractions.')
    return paper if split == "paper" else split
