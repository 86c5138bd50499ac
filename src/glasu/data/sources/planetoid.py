"""Cora, CiteSeer and PubMed from the raw files of Planetoid; missing files are downloaded to the cache folder."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from glasu.data.sources import DataSource, RawData, Statistics, find_data_root
from glasu.data.sources.pyg import convert_graph
from glasu.errors import DataError

if TYPE_CHECKING:
    from glasu.config import RunConfig
    from glasu.data.cache.store import Cache
    from glasu.data.party import PartyData

SUFFIXES = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


@dataclass(frozen=True)
class Planetoid:
    """One data set of Planetoid."""

    name: str  # as PyG spells it
    digest: str  # SHA-256 of the digests of all raw files; checked after a download, because the files are pickles

    @property
    def files(self) -> list[str]:
        return [f"ind.{self.name.lower()}.{suffix}" for suffix in SUFFIXES]

    def read(self, config: RunConfig, cache: Cache) -> RawData:
        """Read the raw files in the data root or in the cache folder; otherwise download them to the cache folder."""
        below = Path("planetoid") / self.name / "raw"
        here, cached = find_data_root(config.data.root) / below, cache.root / below
        for folder in (here, cached):
            if all((folder / file).is_file() for file in self.files):
                return RawData([self._read(folder)])
        try:
            self._download(cached)
        except Exception as error:  # the network, a proxy, the disk or PyG can raise any type
            raise DataError(
                f"{self.name}: its files are not in {here} and the download failed ({type(error).__name__}). Fetch "
                f"{', '.join(self.files)} from the folder data of github.com/kimiyoung/planetoid and put them into "
                f"{here}, or set data.root or GLASU_DATA_ROOT to the folder above planetoid/{self.name}/raw."
            ) from None
        return RawData([self._read(cached)])

    def _download(self, folder: Path) -> None:
        """Download the files to a temporary folder, and move them if they are complete and have the known digest."""
        from torch_geometric.datasets import Planetoid as PyGPlanetoid
        from torch_geometric.io import fs

        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fetched = [Path(temporary) / file for file in self.files]
            for file in fetched:
                fs.cp(f"{PyGPlanetoid.url}/{file.name}", temporary)
            digests = (hashlib.sha256(file.read_bytes()).digest() for file in fetched)
            if hashlib.sha256(b"".join(digests)).hexdigest() != self.digest:
                raise DataError("the downloaded files are not the published ones")
            for file in fetched:
                file.replace(folder / file.name)

    def _read(self, folder: Path) -> PartyData:
        from torch_geometric.io import read_planetoid_data

        with warnings.catch_warnings():  # the pickles of 2016 name modules that numpy and scipy have moved since
            warnings.simplefilter("ignore")
            try:
                data = read_planetoid_data(str(folder), self.name.lower())
            except Exception as error:  # a damaged pickle can raise anything
                raise DataError(
                    f"{folder}: the files of {self.name} cannot be read ({error}); fetch them again."
                ) from None
        return convert_graph(data)


CORA = DataSource(
    Planetoid("Cora", "0c183620d48cfe70c51c162cfa4d2d0288a5d6c0cdeac5b857fc92e212546749").read,
    per_class=60,
    paper=Statistics(2_708, 10_556, 1_433, 7),
)
CITESEER = DataSource(
    Planetoid("CiteSeer", "83ff60944e8dfba3343ea36b5e26e4c2ac3c9100ce059b3a61bbd6e20e63da91").read,
    per_class=84,
    paper=Statistics(3_327, 9_104, 3_703, 6),
)
PUBMED = DataSource(
    Planetoid("PubMed", "75ff3d5c07e011150e9fc6656849fe0d49c9bdc9e51d71fed3e047234d6f3bd8").read,
    per_class=320,
    paper=Statistics(19_717, 88_648, 500, 3),
)
