"""Results -> the paper's tables with ours beside them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from glasu.experiments import paper, plan
from glasu.experiments.results import CURVE, Result

Cells = Mapping[tuple[str, str, str], Sequence[Result]]  # (data set, method, setting) -> one result per seed
DASH = "-"
COST = ("MB", "exchanges", "CPU s", "seeds")


@dataclass(frozen=True)
class Table:
    """A table as text."""

    title: str
    note: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 2  # so many columns on the left are text, the rest numbers


def tables(results: Iterable[Result]) -> Iterator[Table]:
    """Make every table that has a row."""
    cells = by_cell(results)
    datasets = list(dict.fromkeys(dataset for dataset, _, _ in cells))
    for make in (_accuracy, _relations, _lazy, _stale, _clients, _backbones):
        table = make(cells, datasets)
        if table.rows:
            yield table


def by_cell(results: Iterable[Result]) -> dict[tuple[str, str, str], list[Result]]:
    """Gather the seeds of each cell."""
    cells: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        cells[result.cell].append(result)
    return dict(cells)


def as_markdown(made: Sequence[Table], origin: str = "") -> str:
    """Return the tables as one Markdown page; `origin` says what made them."""
    parts = [f"{origin}\n"] if origin else []
    for table in made:
        lines = [f"## {table.title}", "", table.note, "", _line(table.headings)]
        lines.append(_line(["---"] * table.words + ["---:"] * (len(table.headings) - table.words)))
        parts.append("\n".join([*lines, *(_line(row) for row in table.rows)]) + "\n")
    return "\n".join(parts)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def mean(values: Iterable[float]) -> float:
    """Return the mean."""
    return statistics.fmean(values)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Write mean and standard deviation of a sample."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation}"


def accuracies(results: Sequence[Result]) -> list[float]:
    """Return the test accuracies in per cent."""
    return [100 * result.row.test_accuracy for result in results]


def _cost(results: Sequence[Result]) -> tuple[str, ...]:
    rows = [result.row for result in results]
    return (
        f"{mean(row.bytes for row in rows) / 1e6:,.1f}",
        f"{mean(row.exchanges for row in rows):,.0f}",
        f"{mean(row.cpu_seconds for row in rows):,.1f}",
        f"{len(rows)}",
    )


def _beside(theirs: float | None, results: Sequence[Result]) -> tuple[str, str, str]:
    """Write the paper's accuracy, ours, and the difference."""
    ours = accuracies(results)
    if theirs is None or any(result.notes for result in results):  # such data is not the paper's
        return DASH, spread(ours), DASH
    return f"{theirs:.1f}", spread(ours), f"{mean(ours) - theirs:+.1f}"


def _found(
    cells: Cells, make: Callable[[Sequence[str]], Iterator[plan.Run]], datasets: Sequence[str]
) -> Iterator[tuple[plan.Run, Sequence[Result]]]:
    """Yield the runs of a table that have results."""
    for run in make(datasets):
        results = cells.get((run.dataset, run.method, run.setting))
        if results:
            yield run, results


def _same_seeds(
    found: Iterable[tuple[plan.Run, Sequence[Result]]],
) -> list[tuple[plan.Run, Sequence[Result]]]:
    """Keep the results of those seeds that all rows have, for rows that are compared with each other."""
    rows = list(found)
    common = set.intersection(*({result.row.seed for result in results} for _, results in rows)) if rows else set()
    return [(run, [result for result in results if result.row.seed in common]) for run, results in rows if common]


def _accuracy(cells: Cells, datasets: Sequence[str]) -> Table:
    rows = [
        (
            run.dataset,
            run.method,
            *_beside(paper.ACCURACY.get(run.dataset, {}).get(run.method), results),
            *_cost(results),
        )
        for run, results in _found(cells, plan.accuracy, datasets)
    ]
    return Table(
        "Accuracy",
        "Test accuracy in per cent, mean and standard deviation over the seeds; bytes and exchanges of all parties "
        "together, evaluations included; CPU seconds of all parties together.",
        ("data set", "method", "paper", "ours", "difference", *COST),
        tuple(rows),
    )


def _relations(cells: Cells, datasets: Sequence[str]) -> Table:
    rows = []
    for dataset in [name for name in datasets if name in plan.RELATIONS]:
        found = {run.method: results for run, results in _found(cells, plan.accuracy, [dataset])}
        alone = [result.per_client for result in found.get("standalone", ())]
        for relation, values in zip(plan.RELATIONS[dataset], zip(*alone, strict=True), strict=False):
            rows.append((dataset, f"{relation} alone", spread([100 * value for value in values]), str(len(values))))
        for method, results in found.items():
            name = "mean of the parties alone" if method == "standalone" else method
            rows.append((dataset, name, spread(accuracies(results)), str(len(results))))
    note = "One client per relation, feature blocks as stored, 60 training nodes per class; test accuracy in per cent."
    return Table("Natural relations", note, ("data set", "who", "ours", "seeds"), tuple(rows))


