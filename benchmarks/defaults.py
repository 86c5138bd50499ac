"""Are the default settings good on data of different kinds?

    python benchmarks/defaults.py --datasets cora,actor --seeds 10 --runs defaults.csv

Every data set is divided among three parties, or has one party per relation. Of each class, 60 % of the nodes are for
training, 20 % for validation and 20 % for testing. `glasu` is `RunConfig()`, whose preset chooses the settings. The
alternatives are:

alone    the party that is best on validation, by its model or by label propagation
ensemble averaged class probabilities of the parties that trained alone
smooth   these averages, propagated over the edges of every party
linear   logistic regression on the pooled features; C is chosen on validation
sage     two layers of GraphSAGE on the pooled data, written with torch only; the epoch is chosen on validation
gcn      two layers of GCN, trained like sage

Each of the first three alternatives tries the settings of all candidates of the preset and the settings without a
preset, and uses those with its best validation score.

`--partition apart` gives features and edges to different parties. The score is the test accuracy, or the ROC AUC for
minesweeper and tolokers. The table shows the mean over the seeds and, in brackets, the 90 % interval of the paired
difference, glasu minus the alternative. Runs in the file are not repeated.

Two options run only some methods and add a table of the change of the score. `--timestamps` gives every party one more
column, which contains the seconds since 1970 of random times within a year and is independent of the classes. With
`--labels a`, only party a has labels.
"""

from __future__ import annotations

import argparse
import csv
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import MaxAbsScaler
from torch import Tensor, nn

import glasu
from features import add_timestamps
from glasu.report import Baseline
from glasu.runtime.baselines import list_settings, train_baselines
from pairs import find_interval
from tables import append_rows, markdown, place, positive, show

BINARY = ("minesweeper", "tolokers")
DATASETS = (
    "wisconsin",
    "cora",
    "citeseer",
    "squirrel_filtered",
    "actor",
    "minesweeper",
    "blogcatalog",
    "pubmed",
    "tolokers",
    "facebook_pages",
    "imdb_movies",
    "dblp_authors",
)
METHODS = ("glasu", "alone", "ensemble", "smooth", "linear", "sage", "gcn")
FIELDS = ("dataset", "timestamps", "seed", "method", "score", "validation", "chosen", "rounds", "megabytes", "seconds")
HIDDEN, EPOCHS, DROPOUT, RATE, DECAY = 64, 200, 0.5, 0.01, 5e-4
STRENGTHS = (0.01, 0.1, 1.0, 10.0)
Row = dict[str, Any]


def apply_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """Return W x + b; x may be sparse."""
    result: Tensor = x @ linear.weight.T
    return result if linear.bias is None else result + linear.bias


def drop(x: Tensor) -> Tensor:
    """Apply dropout; in a sparse matrix, only to the stored values."""
    if x.layout is not torch.sparse_csr:
        return nn.functional.dropout(x, DROPOUT)
    values = nn.functional.dropout(x.values(), DROPOUT)
    return torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), values, x.shape)


class Sage(nn.Module):
    """One layer: W x + V mean(x of the neighbours)."""

    def __init__(self, width: int, out: int, adjacency: Tensor) -> None:
        super().__init__()
        self.own, self.others, self.adjacency = nn.Linear(width, out), nn.Linear(width, out, bias=False), adjacency

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = apply_linear(self.own, x) + self.adjacency @ apply_linear(self.others, x)
        return result


class Gcn(nn.Module):
    """One layer: A_hat x W."""

    def __init__(self, width: int, out: int, adjacency: Tensor) -> None:
        super().__init__()
        self.linear, self.adjacency = nn.Linear(width, out), adjacency

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.adjacency @ apply_linear(self.linear, x)
        return result


def make_config(dataset: str, seed: int, partition: str, labels: str = "all") -> glasu.RunConfig:
    """Return the default settings for a data set; `labels` is the party that has the labels, or "all"."""
    data: dict[str, Any] = {"name": dataset, "split": (0.6, 0.2, 0.2), "partition": partition}
    if partition == "apart" and dataset in BINARY:
        data["num_clients"] = 2  # these data sets have few columns, so one party holds all of them
    train = {"seed": seed, "labels": labels, **({"task": "binary"} if dataset in BINARY else {})}
    return glasu.RunConfig.from_dict({"data": data, "train": train})


