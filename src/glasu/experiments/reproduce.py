"""Reproduce the paper's tables: run what is missing, and write tables and plots of what is there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glasu.data.sources.catalog import load
from glasu.data.statistics import summary
from glasu.errors import DataError, GlasuError
from glasu.experiments.execution import Progress, run_missing
from glasu.experiments.figures import render
from glasu.experiments.plan import TABLES, Run, plan
from glasu.experiments.results import Result, as_csv, curves_as_csv, stored
from glasu.experiments.tables import Table, as_markdown, tables
from glasu.files import hold_folder, write_atomically

QUICK = "Quick: a quarter of the rounds, to see it work; not to be compared with the paper."


@dataclass(frozen=True)
class Reproduction:
    """What the folder shows now."""

    results: tuple[Result, ...]
    tables: tuple[Table, ...]
    folder: Path


def reproduce(
    names: Sequence[str],
    out: Path,
    *,
    datasets: Sequence[str] | None = None,
    seeds: int = 5,
    jobs: int = 1,
    quick: bool = False,
    command: str = "",
    progress: Progress = lambda done, total, line: None,
) -> Reproduction:
    """Run the grids of some tables, as far as their results are not in the folder yet, and write what they show.

    Args:
        names: of the tables, see `plan.TABLES`.
        out: the folder for runs/, results.csv, curves.csv, tables.md and report.html.
        datasets: on which data sets; None: those of each table that are to be had.
        seeds: how many, from 0.
        jobs: how many runs at once, a process each.
        quick: a quarter of the rounds.
        command: what was typed, for the head of the tables.
        progress: is told how many of how many runs are done, and what was the last of them, or the data, in a line.
    """
    start = time.monotonic()
    with hold_folder(out):
        wanted = available(names, datasets, lambda line: progress(0, 0, line))
        if not wanted:
            raise DataError("there is no data set to run these tables on; docs/datasets.md says what to fetch.")
        runs = {
            run.name: run
            for name in names
            for run in plan(name, _of(name, wanted, datasets), range(seeds), quick=quick)
        }
        try:
            run_missing(out, list(runs.values()), jobs, progress)
        finally:  # what is there is shown, however this ends
            minutes = (time.monotonic() - start) / 60
            made = write(out, f"{command}, {minutes:.1f} minutes" if command else "", quick=quick)
    return made


def _of(table: str, wanted: Sequence[str], asked: Sequence[str] | None) -> list[str]:
    """Return the data sets for a table: all that were asked for, else those of the table that are to be had."""
    return list(wanted) if asked is not None else [name for name in TABLES[table][1] if name in wanted]


def available(names: Sequence[str], datasets: Sequence[str] | None, tell: Callable[[str], None]) -> list[str]:
    """Load every data set once, tell its statistics, and return those to be had; one that was asked for must be."""
    usual = dict.fromkeys(dataset for name in names for dataset in TABLES[name][1])
    found = []
    for dataset in usual if datasets is None else dict.fromkeys(datasets):
        planned = [run for name in names for run in TABLES[name][0]([dataset])]
        if not planned:
            tell(f"{dataset}: left out: it has no goal to reach, or comes divided among its parties")
            continue
        try:
            loaded = load(planned[0].config)
        except GlasuError as error:
            if datasets is not None:
                raise
            tell(f"{dataset}: left out: {error}")
            continue
        for line in (summary(loaded.statistics, dataset), *loaded.notes):
            tell(line)
        if loaded.notes and datasets is None:
            tell(f"{dataset}: left out: its features are not the paper's; name it in --datasets to run it all the same")
            continue
        found.append(dataset)
    return found


def write(out: Path, made_by: str = "", *, quick: bool = False) -> Reproduction:
    """Write tables and plots of all results in the folder whose settings are those of today."""
    results = tuple(result for run in _kept(out, quick=quick) if (result := stored(out, run)) is not None)
    made = tuple(tables(results))
    versions = sorted({", ".join(f"{name} {version}" for name, version in result.versions) for result in results})
    origin = "; ".join(filter(None, [f"Last command: {made_by}" if made_by else "", *versions]))
    origin = f"{QUICK} {origin}" if quick else origin
    write_atomically(out / "results.csv", as_csv(results).encode())
    write_atomically(out / "curves.csv", curves_as_csv(results).encode())
    write_atomically(out / "tables.md", as_markdown(made, origin).encode())
    write_atomically(out / "report.html", render(made, results, origin).encode())
    return Reproduction(results, made, out)


def _kept(out: Path, *, quick: bool) -> list[Run]:
    """Return the runs of all tables, on the data sets and with the seeds that the folder has results of."""
    datasets: dict[str, None] = dict.fromkeys(name for _, usual in TABLES.values() for name in usual)
    seeds = set()
    for path in sorted((out / "runs").rglob("*.json")):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))["row"]
            datasets[row["dataset"]] = None
            seeds.add(int(row["seed"]))
        except (OSError, ValueError, KeyError, TypeError):  # not a result of ours, or not whole
            continue
    runs = (run for name in TABLES for run in plan(name, list(datasets), sorted(seeds), quick=quick))
    return list({run.name: run for run in runs}.values())
