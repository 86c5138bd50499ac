"""Named data sets and party folders: what a run's config asks for -> the parties as they will train."""

from __future__ import annotations

import difflib
import hashlib
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from glasu.config import refuse_other_count
from glasu.data.alignment import check_parties, keep_labels
from glasu.data.cache.entries import (
    open_aligned,
    open_files,
    open_folder,
    open_partition,
    open_splits_of,
    open_synthetic,
)
from glasu.data.methods import METHODS, override_settings
from glasu.data.partition import WholeGraph, splits_per_class
from glasu.data.paths import cache_folder, data_root
from glasu.data.sources import herigraph, reddit
from glasu.data.sources.demo import news_service
from glasu.data.sources.npz import read_npz
from glasu.data.sources.pyg import PREFIX, read_pyg
from glasu.data.statistics import Statistics, describe
from glasu.errors import ConfigError, DataError

if TYPE_CHECKING:
    from glasu.config import RunConfig, Split
    from glasu.data.party import PartyData, Splits

OWN_SPLIT = (0.6, 0.2, 0.2)  # what "paper" means for data that no paper split


@dataclass(frozen=True)
class _Planetoid:
    folder: str
    per_class: int  # training nodes per class in the paper's split
    digest: (
        str  # SHA-256 over the SHA-256 of each raw file: they are pickles, and a downloaded one is read only if known
    )

    def raw_files(self) -> list[str]:
        suffixes = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
        return [f"ind.{self.folder.lower()}.{suffix}" for suffix in suffixes]


PLANETOID = {
    "cora": _Planetoid("Cora", 60, "0c183620d48cfe70c51c162cfa4d2d0288a5d6c0cdeac5b857fc92e212546749"),
    "citeseer": _Planetoid("CiteSeer", 84, "83ff60944e8dfba3343ea36b5e26e4c2ac3c9100ce059b3a61bbd6e20e63da91"),
    "pubmed": _Planetoid("PubMed", 320, "75ff3d5c07e011150e9fc6656849fe0d49c9bdc9e51d71fed3e047234d6f3bd8"),
}
NAMES = ("demo", *PLANETOID, *herigraph.CITIES, "reddit", "synthetic")
PER_CLASS = {  # training nodes per class; 500 more validate, 1000 test
    **{name: known.per_class for name, known in PLANETOID.items()},
    **dict.fromkeys(("dblp_authors", "imdb_movies", "facebook_pages"), 60),
}


@dataclass(frozen=True)
class Loaded:
    """The parties of a run, and what there is to say about the data set they come from."""

    parties: list[PartyData]
    statistics: Statistics  # of the undivided data
    notes: tuple[str, ...] = ()


def load_parties(config: RunConfig, *, for_prediction: bool = False) -> list[PartyData]:
    """Return the parties of a run, aligned and checked, with what the method lets each of them see.

    Args:
        config: the settings.
        for_prediction: neither labels nor splits are needed.
    """
    return load(config, for_prediction=for_prediction).parties


def load(config: RunConfig, *, for_prediction: bool = False) -> Loaded:
    """Return the parties as `load_parties` does, with the statistics of the whole and notes on where it comes from."""
    data, method = config.data, METHODS[config.train.method]
    opened, notes = _opened(config, with_labels=not for_prediction)
    if isinstance(opened, list) and not method.one_party and data.num_clients != type(data).num_clients:
        refuse_other_count(data.num_clients, len(opened), f"the parties of {data.name or 'data.parties'!r} number")
    used, _ = override_settings(config)
    if isinstance(opened, list):
        parties = method.prepare(opened)
    elif method.one_party:
        parties = [opened.as_party()]
    else:
        fraction = used.data.edge_fraction
        parties = open_partition(opened, data.num_clients, fraction, config.data_seed)
        parties = keep_labels(parties, config.train.labels)
    if not for_prediction:
        check_parties(parties, used.train.labels, used.train.task)
    return Loaded(parties, describe(opened), notes)


def load_whole(config: RunConfig) -> WholeGraph:
    """Return the undivided graph of a named data set, with its splits."""
    opened, _ = _opened(config, with_labels=True)
    if isinstance(opened, WholeGraph):
        return opened
    raise ConfigError(
        f"data.name={config.data.name!r}: comes as {len(opened)} parties, not as one graph; use load_parties."
    )


def choose_splits(party: PartyData, split: Split, seed: int) -> PartyData:
    """Return the party with the splits it came with or, if it has labels only, with splits drawn by class."""
    if party.splits is not None or party.labels is None:
        return party
    return replace(party, splits=open_splits_of(party, _fractions(split, party.name), seed))


def _opened(config: RunConfig, *, with_labels: bool) -> tuple[WholeGraph | list[PartyData], tuple[str, ...]]:
    """Return one graph with splits, or parties that come as such, with splits and labels as the config wants them."""
    if config.data.parties or config.data.name == "demo":
        return _separate_parties(config, with_labels=with_labels), ()
    source, notes = _source(config)
    if isinstance(source, WholeGraph):
        if source.labels is None and not with_labels:
            return source, notes
        return replace(source, splits=_splits(source, config)), notes
    splits = _splits(source[0], config)
    return keep_labels([replace(party, splits=splits) for party in source], config.train.labels), notes