def score(truth: NDArray[Any], scores: NDArray[Any], *, binary: bool) -> float:
    """Return accuracy, or ROC AUC where there are two classes."""
    return float(roc_auc_score(truth, scores[:, 1]) if binary else (scores.argmax(axis=1) == truth).mean())


def pool(parties: Sequence[glasu.PartyData]) -> tuple[sp.csr_array, sp.csr_array]:
    """Return all features side by side, scaled to -1..1, and the union of all edges in both directions."""
    features = sp.hstack(
        [
            sp.csr_array(np.asarray(each.features) if isinstance(each.features, np.ndarray) else each.features)
            for each in parties
        ]
    )
    count = parties[0].num_nodes
    adjacency = sp.csr_array((count, count), dtype=np.float32)
    for each in parties:
        ones = np.ones(each.graph.num_edges, np.float32)
        adjacency = (
            adjacency + sp.csc_array((ones, each.graph.indices, each.graph.indptr), shape=(count, count)).tocsr()
        )
    adjacency = adjacency + adjacency.T
    adjacency.data[:] = 1.0
    return sp.csr_array(MaxAbsScaler().fit_transform(features)), sp.csr_array(adjacency)


def to_tensor(matrix: sp.csr_array) -> Tensor:
    matrix = sp.csr_array(matrix, dtype=np.float32)
    return torch.sparse_csr_tensor(
        torch.from_numpy(matrix.indptr.astype(np.int64)),
        torch.from_numpy(matrix.indices.astype(np.int64)),
        torch.from_numpy(matrix.data),
        matrix.shape,
    )


def normalise(adjacency: sp.csr_array, layer: type[nn.Module]) -> Tensor:
    """Return D^-1 A for SAGE, D^-1/2 (A + I) D^-1/2 for GCN."""
    if layer is Gcn:
        adjacency = adjacency + sp.eye_array(adjacency.shape[0], dtype=np.float32)
    degree = np.maximum(adjacency.sum(axis=1), 1e-12)
    if layer is Sage:
        return to_tensor(sp.diags_array(1 / degree) @ adjacency)
    root = sp.diags_array(1 / np.sqrt(degree))
    return to_tensor(root @ adjacency @ root)


def train_pooled(
    layer: Callable[[int, int, Tensor], nn.Module], parties: Sequence[glasu.PartyData], seed: int, *, binary: bool
) -> tuple[float, float]:
    """Train two layers on pooled data; return the test and validation scores of the best epoch on validation."""
    features, adjacency = pool(parties)
    party = parties[0]
    assert party.labels is not None
    assert party.splits is not None
    matrix = normalise(adjacency, Sage if layer is Sage else Gcn)
    torch.manual_seed(seed)
    is_dense = features.nnz > 0.3 * features.shape[0] * features.shape[1]
    x = torch.from_numpy(features.toarray().astype(np.float32)) if is_dense else to_tensor(features)
    labels = torch.from_numpy(party.labels)
    first, second = layer(x.shape[1], HIDDEN, matrix), layer(HIDDEN, len(party.classes), matrix)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=RATE, weight_decay=DECAY)
    splits = party.splits
    best = (-1.0, 0.0)
    known = splits.train[party.labels[splits.train] >= 0]
    for _ in range(EPOCHS):
        hidden = drop(first(drop(x)).relu())
        loss = nn.functional.cross_entropy(second(hidden)[known], labels[known])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            scores = second(first(x).relu()).softmax(dim=1).numpy()
        found = [score(party.labels[part], scores[part], binary=binary) for part in (splits.validation, splits.test)]
        if found[0] > best[0]:
            best = found[0], found[1]
    return best[1], best[0]


