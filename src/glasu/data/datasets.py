"""Named data sets and party folders: what a run's config asks for -> the parties as they will train."""

from __future__ import annotations

import difflib
import os
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from glasu.data.alignment import align_in_clear, check_parties, keep_labels
from glasu.data.demo import news_service
from glasu.data.folders import read_party
from glasu.data.partition import (
    WholeGraph,
    partition,
    pool_parties,
    share_edges,
    splits_by_fraction,
    splits_per_class,
)
from glasu.data.synthetic import synthetic
from glasu.errors import ConfigError, DataError

if TYPE_CHECKING:
    from glasu.config import RunConfig, Split
    from glasu.data.party import PartyData

OWN_SPLIT = (0.6, 0.2, 0.2)  # what "paper" means for data that no paper split


@dataclass(frozen=True)
class _Planetoid:
    folder: str
    per_class: int  # training nodes per class in the paper's split

    def raw_files(self) -> list[str]:
        suffixes = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
        return [f"ind.{self.folder.lower()}.{suffix}" for suffix in suffixes]


PLANETOID = {
    "cora": _Planetoid("Cora", 60),
    "citeseer": _Planetoid("CiteSeer", 84),
    "pubmed": _Planetoid("PubMed", 320),
}
NAMES = ("demo", *PLANETOID, "synthetic")


def load_parties(config: RunConfig, *, for_prediction: bool = False) -> list[PartyData]:
    """Return the parties of a run, aligned and checked, with what the method lets each of them see.

    Args:
        config: the settings.
        for_prediction: neither labels nor splits are needed.
    """
    data, train = config.data, config.train
    if data.parties or data.name == "demo":
        parties = _separate_parties(config, with_labels=not for_prediction)
        if train.method == "centralized":
            parties = [pool_parties(parties)]
        elif train.method == "simulated":
            parties = share_edges(parties)
    else:
        whole = load_whole(config)
        if train.method == "centralized":
            parties = [whole.as_party()]
        else:
            fraction = 1.0 if train.method == "simulated" else data.edge_fraction
            parties = keep_labels(partition(whole, data.num_clients, fraction, config.data_seed), train.labels)
    if not for_prediction:
        check_parties(parties, "all" if train.method == "centralized" else train.labels, train.task)
    return parties


def load_whole(config: RunConfig) -> WholeGraph:
    """Return the undivided graph of a named data set, with its splits."""
    name, split, seed = config.data.name, config.data.split, config.data_seed
    if name in PLANETOID:
        known = PLANETOID[name]
        whole = _read_planetoid(known, _raw_folder(known, config.data.root))
        assert whole.labels is not None
        if split == "public":
            return whole
        if split == "paper":
            return replace(whole, splits=splits_per_class(whole.labels, known.per_class, 500, 1000, seed))
        return replace(whole, splits=splits_by_fraction(whole.labels, split, seed))
    if name == "synthetic":
        whole = synthetic(config)
        assert whole.labels is not None
        return replace(whole, splits=splits_by_fraction(whole.labels, _fractions(split, name), seed))
    if name == "demo":
        raise ConfigError('data.name="demo": comes as three parties, not as one graph; use load_parties.')
    if not name:
        raise ConfigError(
            f"data.name: say which data to use, one of {', '.join(NAMES)}, or list folders in data.parties."
        )
    match = difflib.get_close_matches(name, NAMES, n=1)
    hint = f", did you mean {match[0]!r}?" if match else ";"
    raise ConfigError(f"data.name={name!r}: no such data set{hint} known are {', '.join(NAMES)}.")


def choose_splits(party: PartyData, split: Split, seed: int) -> PartyData:
    """Return the party with the splits it came with or, if it has labels only, with splits drawn by class."""
    if party.splits is not None or party.labels is None:
        return party
    return replace(party, splits=splits_by_fraction(party.labels, _fractions(split, party.name), seed))


def _separate_parties(config: RunConfig, *, with_labels: bool) -> list[PartyData]:
    """Return parties that come as such, aligned, with splits, and with labels where the config wants them."""
    data, seed = config.data, config.data_seed
    if data.parties:
        folders = [Path(folder) for folder in data.parties]
        parties = align_in_clear([read_party(folder, data.missing) for folder in folders])
    else:
        parties = news_service(seed)
        if data.split != "paper":
            parties = [replace(party, splits=None) for party in parties]
    if not with_labels:
        return parties
    parties = keep_labels(parties, config.train.labels)
    return [choose_splits(party, data.split, seed) for party in parties]


def _fractions(split: Split, name: str) -> tuple[float, float, float]:
    if split == "public":
        raise ConfigError(f'data.split="public": {name!r} has none, as {", ".join(PLANETOID)} have; use fractions.')
    return OWN_SPLIT if split == "paper" else split


def _raw_folder(known: _Planetoid, root: str | None) -> Path:
    """Return the folder with the raw files: below the root, else in the cache, else downloaded to there."""
    below = Path("planetoid") / known.folder / "raw"
    here = Path(root or os.environ.get("GLASU_DATA_ROOT") or "data") / below
    cached = cache_folder() / below
    for folder in (here, cached):
        if all((folder / file).is_file() for file in known.raw_files()):
            return folder
    try:
        _download_planetoid(known, cached)
    except Exception as error:  # whatever the network, a proxy or the disk had against it
        raise DataError(
            f"{known.folder}: its files are not in {here} and cannot be downloaded ({type(error).__name__}). Fetch "
            f"{', '.join(known.raw_files())} from the folder data of github.com/kimiyoung/planetoid and put them "
            f"into {here}, or set data.root or GLASU_DATA_ROOT to the folder above planetoid/{known.folder}/raw."
        ) from error
    return cached


def cache_folder() -> Path:
    """Return where downloads and converted forms go: GLASU_CACHE, else the user's cache folder."""
    own = os.environ.get("GLASU_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glasu"


def _download_planetoid(known: _Planetoid, folder: Path) -> None:
    """Let PyG download into a temporary folder, and move the files once they are complete."""
    from torch_geometric.datasets import Planetoid

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Planetoid(temporary, known.folder)
        for file in known.raw_files():
            (Path(temporary) / known.folder / "raw" / file).replace(folder / file)


def _read_planetoid(known: _Planetoid, folder: Path) -> WholeGraph:
    from torch_geometric.io import read_planetoid_data

    with warnings.catch_warnings():  # the pickles are of 2016 and name modules that numpy and scipy have moved since
        warnings.simplefilter("ignore")
        try:
            data = read_planetoid_data(str(folder), known.folder.lower())
        except Exception as error:  # a damaged pickle can raise anything
            raise DataError(
                f"{folder}: the files of {known.folder} cannot be read ({error}); fetch them again."
            ) from error
    return WholeGraph.from_pyg(data)