def _source(config: RunConfig) -> tuple[WholeGraph | list[PartyData], tuple[str, ...]]:
    """Read what `data.name` names, with the splits it comes with, and say what must be said about it."""
    name, root = config.data.name, data_root(config.data.root)
    if name in PLANETOID:
        return _read_planetoid(PLANETOID[name], _raw_folder(PLANETOID[name], root)), ()
    if name == "synthetic":
        return open_synthetic(config), ()
    if name == "reddit":
        folder = root / "reddit" / "raw"
        return open_files(name, reddit.files(folder), lambda workspace: reddit.read_reddit(folder, workspace)), ()
    if name.startswith(PREFIX):
        return read_pyg(name), ()
    if name in herigraph.CITIES:
        city = herigraph.CITIES[name]
        folder, source = root / "heri" / city, _npz(root, f"heri_{name}")
        if len(herigraph.present(folder)) == len(herigraph.FILES):
            return open_files("heri", herigraph.files(folder), lambda _: herigraph.read_herigraph(folder).opened()), ()
        if herigraph.present(folder) or not source.is_file():
            raise herigraph.missing_files(city, folder)
        return _read_npz(source), (f"{name}: read from {source}: {herigraph.REPLACED}",)
    if name and Path(name).name == name and _npz(root, name).is_file():
        notes = (f"{name}: {herigraph.REPLACED}",) if name.startswith("heri_") else ()
        return _read_npz(_npz(root, name)), notes
    raise _unknown(name, root)


def _read_npz(path: Path) -> WholeGraph | list[PartyData]:
    return open_files("npz", [path], lambda _: read_npz(path).opened())


def _npz(root: Path, name: str) -> Path:
    return root / name / f"{name}.npz"


CONVERTED = {  # sets that come as .npz files: what these are made of
    "dblp_authors": "data/dblp of the repository liun-online/HeCo (relations APA, APCPA, APTPA)",
    "imdb_movies": "data/imdb5k.mat of the repository chenzl23/AMOGCN (relations MAM, MDM, MYM)",
    "facebook_pages": "the Facebook pages of the repository benedekrozemberczki/MUSAE",
}


def _unknown(name: str, root: Path) -> ConfigError:
    stored = sorted(path.stem for path in root.glob("*/*.npz") if path.stem == path.parent.name)
    known = [*NAMES, *stored]
    listed = f"{', '.join(known)}, {PREFIX}Class/name for a PyG data set"
    if not name:
        return ConfigError(f"data.name: say which data to use, one of {listed}, or list folders in data.parties.")
    if name in CONVERTED:
        return ConfigError(
            f"data.name={name!r}: {_npz(root, name)} is not there; make it of {CONVERTED[name]}, "
            "in the format that docs/datasets.md describes."
        )
    match = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {match[0]!r}?" if match else ";"
    return ConfigError(
        f"data.name={name!r}: no such data set{hint} known are {listed}. A file of your own goes to {_npz(root, name)}."
    )


def _splits(source: WholeGraph | PartyData, config: RunConfig) -> Splits:
    """Return the splits that `data.split` asks for: the source's own, the paper's, or shares."""
    name, split, seed = config.data.name, config.data.split, config.data_seed
    if source.labels is None:
        raise DataError(f"data.name={name!r}: has no labels to learn from.")
    if split == "public" and source.splits is not None:
        return source.splits
    if split == "paper" and name in PER_CLASS:
        return splits_per_class(source.labels, PER_CLASS[name], 500, 1000, seed)
    if split == "paper" and name.removeprefix("heri_") in herigraph.CITIES:
        return open_splits_of(source, herigraph.PAPER_SPLIT, seed)
    if split == "paper" and name == "reddit":
        return open_splits_of(source, reddit.PAPER_SPLIT, seed)
    return open_splits_of(source, _fractions(split, name), seed)


def _separate_parties(config: RunConfig, *, with_labels: bool) -> list[PartyData]:
    """Return parties that come as such, aligned, with splits, and with labels where the config wants them."""
    data, seed = config.data, config.data_seed
    if data.parties:
        folders = [Path(folder) for folder in data.parties]
        parties = open_aligned([open_folder(folder, data.missing) for folder in folders])
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


def _raw_folder(known: _Planetoid, root: Path) -> Path:
    """Return the folder with the raw files: below the root, else in the cache, else downloaded to there."""
    below = Path("planetoid") / known.folder / "raw"
    here, cached = root / below, cache_folder() / below
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


def _download_planetoid(known: _Planetoid, folder: Path) -> None:
    """Let PyG fetch the files into a temporary folder, and move them once they are complete and known to be right."""
    from torch_geometric.datasets import Planetoid
    from torch_geometric.io import fs

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fetched = [Path(temporary) / file for file in known.raw_files()]
        for file in fetched:
            fs.cp(f"{Planetoid.url}/{file.name}", temporary)
        digests = (hashlib.sha256(file.read_bytes()).digest() for file in fetched)
        if hashlib.sha256(b"".join(digests)).hexdigest() != known.digest:
            raise DataError("the files that came are not the published ones")
        for file in fetched:
            file.replace(folder / file.name)


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
