"""Which runs make up each of the paper's tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from glasu.config import ModelConfig, RunConfig
from glasu.experiments.settings import METHODS, settings

RELATIONS = {"dblp_authors": ("APA", "APCPA", "APTPA"), "imdb_movies": ("MAM", "MDM", "MYM")}  # one client each
CITIES = ("suzhou", "venice", "amsterdam")  # one client per relation, too
EVERYWHERE = ("cora", "citeseer", "pubmed", *CITIES, "reddit", *RELATIONS)
TWO = ("pubmed", "dblp_authors")  # dblp_authors in the place of Amsterdam, whose features are not to be had
LAYERS = {4: (0, 1, 2, 3), 2: (1, 3), 1: (3,)}  # K -> the aggregation layers of a network of four
STALENESS = (2, 4, 8, 16)
CLIENTS = (3, 5, 7)
BACKBONES = ("gcn", "gat", "gcnii")
GOALS = {"cora": 0.8, "citeseer": 0.73, "pubmed": 0.83, "dblp_authors": 0.9}  # validation accuracy to reach when stale
QUICK_SHARE = 4  # --quick trains for this part of the rounds


@dataclass(frozen=True)
class Run:
    """One training run of a table."""

    dataset: str
    method: str
    setting: str  # what the method's name leaves open
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        """Where the run is stored: a relative path without an ending, other ones for other settings."""
        where, what = (re.sub(r"[^\w.]+", "-", text).strip("-") for text in (self.dataset, self.setting))
        return f"{where}/{self.method}-{what}/seed-{self.seed}-{self.config.digest()[:8]}"


def _run(dataset: str, method: str, config: RunConfig) -> Run:
    model, train = config.model, config.train
    parts = [] if method == "centralized" else [f"M={config.data.num_clients}"]
    if method.startswith("glasu"):
        parts += [f"K={len(model.aggregation_layers)}", f"Q={train.num_local_steps}"]
    parts.append(model.backbone)
    if model.num_layers != ModelConfig.num_layers:
        parts.append(f"L={model.num_layers}")
    if train.stop_at:
        parts.append(f"to {100 * train.stop_at:g} %")
    return Run(dataset, method, " ".join(parts), train.seed, config)


def accuracy(datasets: Sequence[str]) -> Iterator[Run]:
    """Yield every method on every data set."""
    for dataset in datasets:
        for method in METHODS:
            yield _run(dataset, method, settings(dataset, method))


def lazy(datasets: Sequence[str]) -> Iterator[Run]:
    """Yield GLASU-4 with fewer and fewer aggregation layers."""
    for dataset in datasets:
        for layers in LAYERS.values():
            config = settings(dataset, "glasu-4").replace(model={"aggregation_layers": layers})
            yield _run(dataset, "glasu-4", config)


def stale(datasets: Sequence[str]) -> Iterator[Run]:
    """Yield GLASU with more and more local steps, until a validation accuracy is reached; all may take as many."""
    for dataset in [name for name in datasets if name in GOALS]:
        config = settings(dataset, "glasu-4")
        steps = config.train.num_rounds * config.train.num_local_steps
        for Q in STALENESS:
            goal = {
                "num_local_steps": Q,
                "num_rounds": max(1, steps // Q),
                "evaluate_every": 1,
                "stop_at": GOALS[dataset],
            }
            yield _run(dataset, "glasu-4", config.replace(train=goal))


def clients(datasets: Sequence[str]) -> Iterator[Run]:
    """Yield more and more clients, where one graph is divided."""
    for dataset in datasets:
        if dataset in RELATIONS or dataset in CITIES:
            continue
        yield _run(dataset, "centralized", settings(dataset, "centralized"))
        for method in ("standalone", "glasu-4"):
            for count in CLIENTS:
                yield _run(dataset, method, settings(dataset, method).replace(data={"num_clients": count}))


def backbones(datasets: Sequence[str]) -> Iterator[Run]:
    """Yield GLASU-4 with three graph neural networks."""
    for dataset in datasets:
        for backbone in BACKBONES:
            yield _run(dataset, "glasu-4", settings(dataset, "glasu-4", backbone))


TABLES: dict[str, tuple[Callable[[Sequence[str]], Iterator[Run]], tuple[str, ...]]] = {
    "accuracy": (accuracy, EVERYWHERE),
    "lazy": (lazy, TWO),
    "stale": (stale, TWO),
    "clients": (clients, ("citeseer", "pubmed")),
    "backbones": (backbones, ("pubmed",)),
}


def plan(table: str, datasets: Sequence[str] | None, seeds: Sequence[int], *, quick: bool = False) -> list[Run]:
    """Return the runs of a table, seed by seed, so that a run that is stopped early has whole seeds.

    Args:
        table: its name.
        datasets: on which data sets; None: those of the table.
        seeds: of data, splits and weights.
        quick: a quarter of the rounds.
    """
    make, usual = TABLES[table]
    runs = []
    for seed in seeds:
        for run in make(usual if datasets is None else datasets):
            rounds = run.config.train.num_rounds
            changes = {"seed": seed, "num_rounds": max(1, rounds // QUICK_SHARE) if quick else rounds}
            runs.append(Run(run.dataset, run.method, run.setting, seed, run.config.replace(train=changes)))
    return runs
