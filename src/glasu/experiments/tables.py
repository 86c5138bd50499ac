"""Turn results into tables. The paper's tables also show the paper's results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from glasu.data.methods import find_method
from glasu.experiments import paper
from glasu.experiments.partitions import COMPARED
from glasu.experiments.plan import CLIENT_COUNTS, NATURAL_RELATIONS, Plan, Run
from glasu.experiments.results import RunResult

DASH = "-"
COST = ("MB", "exchanges", "CPU s", "seeds")


@dataclass(frozen=True)
class TextTable:
    """A table of text cells."""

    title: str
    note: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 2  # the number of text columns on the left; the others are numbers


@dataclass(frozen=True)
class Cells:
    """Results by cell, in the order of a plan."""

    plan: Plan
    results: Mapping[tuple[str, str, str], Sequence[RunResult]]  # (data set, method, setting) -> one result per seed

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(dataset for dataset, _, _ in self.results))

    def find(self, table: str, *datasets: str) -> list[tuple[Run, Sequence[RunResult]]]:
        """Return the runs of a table that have results."""
        runs = self.plan.list_cells(table, datasets or self.datasets)
        cells = ((run, self.results.get((run.dataset, run.method, run.setting))) for run in runs)
        return [(run, results) for run, results in cells if results]


def make_tables(results: Iterable[RunResult], plan: Plan | None = None) -> list[TextTable]:
    """Make every table that has a row."""
    cells = Cells(plan or Plan(), group_by_cell(results))
    return [table for make in TABLE_MAKERS if (table := make(cells)).rows]


def group_by_cell(results: Iterable[RunResult]) -> dict[tuple[str, str, str], list[RunResult]]:
    """Collect the results of all seeds of each cell."""
    cells: dict[tuple[str, str, str], list[RunResult]] = defaultdict(list)
    for result in results:
        cells[result.cell].append(result)
    return dict(cells)


def to_markdown(made: Sequence[TextTable], origin: str = "") -> str:
    """Return the tables as one Markdown page; `origin` is the first line."""
    parts = [f"{origin}\n"] if origin else []
    for table in made:
        lines = [f"## {table.title}", "", table.note, "", _format_line(table.headings)]
        lines.append(_format_line(["---"] * table.words + ["---:"] * (len(table.headings) - table.words)))
        parts.append("\n".join([*lines, *(_format_line(row) for row in table.rows)]) + "\n")
    return "\n".join(parts)


def _format_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def format_spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation of a sample."""
    deviation = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{deviation}"


def list_percentages(results: Sequence[RunResult]) -> list[float]:
    """Return the test accuracies in per cent."""
    return [100 * result.row.test_accuracy for result in results]


def _format_cost(results: Sequence[RunResult]) -> tuple[str, ...]:
    rows = [result.row for result in results]
    return (
        f"{fmean(row.bytes for row in rows) / 1e6:,.1f}",
        f"{fmean(row.exchanges for row in rows):,.0f}",
        f"{fmean(row.cpu_seconds for row in rows):,.1f}",
        f"{len(rows)}",
    )


def _compare(theirs: float | None, results: Sequence[RunResult]) -> tuple[str, str, str]:
    """Format the paper's accuracy, our accuracy, and the difference."""
    ours = list_percentages(results)
    if theirs is None or any(result.notes for result in results):  # a note means that the paper used other data
        return DASH, format_spread(ours), DASH
    return f"{theirs:.1f}", format_spread(ours), f"{fmean(ours) - theirs:+.1f}"


def _keep_common_seeds(rows: Sequence[tuple[Run, Sequence[RunResult]]]) -> list[tuple[Run, Sequence[RunResult]]]:
    """Keep only the results of seeds that all rows have, so that the rows can be compared."""
    common = set.intersection(*({result.row.seed for result in results} for _, results in rows)) if rows else set()
    return [(run, [result for result in results if result.row.seed in common]) for run, results in rows if common]


def _make_accuracy_table(cells: Cells) -> TextTable:
    rows = [
        (
            run.dataset,
            run.method,
            *_compare(paper.PAPER_ACCURACY.get(run.dataset, {}).get(run.method), results),
            *_format_cost(results),
        )
        for run, results in cells.find("accuracy")
    ]
    return TextTable(
        "Accuracy",
        "Test accuracy in per cent, mean and standard deviation over the seeds; bytes and exchanges of all parties "
        "together, evaluations included; CPU seconds of all parties together.",
        ("data set", "method", "paper", "ours", "difference", *COST),
        tuple(rows),
    )