def train_linear(parties: Sequence[glasu.PartyData], *, binary: bool) -> tuple[float, float]:
    """Return the test and validation scores of logistic regression on the pooled features."""
    features, _ = pool(parties)
    party = parties[0]
    assert party.labels is not None
    assert party.splits is not None
    splits, labels = party.splits, party.labels
    known = splits.train[labels[splits.train] >= 0]
    best = (-1.0, 0.0)
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=300).fit(features[known], labels[known])
        scores = np.zeros((len(labels), len(party.classes)))
        scores[:, model.classes_] = model.predict_proba(features)
        found = [score(labels[part], scores[part], binary=binary) for part in (splits.validation, splits.test)]
        if found[0] > best[0]:
            best = found[0], found[1]
    return best[1], best[0]


def pick_party(baseline: Baseline) -> tuple[float, float]:
    """Return the test and validation scores of the party whose model or label propagation validates best."""
    assert baseline.validation is not None
    assert baseline.test is not None
    pairs = []
    for field in ("per_client", "per_client_propagation"):
        validation, test = (getattr(scores, field) or () for scores in (baseline.validation, baseline.test))
        pairs += [(here, there) for here, there in zip(validation, test, strict=True) if here is not None]
    here, there = max(pairs, key=lambda pair: pair[0])
    return there, here


def run_with_owner(dataset: str, seed: int, partition: str, owner: str, done: Mapping[str, Row]) -> list[Row]:
    """Run glasu with the labels at one party, unless `done` contains this run."""
    method, metric, start = name_owner(owner), "roc_auc" if dataset in BINARY else "accuracy", time.process_time()
    if method in done:
        return []
    config = make_config(dataset, seed, partition, owner)
    report = glasu.train(glasu.load_parties(config), config, workers=1)
    return [
        {
            "dataset": dataset,
            "timestamps": 0,
            "seed": seed,
            "method": method,
            "score": report.test.metrics[metric],
            "validation": report.validation.metrics[metric],
            "chosen": f"{report.config.model.backbone} {report.config.train.backward}",
            "rounds": report.validation.round,
            "megabytes": report.traffic.total_bytes / 1e6,
            "seconds": time.process_time() - start,
        }
    ]


def name_owner(owner: str) -> str:
    """Return the method name of a run in which only `owner` has labels."""
    return f"glasu, labels at {owner}"


def run(dataset: str, seed: int, partition: str, *, timestamps: bool, done: Mapping[str, Row]) -> list[Row]:
    """Run the missing methods of one data set and seed."""
    binary, found, config = dataset in BINARY, [], make_config(dataset, seed, partition)
    parties = glasu.load_parties(config)
    if timestamps:
        parties = [add_timestamps(party, number) for number, party in enumerate(parties)]

    def add(method: str, test: float, validation: float, start: float, **more: Any) -> None:
        if method in done:
            return
        spent = time.process_time() - start
        about = {"dataset": dataset, "timestamps": int(timestamps), "seed": seed, "method": method}
        found.append({**about, "score": test, "validation": validation, "seconds": spent, **more})

    metric, start = "roc_auc" if binary else "accuracy", time.process_time()
    if "glasu" not in done:
        report = glasu.train(parties, config, workers=1)
        chosen = f"{report.config.model.backbone} {report.config.train.backward}"
        test, validation = report.test.metrics[metric], report.validation.metrics[metric]
        size = report.traffic.total_bytes / 1e6
        add("glasu", test, validation, start, chosen=chosen, rounds=report.validation.round, megabytes=size)
    if timestamps:
        return found
    if not done.keys() >= {"alone", "ensemble", "smooth"}:
        start = time.process_time()
        baselines = train_baselines(list_settings(config, None), lambda _: parties)
        add("alone", *pick_party(baselines["standalone"]), start)
        for method in ("ensemble", "smooth"):
            scores = baselines[method]
            assert scores.validation is not None
            assert scores.test is not None
            add(method, scores.test.metrics[metric], scores.validation.metrics[metric], start)
    for method, layer in (("sage", Sage), ("gcn", Gcn)):
        if method not in done:
            start = time.process_time()
            add(method, *train_pooled(layer, parties, seed, binary=binary), start)
    if "linear" not in done:
        start = time.process_time()
        add("linear", *train_linear(parties, binary=binary), start)
    return found


