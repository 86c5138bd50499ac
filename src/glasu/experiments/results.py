"""Result: scores, cost and learning curve of one run of a table; stored as JSON files and as results.csv."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from glasu import __version__
from glasu.errors import DataError
from glasu.experiments.plan import Run
from glasu.files import write_atomically
from glasu.model.task import ACCURACY
from glasu.report import RunReport

EPOCH = 4  # increased when a change of the program changes results; older results are run again
CURVE = ("round", "val_accuracy", "bytes", "exchanges", "seconds")  # stored for every evaluation


@dataclass(frozen=True)
class Row:
    """One line of results.csv; accuracies are fractions."""

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


@dataclass(frozen=True)
class Result:
    """A finished run."""

    row: Row
    curve: tuple[tuple[float, ...], ...]  # per evaluation: the values that CURVE names
    per_client: tuple[float, ...] = ()  # standalone: the test accuracy of each client alone
    versions: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()  # about the data

    @property
    def cell(self) -> tuple[str, str, str]:
        """The cell of a table: data set, method, setting."""
        return self.row.dataset, self.row.method, self.row.setting

    def summary(self) -> str:
        """Return the run in one line."""
        row = self.row
        found = (
            f"test accuracy {ACCURACY.format(row.test_accuracy)}, {row.bytes / 1e6:.1f} MB, {row.cpu_seconds:.1f} CPU s"
        )
        return f"{row.dataset} {row.method} ({row.setting}, seed {row.seed}): {found}"


def make_result(run: Run, report: RunReport) -> Result:
    """Return the part of a report that the tables show."""
    clients, traffic = run.config.data.num_clients, report.traffic
    if run.method != "centralized" and len(report.parties) != clients:
        raise DataError(f"{run.dataset}: comes as {len(report.parties)} parties and cannot be divided among {clients}.")
    row = Row(
        dataset=run.dataset,
        method=run.method,
        setting=run.setting,
        seed=run.seed,
        test_accuracy=report.test.accuracy,
        validation_accuracy=report.validation.accuracy,
        rounds=report.history[-1]["round"],
        bytes=traffic["bytes_to_server"] + traffic["bytes_to_clients"],
        exchanges=traffic["exchanges"],
        cpu_seconds=round(report.seconds["total"], 3),
    )
    curve = tuple(tuple(entry[name] for name in CURVE) for entry in report.history)
    return Result(row, curve, report.test.per_client or (), tuple(report.versions.items()), report.notes)


def store_result(folder: Path, run: Run, result: Result) -> None:
    """Store a result with the digest of its settings."""
    config = run.config.to_dict()
    del config["data"]["root"]  # a path of this machine
    content = {
        "digest": run.config.digest(),
        "row": dict(zip([item.name for item in fields(Row)], astuple(result.row), strict=True)),
        "curve": [dict(zip(CURVE, point, strict=True)) for point in result.curve],
        "per_client": list(result.per_client),
        "versions": dict(result.versions),
        "notes": list(result.notes),
        "epoch": EPOCH,
        "config": config,
    }
    write_atomically(folder / "runs" / f"{run.name}.json", (json.dumps(content, indent=1) + "\n").encode())


def load_result(folder: Path, run: Run) -> Result | None:
    """Return the stored result of a run; None if there is none of the same settings and version."""
    try:
        content: dict[str, Any] = json.loads((folder / "runs" / f"{run.name}.json").read_text(encoding="utf-8"))
        version = content["versions"]["glasu"]
        if (content["digest"], content["epoch"], version) != (run.config.digest(), EPOCH, __version__):
            return None
        return Result(
            Row(**content["row"]),
            tuple(tuple(point[name] for name in CURVE) for point in content["curve"]),
            tuple(content["per_client"]),
            tuple(content["versions"].items()),
            tuple(content["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: run it again
        return None


def format_csv(results: Iterable[Result]) -> str:
    """Return results.csv."""
    return _csv([item.name for item in fields(Row)], (astuple(result.row) for result in results))


def format_curves_csv(results: Iterable[Result]) -> str:
    """Return curves.csv: one line per evaluation of every run."""
    heads = ("dataset", "method", "setting", "seed", *CURVE)
    lines = ((*result.cell, result.row.seed, *point) for result in results for point in result.curve)
    return _csv(heads, lines)


def _csv(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([f"{item:.6g}" if isinstance(item, float) else item for item in line] for line in lines)
    return text.getvalue()