def _make_relations_table(cells: Cells) -> TextTable:
    rows = []
    for dataset in [name for name in cells.datasets if name in NATURAL_RELATIONS]:
        found = cells.find("accuracy", dataset)
        apart = [result for run, results in found if find_method(run.config).predicts_alone for result in results]
        alone = [[each.test for each in result.alone if each.by == "model"] for result in apart]
        for relation, values in zip(NATURAL_RELATIONS[dataset], zip(*alone, strict=True), strict=False):
            rows.append(
                (dataset, f"{relation} alone", format_spread([100 * value for value in values]), str(len(values)))
            )
        for run, results in found:
            name = "mean of the parties alone" if find_method(run.config).predicts_alone else run.method
            rows.append((dataset, name, format_spread(list_percentages(results)), str(len(results))))
    note = "One client per relation, feature blocks as stored, 60 training nodes per class; test accuracy in per cent."
    return TextTable("Natural relations", note, ("data set", "who", "ours", "seeds"), tuple(rows))


def _make_lazy_table(cells: Cells) -> TextTable:
    rows = []
    for dataset in cells.datasets:
        compared = _keep_common_seeds(cells.find("lazy", dataset))
        found = {len(run.config.model.aggregation_layers): results for run, results in compared}
        if len(found) < 2:  # nothing to compare
            continue
        for K, results in found.items():
            theirs = paper.LAZY.get(dataset, {}).get(K)
            rows.append(
                (
                    f"{dataset} K={K}",
                    *_compare(theirs[0] if theirs else None, results),
                    *((f"{theirs[1]:g}", f"{theirs[2]:.1f}") if theirs else (DASH, DASH)),
                    _format_saving(found.get(4, ()), results, "cpu_seconds"),
                    _format_saving(found.get(4, ()), results, "bytes"),
                    *_format_cost(results),
                )
            )
    heads = ("setting", "paper", "ours", "difference", "paper's s", "paper's saving", "saving, CPU s", "saving, bytes")
    return TextTable(
        "Lazy aggregation",
        "GLASU-4 with K = 4, 2 and 1 aggregation layers. All rows have the same number of rounds, the settings for "
        "K = 2, and the same seeds. Saving: in per cent, compared with K = 4. The paper's saving is in CPU seconds of "
        "the clients. Our savings are in CPU seconds of all parties together, evaluations included, and in bytes.",
        (*heads, *COST),
        tuple(rows),
        words=1,
    )


def _format_saving(most: Sequence[RunResult], results: Sequence[RunResult], what: str) -> str:
    """Format the saving in per cent, compared with exchanging every layer."""
    before, after = (sum(getattr(result.row, what) for result in part) for part in (most, results))
    return f"{100 * (1 - after / before):.1f}" if before else DASH


def _make_stale_table(cells: Cells) -> TextTable:
    rows = []
    for run, results in cells.find("stale"):
        Q, goal = run.config.train.num_local_steps, run.config.train.stop_at
        there = [result for result in results if result.row.validation_accuracy >= goal]
        theirs = paper.STALE.get(run.dataset, {}).get(Q)
        known = DASH if theirs is None else "> 128" if math.isinf(theirs) else f"{theirs:,.1f}"
        ends = [result.curve[-1] for result in results]
        figures: list[list[float]] = [
            [end.round for end in ends],
            [end.bytes / 1e6 for end in ends],
            [end.seconds for end in ends],
        ]
        costs = (format_spread(values) if len(there) == len(results) else DASH for values in figures)
        rows.append((f"{run.dataset} Q={Q}", f"{100 * goal:g}", known, *costs, f"{len(there)} of {len(results)}"))
    goals = " and ".join(f"{goal} % ({name})" for name, goal in paper.TARGETS.items())
    return TextTable(
        "Stale updates",
        "Rounds, megabytes (evaluations included) and CPU seconds until the validation accuracy reaches the goal. The "
        "accuracy is measured after every round. A dash: not every seed reaches the goal. All rows have the same limit "
        f"of local steps. The paper's seconds are the time until the test accuracy reaches {goals}.",
        ("setting", "goal %", "paper's s", "rounds", "MB", "CPU s", "reached"),
        tuple(rows),
        words=1,
    )


def _make_clients_table(cells: Cells) -> TextTable:
    rows = []
    for dataset in cells.datasets:
        found = _keep_common_seeds(cells.find("clients", dataset))
        if len({run.config.data.num_clients for run, _ in found}) < 2:
            continue
        for run, results in found:
            M = run.config.data.num_clients
            name = run.method if find_method(run.config).one_party else f"{run.method} M={M}"
            theirs = paper.CLIENTS.get(dataset, {}).get(run.method, {}).get(M)
            if theirs is None and CLIENT_COUNTS[0] == M:  # the paper's other tables have three clients
                theirs = paper.PAPER_ACCURACY.get(dataset, {}).get(run.method)
            rows.append((dataset, name, *_compare(theirs, results), *_format_cost(results)))
    note = (
        "Test accuracy in per cent with M = 3, 5 and 7 clients. All rows of a data set use the settings for M = 3 and "
        "the same seeds."
    )
    headings = ("data set", "method", "paper", "ours", "difference", *COST)
    return TextTable("Number of clients", note, headings, tuple(rows))


