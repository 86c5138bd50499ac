"""The table of partitions: the ways to divide each data set, the owners of the labels, and the settings.

A row of the table is a data set, a partition, and the owners of the labels: all parties or one party. All methods of a
row have the same settings, except the step sizes in LEARNING_RATES. Because Q = 1, the methods also take the same
number of steps. GLASU uses exact gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from glasu.config import RunConfig
from glasu.config_sections import EVERY_PARTY
from glasu.records import FlatSettings, Sections

COLUMNS = {  # heading -> method
    "alone": "standalone",
    "ensemble": "ensemble",
    "smooth": "smooth",
    "GLASU": "glasu",
    "pooled": "centralized",
}
COMPARED = "GLASU"  # all other columns are compared with this column
PARTITION_KEYS: Mapping[str, FlatSettings] = {  # partition -> its keys of [data]
    "features": {},
    "apart": {},
    "importance": {"concentration": 1.0},
    "correlation": {"correlation": 0.0},  # correlated columns are at one party
    "edges": {"concentration": 1.0},
}
PARTIES = ("dblp_authors", "imdb_movies", "suzhou", "venice", "amsterdam", "demo")  # data sets that consist of parties
BINARY = ("minesweeper", "tolokers")

# Settings of every method: {"model": {...}, "train": {...}}. A data set without an entry has the default settings.
_DEEP = {
    "model": {"backbone": "gcnii", "num_layers": 4, "aggregation_layers": (1, 3), "hidden": 64, "dropout": 0.5},
    "train": {
        "preset": "none",
        "patience": 0,
        "backward": "joint",
        "num_local_steps": 1,
        "num_rounds": 100,
        "evaluate_every": 5,
        "learning_rate": 0.01,
        "weight_decay": 0.001,
    },
}
_MEDIUM = {
    "model": {"backbone": "sage", "num_layers": 3, "aggregation_layers": (0, 1, 2), "hidden": 64, "dropout": 0.0},
    "train": {**_DEEP["train"], "num_rounds": 200, "weight_decay": 0.0005},
}
_SHALLOW = {  # for many feature columns and few nodes; the best model is found after a few rounds
    "model": {"backbone": "sage", "num_layers": 2, "aggregation_layers": (0, 1), "hidden": 64, "dropout": 0.5},
    "train": {**_DEEP["train"], "num_rounds": 60, "weight_decay": 0.0005},
}
SETTINGS: dict[str, Sections] = {
    "cora": _DEEP,
    "citeseer": _DEEP,
    "pubmed": _DEEP,
    "dblp_authors": _DEEP,
    "facebook_pages": _DEEP,
    "minesweeper": _MEDIUM,
    "tolokers": _MEDIUM,
    "squirrel_filtered": _SHALLOW,
}
# (data set, partition) -> the step size of all methods but "pooled", which uses the step size in SETTINGS. An entry
# exists if its step size improves the validation score of every such method by more than a point, compared with the
# step size in SETTINGS.
LEARNING_RATES = {("cora", "apart"): 0.1}


def list_partition_names(dataset: str) -> tuple[str, ...]:
    """Return the partitions of a data set. A data set that consists of parties has only one."""
    return ("relations",) if dataset in PARTIES else tuple(PARTITION_KEYS)


def find_undivided(dataset: str) -> str:
    """Return the partition name for the settings of a pooled run. A pooled run does not divide the data."""
    return list_partition_names(dataset)[0]


def list_rows(dataset: str) -> Iterator[tuple[str, str]]:
    """Yield the partition and the value of `train.labels` of each table row of a data set."""
    for partition in list_partition_names(dataset):
        for labels in (EVERY_PARTY, find_owner(dataset)):
            yield partition, labels


def find_owner(dataset: str) -> str:
    """Return the first party, which has the labels if only one party has them.

    In the partition "apart", this party has features and no edges.
    """
    return "profile" if dataset == "demo" else "a"


def make_settings(dataset: str, partition: str, method: str) -> RunConfig:
    """Return the settings of a method on a divided data set, with labels at all parties."""
    chosen = SETTINGS.get(dataset, {})
    config = RunConfig.from_dict({"data": {"name": dataset}, **chosen}).replace(
        data={"partition": partition, **PARTITION_KEYS.get(partition, {})}, train={"method": method}
    )
    if partition == "apart" and dataset in BINARY:  # few columns: one party has all columns, the other all edges
        config = config.replace(data={"num_clients": 2})
    if dataset in BINARY:
        config = config.replace(train={"task": "binary"})
    step = LEARNING_RATES.get((dataset, partition)) if chosen else None
    return config if step is None else config.replace(train={"learning_rate": step})
