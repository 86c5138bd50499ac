"""Reproduce tables: run the missing runs, and write tables and plots of all results."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from glasu import train
from glasu.data.sources.catalog import load_data
from glasu.data.statistics import describe_size
from glasu.errors import ConfigError, DataError, GlasuError, TrainingError
from glasu.experiments.figures import render
from glasu.experiments.plan import TABLE_NAMES, Plan, Run
from glasu.experiments.results import (
    RunResult,
    format_csv,
    format_curves_csv,
    list_stored_rows,
    load_result,
    make_result,
    store_result,
)
from glasu.experiments.tables import TextTable, make_tables, to_markdown
from glasu.experiments.workers import load_once, run_tasks
from glasu.files import hold_folder, write_atomically

QUICK = "Quick try: a quarter of the rounds. Do not compare these results with the paper."
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reproduction:
    """The contents of the output folder."""

    results: tuple[RunResult, ...]
    tables: tuple[TextTable, ...]
    folder: Path


def reproduce(
    names: Sequence[str],
    out: Path,
    *,
    datasets: Sequence[str] | None = None,
    seeds: int = 5,
    jobs: int = 1,
    quick: bool = False,
    methods: Collection[str] | None = None,
    command: str = "",
    plan: Plan | None = None,
) -> Reproduction:
    """Run the missing runs of some tables and write all tables of the folder.

    Args:
        names: tables, see `plan.TABLE_NAMES`.
        out: the folder for runs/, results.csv, curves.csv, tables.md and report.html.
        datasets: names of data sets; None: all available data sets of each table.
        seeds: number of seeds, from 0.
        jobs: number of runs that run at the same time, one process each.
        quick: train for a quarter of the rounds, and run only some data sets of a large table.
        methods: names of methods, as in results.csv, in upper or lower case; None: all methods of each table.
        command: the command line; the tables begin with it.
        plan: the runs of each table; by default the runs of the paper's tables.
    """
    plan, start = plan or Plan(), time.monotonic()
    with hold_folder(out):
        available = _find_datasets(plan, names, datasets, quick=quick)
        if not available:
            raise DataError("no data set for these tables is available; docs/datasets.md lists the files to fetch.")
        runs = {
            str(run): run
            for name in names
            for run in plan.list_runs(
                name,
                [item for item in (datasets or plan.choose_datasets(name, quick=quick)) if item in available],
                range(seeds),
                quick=quick,
            )
        }
        runs = _select_methods(runs, methods)
        try:
            run_missing(out, list(runs.values()), jobs)
        finally:  # write the tables even after a failure
            minutes = (time.monotonic() - start) / 60
            made = write_tables(out, plan, f"{command}, {minutes:.1f} minutes" if command else "", quick=quick)
    return made


def run_missing(out: Path, runs: Sequence[Run], jobs: int) -> None:
    """Execute the runs that have no stored result. Runs that diverge are reported at the end."""
    missing = [run for run in runs if load_result(out, run) is None]
    failures: list[str] = []
    stored = len(runs) - len(missing)
    if stored:
        log.info("%d/%d runs have results", stored, len(runs))
    with closing(run_tasks(train_run, iter(missing), min(jobs, len(missing)))) as results:
        for done, (run, result) in enumerate(results, stored + 1):
            if isinstance(result, TrainingError):
                failures.append(f"{run}: {result}")
            else:
                store_result(out, run, result)
            line = failures[-1] if isinstance(result, TrainingError) else result.summary()
            log.info("%d/%d %s", done, len(runs), line)
    if failures:
        raise TrainingError(f"{len(failures)} of {len(runs)} runs failed; the first was {failures[0]}")


def train_run(run: Run, workers: int | None) -> RunResult | TrainingError:
    """Train; if the run diverges, return the error, so that other runs continue."""
    loaded = load_once(run.config)
    try:
        report = train(loaded.parties, run.config, workers=workers, clock=time.process_time)
    except TrainingError as error:
        return error
    return make_result(run, report, loaded.notes)


def _select_methods(runs: dict[str, Run], methods: Collection[str] | None) -> dict[str, Run]:
    """Keep the runs of some methods; refuse a method that no run uses."""
    if methods is None:
        return runs
    known = list(dict.fromkeys(run.method for run in runs.values()))
    wanted = {name.lower() for name in methods}
    if unknown := [name for name in methods if name.lower() not in known]:
        raise ConfigError(f"--methods: these tables have no {', '.join(unknown)}; they have {', '.join(known)}.")
    return {key: run for key, run in runs.items() if run.method in wanted}


def _find_datasets(plan: Plan, names: Sequence[str], datasets: Sequence[str] | None, *, quick: bool) -> list[str]:
    """Load every data set, log its size, and return those that are available.

    A requested data set must be available.
    """
    chosen = (name for table in names for name in plan.choose_datasets(table, quick=quick))
    wanted: Iterable[str] = chosen if datasets is None else datasets
    found = []
    for dataset in dict.fromkeys(wanted):
        runs = [run for name in names for run in plan.list_cells(name, [dataset])]
        if not runs:
            log.info("%s: skipped: it has no target accuracy, or consists of several parties", dataset)
            continue
        try:
            loaded = load_data(runs[0].config)
        except GlasuError as error:
            if datasets is not None:
                raise
            log.info("%s: skipped: %s", dataset, error)
            continue
        for line in (describe_size(loaded.statistics, dataset), *loaded.notes):
            log.info("%s", line)
        if loaded.notes and datasets is None:
            log.info("%s: skipped: its features differ from the paper's; name it in --datasets to run it", dataset)
            continue
        found.append(dataset)
    return found


def write_tables(out: Path, plan: Plan, made_by: str = "", *, quick: bool = False) -> Reproduction:
    """Write tables and plots of the results in the folder. Results of runs with outdated settings are ignored."""
    found = (load_result(out, run) for run in _list_stored_runs(out, plan, quick=quick))
    results = tuple(result for result in found if result is not None)
    made = tuple(make_tables(results, plan))
    versions = sorted(
        {", ".join(f"{name} {version}" for name, version in result.versions.items()) for result in results}
    )
    origin = "; ".join(filter(None, [f"Last command: {made_by}" if made_by else "", *versions]))
    origin = f"{QUICK} {origin}" if quick else origin
    write_atomically(out / "results.csv", format_csv(results).encode())
    write_atomically(out / "curves.csv", format_curves_csv(results).encode())
    write_atomically(out / "tables.md", to_markdown(made, origin).encode())
    write_atomically(out / "report.html", render(made, results, origin, plan).encode())
    return Reproduction(results, made, out)


def _list_stored_runs(out: Path, plan: Plan, *, quick: bool) -> list[Run]:
    """Return the runs of all tables, on the data sets and with the seeds of the stored results."""
    rows = list(list_stored_rows(out))
    stored = {row.dataset for row in rows}
    known = [name for table in TABLE_NAMES for name in plan.datasets[table] if name in stored]
    datasets = dict.fromkeys([*known, *(row.dataset for row in rows)])
    seeds = sorted({row.seed for row in rows})
    runs = (run for name in TABLE_NAMES for run in plan.list_runs(name, list(datasets), seeds, quick=quick))
    return list({str(run): run for run in runs}.values())