def _make_backbones_table(cells: Cells) -> TextTable:
    rows = []
    for dataset in cells.datasets:
        found = cells.find("backbones", dataset)
        if len(found) < 2:
            continue
        for run, results in found:
            best = format_spread([100 * result.row.validation_accuracy for result in results])
            model = run.config.model
            extras = {"skip connection": model.residual, "layer norm": model.normalization == "layer"}
            name = ", ".join([model.backbone, *(extra for extra, there in extras.items() if there)])
            shape = (name, str(model.num_layers))
            rows.append((dataset, *shape, best, format_spread(list_percentages(results)), *_format_cost(results)))
    note = "GLASU-4 with three graph neural networks; best validation and test accuracy in per cent."
    return TextTable("Backbones", note, ("data set", "backbone", "layers", "validation", "test", *COST), tuple(rows))


def _make_partitions_table(cells: Cells) -> TextTable:
    rows, impossible, headings = [], dict[str, None](), list[str]()
    for row in [row for dataset in cells.datasets for row in cells.plan.list_partitions(dataset)]:
        scores = {name: _score_by_seed(cells, run) for name, run in row.runs.items()}
        headings, seeds = list(scores), max(len(found or ()) for found in scores.values())
        if not seeds:
            continue
        impossible.update((f"{name}: {reason}", None) for name, reason in row.runs.items() if isinstance(reason, str))
        results = _find_results(cells, row.runs[COMPARED])
        rows.append(
            (
                row.dataset,
                row.partition,
                row.labels,
                *(_format_compared(found, scores[COMPARED] or {}, seeds) for found in scores.values()),
                f"{fmean(result.row.bytes for result in results) / 1e6:,.1f}" if results else DASH,
                str(seeds),
            )
        )
    note = (
        "Test scores in per cent, mean over the seeds: the accuracy, or for two classes (minesweeper, tolokers) 100 "
        f"times the area under the ROC curve. In brackets: how much higher the score of {COMPARED} is (mean over the "
        "seeds that both have), and the 90 % interval of this difference (paired, Student's t). alone: the party that "
        "is best on validation, by its model or by label propagation; if only one party has the labels, this party. "
        f"labels: all parties, or the only party with labels. MB: bytes of {COMPARED}, evaluations included. A dash: "
        "not run, or failed."
    )
    if impossible:
        note += f" Impossible: {' '.join(impossible)}"
    heads = ("data set", "partition", "labels", *headings, "MB", "seeds")
    return TextTable("Partitions", note, heads, tuple(rows), words=3)


def _find_results(cells: Cells, run: Run | str) -> Sequence[RunResult]:
    """Return the results of a run. An impossible run has none."""
    return () if isinstance(run, str) else cells.results.get((run.dataset, run.method, run.setting), ())


def _score_by_seed(cells: Cells, run: Run | str) -> dict[int, float] | None:
    """Return the test scores of a run in per cent, by seed; None if the run is impossible."""
    if isinstance(run, str):
        return None
    scores, predicts_alone = {}, find_method(run.config).predicts_alone
    for result in _find_results(cells, run):
        alone = result.alone if predicts_alone else ()
        best = max(alone, key=lambda each: each.validation, default=None)
        scores[result.row.seed] = 100 * (result.row.test_score if best is None else best.test)
    return scores


def _format_compared(found: Mapping[int, float] | None, ours: Mapping[int, float], seeds: int) -> str:
    """Format a mean with the paired difference from the compared method.

    Args:
        found: scores by seed; None if the run is impossible.
        ours: scores of the compared method.
        seeds: the number of seeds of the row. If the column has fewer seeds, the text shows both numbers.
    """
    if found is None:
        return "impossible"
    if not found:
        return DASH
    text = f"{fmean(found.values()):.1f}"
    if found is not ours and (pairs := [ours[seed] - score for seed, score in found.items() if seed in ours]):
        text += f" ({format_interval(pairs)})"
    return text if len(found) == seeds else f"{text}, {len(found)} of {seeds} seeds"


def format_interval(differences: Sequence[float]) -> str:
    """Format the mean of paired differences and its 90 % interval by Student's t; no interval for a single pair."""
    from scipy.stats import t

    mean, count = fmean(differences), len(differences)
    if count < 2:
        return _format_signed(mean)
    half = float(t.ppf(0.95, count - 1)) * stdev(differences) / math.sqrt(count)
    return f"{_format_signed(mean)}, {_format_signed(mean - half)} to {_format_signed(mean + half)}"


def _format_signed(value: float) -> str:
    """Format a value with its sign. A value that is rounded to zero becomes +0.0."""
    return f"{round(value, 1) + 0.0:+.1f}"


TABLE_MAKERS = (  # in the order of the page
    _make_accuracy_table,
    _make_relations_table,
    _make_lazy_table,
    _make_stale_table,
    _make_clients_table,
    _make_backbones_table,
    _make_partitions_table,
)
