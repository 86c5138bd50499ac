"""The runs of every table, with the settings of each method on each data set."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from glasu import registry
from glasu.config import ModelConfig, RunConfig
from glasu.data.methods import find_method
from glasu.errors import ConfigError
from glasu.experiments import partitions
from glasu.records import FlatSettings

METHOD_SETTINGS: Mapping[str, FlatSettings] = {  # method of a table -> its keys of [train]
    "centralized": {"method": "centralized"},
    "standalone": {"method": "standalone", "num_local_steps": 1},
    "ensemble": {"method": "ensemble", "num_local_steps": 1},
    "smooth": {"method": "smooth", "num_local_steps": 1},
    "simulated": {"method": "simulated", "num_local_steps": 1},
    "glasu-1": {"method": "glasu", "num_local_steps": 1, "backward": "joint"},
    "glasu-4": {"method": "glasu", "num_local_steps": 4},
}

# Every method runs all rounds with the settings in the files.
AS_WRITTEN: FlatSettings = {"preset": "none", "patience": 0}
TUNED_AS = {"ensemble": "standalone", "smooth": "standalone"}  # method -> the method whose tuned settings it uses

NATURAL_RELATIONS = {  # data sets with one client per relation
    "dblp_authors": ("APA", "APCPA", "APTPA"),
    "imdb_movies": ("MAM", "MDM", "MYM"),
}
CITIES = ("suzhou", "venice", "amsterdam")  # data sets with one client per relation
LAYERS = {4: (0, 1, 2, 3), 2: (1, 3), 1: (3,)}  # K -> the aggregation layers of a network with four layers
STALENESS = (2, 4, 8, 16)
CLIENT_COUNTS = (3, 5, 7)
COMPARED_BACKBONES = ("gcn", "gat", "gcnii")
STOP_AT = {
    "cora": 0.8,
    "citeseer": 0.73,
    "pubmed": 0.83,
    "dblp_authors": 0.9,
}  # data set -> validation accuracy at which a run of the table `stale` stops
QUICK_SHARE = 4  # --quick trains for a quarter of the rounds
TWO = ("pubmed", "dblp_authors")  # dblp_authors replaces Amsterdam, whose features are not available
DATASETS: dict[str, tuple[str, ...]] = {  # table -> its data sets
    "accuracy": ("cora", "citeseer", "pubmed", *CITIES, "reddit", *NATURAL_RELATIONS),
    "lazy": TWO,
    "stale": TWO,
    "clients": ("citeseer", "pubmed"),
    "backbones": ("pubmed",),
    "partitions": (
        "cora",
        "citeseer",
        "pubmed",
        "dblp_authors",
        "facebook_pages",
        "minesweeper",
        "tolokers",
        "squirrel_filtered",
    ),
}
TABLE_NAMES = tuple(DATASETS)
PAPER_TABLES = tuple(name for name in TABLE_NAMES if name != "partitions")
QUICK_DATASETS = {"partitions": ("cora", "minesweeper")}  # tables with fewer data sets if --quick is set


@functools.cache
def read_settings(dataset: str, method: str, backbone: str = "gcnii") -> RunConfig:
    """Return the settings of a method on a data set: those of its file in tuned/, or, without a file, the defaults."""
    path = find_tuned_file(dataset, TUNED_AS.get(method, method), backbone)
    if path.is_file():
        return RunConfig.from_toml(path).replace(train={**AS_WRITTEN, "method": METHOD_SETTINGS[method]["method"]})
    config = RunConfig.from_dict({"data": {"name": dataset}, "train": {**AS_WRITTEN, **METHOD_SETTINGS[method]}})
    return config.replace(model={"backbone": backbone})


def find_tuned_file(dataset: str, method: str, backbone: str = "gcnii") -> Path:
    """Return the path of tuned settings; the file may not exist."""
    name = method if backbone == "gcnii" else f"{method}-{backbone}"
    return Path(str(resources.files("glasu.experiments"))) / "tuned" / dataset / f"{name}.toml"


@dataclass(frozen=True)
class Run:
    """One training run of a table."""

    dataset: str
    method: str
    setting: str  # describes the settings that the name of the method does not determine
    seed: int
    config: RunConfig

    def __str__(self) -> str:
        """Return a relative path without suffix. Runs with different settings have different paths."""
        dataset, setting = (re.sub(r"[^\w.]+", "-", text).strip("-") for text in (self.dataset, self.setting))
        return f"{dataset}/{self.method}-{setting}/seed-{self.seed}-{self.config.digest()[:8]}"


@dataclass(frozen=True)
class PartitionRow:
    """One row of the table of partitions: for each column a run, or the reason why there is none."""

    dataset: str
    partition: str
    labels: str  # as in `train.labels`
    runs: Mapping[str, Run | str]  # by heading


@dataclass(frozen=True)
class Plan:
    """Lists the runs of tables."""

    settings: Callable[[str, str, str], RunConfig] = read_settings  # (data set, method, backbone) -> settings
    divided: Callable[[str, str, str], RunConfig] = partitions.make_settings  # (data set, partition, method)
    stop_at: Mapping[str, float] = field(default_factory=lambda: STOP_AT)
    datasets: Mapping[str, Sequence[str]] = field(default_factory=lambda: DATASETS)

    def list_runs(
        self, table: str, datasets: Sequence[str] | None, seeds: Sequence[int], *, quick: bool = False
    ) -> list[Run]:
        """Return the runs of a table, ordered by seed, so that an interrupted command has finished the first seeds.

        Args:
            table: one of `TABLE_NAMES`.
            datasets: names of data sets; None: the data sets of the table.
            seeds: seeds of data, splits and weights.
            quick: train for a quarter of the rounds.
        """
        runs = []
        for seed in seeds:
            for run in self.list_cells(
                table, self.choose_datasets(table, quick=quick) if datasets is None else datasets
            ):
                rounds = run.config.train.num_rounds
                changes = {"seed": seed, "num_rounds": max(1, rounds // QUICK_SHARE) if quick else rounds}
                runs.append(replace(run, seed=seed, config=run.config.replace(train=changes)))
        return runs

    def choose_datasets(self, table: str, *, quick: bool = False) -> Sequence[str]:
        """Return the data sets of a table; with `quick`, only some data sets of a large table."""
        chosen = self.datasets[table]
        return [name for name in chosen if name in QUICK_DATASETS.get(table, chosen)] if quick else chosen

    def list_cells(self, table: str, datasets: Sequence[str]) -> list[Run]:
        """Return one run per cell of a table. Its seed is the seed in the settings of the method."""
        if table == "partitions":  # rows share runs
            found = [run for dataset in datasets for row in self.list_partitions(dataset) for run in row.runs.values()]
            return list({str(run): run for run in found if isinstance(run, Run)}.values())
        cells = {
            "accuracy": self._list_accuracy_runs,
            "lazy": self._list_lazy_runs,
            "stale": self._list_stale_runs,
            "clients": self._list_clients_runs,
            "backbones": self._list_backbones_runs,
        }[table]
        return [
            Run(dataset, method, describe_setting(config), config.train.seed, config)
            for dataset in datasets
            for method, config in cells(dataset)
        ]

    def list_partitions(self, dataset: str) -> list[PartitionRow]:
        """Return all rows of the table of partitions that belong to a data set."""
        rows = []
        for partition, labels in partitions.list_rows(dataset):
            runs: dict[str, Run | str] = {}
            for heading, method in partitions.COLUMNS.items():
                try:
                    runs[heading] = self._make_partition_run(dataset, partition, labels, method)
                except ConfigError as error:  # the settings do not fit together, for example an ensemble without labels
                    runs[heading] = str(error)
            rows.append(PartitionRow(dataset, partition, labels, runs))
        return rows

    def _make_partition_run(self, dataset: str, partition: str, labels: str, method: str) -> Run:
        """Return a run of the table of partitions.

        Pooled data does not depend on the partition, so all table rows of one data set share the centralized run.
        """
        if registry.load("method", method).one_party:
            config = self.divided(dataset, partitions.find_undivided(dataset), method)
            where = "undivided"
        else:
            config = self.divided(dataset, partition, method).replace(train={"labels": labels})
            where = f"{partition} labels={labels}"
        name = f"{method}-{config.train.num_local_steps}" if _chooses_exchanges(config) else method
        return Run(dataset, name, f"{where} {describe_setting(config)}", config.train.seed, config)

    def _list_accuracy_runs(self, dataset: str) -> Iterator[tuple[str, RunConfig]]:
        """Yield every method."""
        for method in METHOD_SETTINGS:
            yield method, self.settings(dataset, method, "gcnii")

    def _list_lazy_runs(self, dataset: str) -> Iterator[tuple[str, RunConfig]]:
        """Yield GLASU-4 with a decreasing number of aggregation layers."""
        for layers in LAYERS.values():
            yield "glasu-4", self._find_glasu_4_settings(dataset).replace(model={"aggregation_layers": layers})

    def _list_stale_runs(self, dataset: str) -> Iterator[tuple[str, RunConfig]]:
        """Yield GLASU with increasing numbers of local steps Q. A run ends at a target accuracy or a limit of steps."""
        if dataset not in self.stop_at:
            return
        config = self._find_glasu_4_settings(dataset)
        steps = config.train.num_rounds * config.train.num_local_steps
        for Q in STALENESS:
            goal = {"num_rounds": max(1, steps // Q), "evaluate_every": 1, "stop_at": self.stop_at[dataset]}
            yield "glasu-4", config.replace(train={"num_local_steps": Q, **goal})

    def _list_clients_runs(self, dataset: str) -> Iterator[tuple[str, RunConfig]]:
        """Yield runs with an increasing number of clients, for data sets that consist of one graph."""
        if dataset in NATURAL_RELATIONS or dataset in CITIES:
            return
        yield "centralized", self.settings(dataset, "centralized", "gcnii")
        for method in ("standalone", "glasu-4"):
            for count in CLIENT_COUNTS:
                yield method, self.settings(dataset, method, "gcnii").replace(data={"num_clients": count})

    def _list_backbones_runs(self, dataset: str) -> Iterator[tuple[str, RunConfig]]:
        """Yield GLASU-4 with three graph neural networks."""
        for backbone in COMPARED_BACKBONES:
            yield "glasu-4", self.settings(dataset, "glasu-4", backbone)

    def _find_glasu_4_settings(self, dataset: str) -> RunConfig:
        return self.settings(dataset, "glasu-4", "gcnii")


def _chooses_exchanges(config: RunConfig) -> bool:
    """Return whether the settings, not the method, decide which layers aggregate."""
    return not find_method(config).prescribes("model", "aggregation_layers")


def describe_setting(config: RunConfig) -> str:
    """Return the settings that the name of a method does not determine, as text."""
    model, train = config.model, config.train
    parts = [] if find_method(config).one_party else [f"M={config.data.num_clients}"]
    if _chooses_exchanges(config):
        parts += [f"K={len(model.aggregation_layers)}", f"Q={train.num_local_steps}"]
    parts.append(model.backbone)
    if model.num_layers != ModelConfig.num_layers:
        parts.append(f"L={model.num_layers}")
    if train.stop_at:
        parts.append(f"to {100 * train.stop_at:g} %")
    return " ".join(parts)