def read_runs(path: Path) -> list[Row]:
    """Return the finished runs."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {**row, "seed": int(row["seed"]), "timestamps": int(row["timestamps"]), "score": float(row["score"])}
            for row in csv.DictReader(file)
        ]


def compare(rows: Sequence[Row], dataset: str) -> list[str] | None:
    """Return a row of the table: mean scores, and intervals of their differences from glasu."""
    scores: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["dataset"] == dataset and not row["timestamps"]:
            scores.setdefault(row["method"], {})[row["seed"]] = 100 * row["score"]
    if "glasu" not in scores:
        return None
    cells = []
    for method in METHODS:
        own = scores.get(method, {})
        seeds = sorted(own.keys() & scores["glasu"].keys())
        differences = [scores["glasu"][seed] - own[seed] for seed in seeds]
        cell = f"{fmean(own.values()):.1f}" if own else "-"
        if method != "glasu" and len(seeds) > 1:
            cell += " ({:+.1f}..{:+.1f})".format(*find_interval(differences))
        cells.append(cell)
    own_rows = [row for row in rows if row["dataset"] == dataset and row["method"] == "glasu" and not row["timestamps"]]
    counts: dict[str, int] = {}
    for row in own_rows:
        counts[row["chosen"]] = counts.get(row["chosen"], 0) + 1
    listed = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    megabytes = fmean(float(row["megabytes"]) for row in own_rows)
    return [dataset, *cells, listed, f"{megabytes:.0f}", str(len(own_rows))]


def compare_change(rows: Sequence[Row], dataset: str, method: str = "glasu", timestamps: int = 0) -> list[str] | None:
    """Return a row of a table of changes: the difference between the score and that of plain glasu, paired by seed."""
    changed, plain = (
        {
            row["seed"]: 100 * row["score"]
            for row in rows
            if (row["dataset"], row["method"], row["timestamps"]) == (dataset, *wanted)
        }
        for wanted in ((method, timestamps), ("glasu", 0))
    )
    seeds = sorted(changed.keys() & plain.keys())
    if not seeds:
        return None
    changes = [changed[seed] - plain[seed] for seed in seeds]
    interval = "{:+.1f} to {:+.1f}".format(*find_interval(changes)) if len(seeds) > 1 else ""
    return [dataset, f"{fmean(changes):+.1f}", interval, str(len(seeds))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=lambda text: text.split(","), default=list(DATASETS), metavar="A,B")
    parser.add_argument("--seeds", type=positive, default=10, metavar="N", help="seeds 0..N-1")
    parser.add_argument(
        "--partition", default="features", help="data.partition of data sets that are one graph (%(default)s)"
    )
    parser.add_argument("--labels", metavar="PARTY", help="the party that has the labels; only glasu runs")
    parser.add_argument("--timestamps", action="store_true", help="add a column of random times to every party")
    parser.add_argument("--runs", type=place, default=Path("defaults.csv"), metavar="FILE", help="finished runs")
    parser.add_argument("--out", type=place, metavar="FILE", help="also write the tables here")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for seed in range(given.seeds):
        for dataset in given.datasets:
            done = {
                row["method"]: row
                for row in read_runs(given.runs)
                if (row["dataset"], row["seed"], row["timestamps"]) == (dataset, seed, int(given.timestamps))
            }
            if given.labels is None:
                found = run(dataset, seed, given.partition, timestamps=given.timestamps, done=done)
            else:
                found = run_with_owner(dataset, seed, given.partition, given.labels, done)
            append_rows(given.runs, FIELDS, found)
    rows = read_runs(given.runs)
    table = [row for dataset in DATASETS if (row := compare(rows, dataset)) is not None]
    text = markdown(["data set", *METHODS, "chosen", "MB", "seeds"], table)
    owners = sorted({row["method"] for row in rows} - {*METHODS})
    for title, method, timestamps in (("timestamps", "glasu", 1), *((name, name, 0) for name in owners)):
        changed = [each for dataset in DATASETS if (each := compare_change(rows, dataset, method, timestamps))]
        if changed:
            text += "\n\n" + markdown(["data set", f"change by {title}", "90 % interval", "seeds"], changed)
    show(text, given.out)


if __name__ == "__main__":
    main()