def _lazy(cells: Cells, datasets: Sequence[str]) -> Table:
    rows = []
    for dataset in datasets:
        compared = _same_seeds(_found(cells, plan.lazy, [dataset]))
        found = {len(run.config.model.aggregation_layers): results for run, results in compared}
        if len(found) < 2:  # nothing to compare
            continue
        for K, results in found.items():
            theirs = paper.LAZY.get(dataset, {}).get(K)
            rows.append(
                (
                    f"{dataset} K={K}",
                    *_beside(theirs[0] if theirs else None, results),
                    *((f"{theirs[1]:g}", f"{theirs[2]:.1f}") if theirs else (DASH, DASH)),
                    _saving(found.get(4, ()), results, "cpu_seconds"),
                    _saving(found.get(4, ()), results, "bytes"),
                    *_cost(results),
                )
            )
    heads = ("setting", "paper", "ours", "difference", "paper's s", "paper's saving", "saving, CPU s", "saving, bytes")
    return Table(
        "Lazy aggregation",
        "GLASU-4 with K = 4, 2, 1 aggregation layers, the same number of rounds, the settings found for K = 2, the "
        "seeds that all three have. Saving in per cent against K = 4: the paper's in CPU seconds of the clients, ours "
        "in CPU seconds of all parties together, evaluations included, and in bytes.",
        (*heads, *COST),
        tuple(rows),
        words=1,
    )


def _saving(most: Sequence[Result], results: Sequence[Result], what: str) -> str:
    """Write what is saved against exchanging every layer, in per cent."""
    before, after = (sum(getattr(result.row, what) for result in part) for part in (most, results))
    return f"{100 * (1 - after / before):.1f}" if before else DASH


def _stale(cells: Cells, datasets: Sequence[str]) -> Table:
    rows = []
    for run, results in _found(cells, plan.stale, datasets):
        Q, goal = run.config.train.num_local_steps, run.config.train.stop_at
        there = [result for result in results if result.row.validation_accuracy >= goal]
        theirs = paper.STALE.get(run.dataset, {}).get(Q)
        known = DASH if theirs is None else "> 128" if math.isinf(theirs) else f"{theirs:,.1f}"
        ends = [dict(zip(CURVE, result.curve[-1], strict=True)) for result in results]
        scales = {"round": 1, "bytes": 1e6, "seconds": 1}
        figures = [[end[name] / scale for end in ends] for name, scale in scales.items()]
        costs = (spread(values) if len(there) == len(results) else DASH for values in figures)
        rows.append((f"{run.dataset} Q={Q}", f"{100 * goal:g}", known, *costs, f"{len(there)} of {len(results)}"))
    goals = " and ".join(f"{goal} % ({name})" for name, goal in paper.GOALS.items())
    return Table(
        "Stale updates",
        "Until validation accuracy, looked at after every round, reaches the goal: rounds, megabytes (evaluations "
        "included) and CPU seconds, where every seed got there. All may take as many local steps. "
        f"The paper's seconds are to a test accuracy of {goals}.",
        ("setting", "goal %", "paper's s", "rounds", "MB", "CPU s", "reached"),
        tuple(rows),
        words=1,
    )


def _clients(cells: Cells, datasets: Sequence[str]) -> Table:
    rows = []
    for dataset in datasets:
        found = _same_seeds(_found(cells, plan.clients, [dataset]))
        if len({run.config.data.num_clients for run, _ in found}) < 2:
            continue
        for run, results in found:
            M = run.config.data.num_clients
            name = run.method if run.method == "centralized" else f"{run.method} M={M}"
            theirs = paper.CLIENTS.get(dataset, {}).get(run.method, {}).get(M)
            if theirs is None and plan.CLIENTS[0] == M:  # the paper's other tables have three clients
                theirs = paper.ACCURACY.get(dataset, {}).get(run.method)
            rows.append((dataset, name, *_beside(theirs, results), *_cost(results)))
    note = "Test accuracy in per cent with M = 3, 5, 7 clients, the settings found for M = 3, the seeds that all have."
    headings = ("data set", "method", "paper", "ours", "difference", *COST)
    return Table("Number of clients", note, headings, tuple(rows))


def _backbones(cells: Cells, datasets: Sequence[str]) -> Table:
    rows = []
    for dataset in datasets:
        found = list(_found(cells, plan.backbones, [dataset]))
        if len(found) < 2:
            continue
        for run, results in found:
            best = spread([100 * result.row.validation_accuracy for result in results])
            model = run.config.model
            extras = {"skip connection": model.residual, "layer norm": model.normalization == "layer"}
            name = ", ".join([model.backbone, *(extra for extra, there in extras.items() if there)])
            shape = (name, str(model.num_layers))
            rows.append((dataset, *shape, best, spread(accuracies(results)), *_cost(results)))
    note = "GLASU-4 with three graph neural networks; best validation and test accuracy in per cent."
    return Table("Backbones", note, ("data set", "backbone", "layers", "validation", "test", *COST), tuple(rows))
