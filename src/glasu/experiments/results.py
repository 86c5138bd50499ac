"""Scores, cost and learning curve of one run of a table, stored as a JSON file and in results.csv."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from glasu import RunReport, __version__
from glasu.data.methods import find_method
from glasu.errors import DataError
from glasu.experiments.plan import Run
from glasu.files import write_atomically
from glasu.model.task import TASKS, Metric, make_task
from glasu.records import RecordError, parse_json, read_record, to_plain
from glasu.report import AloneScores, list_alone

EPOCH = 6  # increase this when results or their format change; runs with older results are repeated


@dataclass(frozen=True)
class Row:
    """One line of results.csv; accuracies are fractions.

    The score is the metric that selects the model: the accuracy, or the ROC AUC if there are two classes.
    """

    dataset: str
    method: str
    setting: str
    seed: int
    test_accuracy: float
    validation_accuracy: float
    rounds: int
    bytes: int
    exchanges: int
    cpu_seconds: float
    metric: str  # name of the metric of the scores
    test_score: float
    validation_score: float

    def find_metric(self) -> Metric:
        """Return the metric of the scores."""
        return next(metric for task in TASKS.values() for metric in task.metrics if metric.name == self.metric)


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation of a learning curve, and the cost of the run up to this evaluation."""

    round: int
    val_accuracy: float
    bytes: int
    exchanges: int
    seconds: float


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    row: Row
    curve: tuple[CurvePoint, ...]
    alone: tuple[AloneScores, ...] = ()  # scores of each party, if parties train alone
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # lines about the data

    @property
    def cell(self) -> tuple[str, str, str]:
        """The cell of a table: data set, method, setting."""
        return self.row.dataset, self.row.method, self.row.setting

    def summary(self) -> str:
        """Return the run in one line."""
        row, metric = self.row, self.row.find_metric()
        score = f"test {metric.title} {metric.format(row.test_score)}"
        found = f"{score}, {row.bytes / 1e6:.1f} MB, {row.cpu_seconds:.1f} CPU s"
        return f"{row.dataset} {row.method} ({row.setting}, seed {row.seed}): {found}"


@dataclass(frozen=True)
class StoredResult:
    """A file in the folder runs/."""

    digest: str  # digest of the settings
    epoch: int
    config: Mapping[str, Any]  # the settings, for people who read the file; without paths of this machine
    result: RunResult


def make_result(run: Run, report: RunReport, notes: tuple[str, ...]) -> RunResult:
    """Return the part of a report that the tables show."""
    clients, traffic = run.config.data.num_clients, report.traffic
    metric = make_task(run.config.train).selected_by.name
    if not find_method(run.config).one_party and len(report.parties) != clients:
        raise DataError(f"{run.dataset}: comes as {len(report.parties)} parties and cannot be divided among {clients}.")
    row = Row(
        dataset=run.dataset,
        method=run.method,
        setting=run.setting,
        seed=run.seed,
        test_accuracy=report.test.accuracy,
        validation_accuracy=report.validation.accuracy,
        rounds=report.history[-1].round,
        bytes=traffic.total_bytes,
        exchanges=traffic.exchanges,
        cpu_seconds=round(report.seconds.total, 3),
        metric=metric,
        test_score=report.test.metrics[metric],
        validation_score=report.validation.metrics[metric],
    )
    curve = tuple(
        CurvePoint(**{item.name: entry[item.name] for item in fields(CurvePoint)}) for entry in report.history
    )
    alone = list_alone([party.name for party in report.parties], report.validation, report.test)
    return RunResult(row, curve, tuple(alone), report.versions, notes)


def store_result(folder: Path, run: Run, result: RunResult) -> None:
    """Store a result with the digest of its settings."""
    config = run.config.to_dict()
    del config["data"]["root"]
    stored = StoredResult(run.config.digest(), EPOCH, config, result)
    write_atomically(folder / "runs" / f"{run}.json", (json.dumps(to_plain(stored), indent=1) + "\n").encode())


def load_result(folder: Path, run: Run) -> RunResult | None:
    """Return the stored result of a run; None if there is no result with the same settings and version of GLASU."""
    stored = _read(folder / "runs" / f"{run}.json")
    if stored is None or (stored.digest, stored.result.versions.get("glasu")) != (run.config.digest(), __version__):
        return None
    return stored.result


def list_stored_rows(folder: Path) -> Iterator[Row]:
    """Yield the row of every stored result, regardless of its settings."""
    for path in sorted((folder / "runs").rglob("*.json")):
        if (stored := _read(path)) is not None:
            yield stored.result.row


def _read(path: Path) -> StoredResult | None:
    """Read a stored result; return None if the file is missing or damaged, or has a different format."""
    try:
        stored = read_record(StoredResult, parse_json(path.read_bytes(), path.name), path.name, finite=False)
    except (OSError, RecordError):
        return None
    return stored if stored.epoch == EPOCH else None


def format_csv(results: Iterable[RunResult]) -> str:
    """Return results.csv."""
    return _format_csv([item.name for item in fields(Row)], (astuple(result.row) for result in results))


def format_curves_csv(results: Iterable[RunResult]) -> str:
    """Return curves.csv: one line per evaluation of every run."""
    heads = ("dataset", "method", "setting", "seed", *(item.name for item in fields(CurvePoint)))
    lines = ((*result.cell, result.row.seed, *astuple(point)) for result in results for point in result.curve)
    return _format_csv(heads, lines)


def _format_csv(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([f"{item:.6g}" if isinstance(item, float) else item for item in line] for line in lines)
    return text.getvalue()
