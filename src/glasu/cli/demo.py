"""glasu demo: compare methods on built-in data, in about a minute.

Three departments of a news service have different data about the same users, and the interest of a user depends on the
combination of this data. The demo trains each department alone, all departments with GLASU, and one model on pooled
data. With GLASU, features and edges stay at their department. For comparison, the demo also averages the predictions of
the departments that train alone, and smooths this average over the edges.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from glasu.cli.arguments import make_output_folder, parse_path
from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from glasu.experiments.plan import METHOD_SETTINGS

EXAMPLE = "glasu demo --out runs/demo"
TITLE = "GLASU on a news service's users"
INTRODUCTION = (
    "Three departments of a news service have different data about the same users: profiles, the follower network, and "
    "reading habits. The interest of a user depends on the combination: on the professions of the users that the user "
    "follows, and on the reading habit. The methods are: each department alone (standalone is the mean of the "
    "departments; best party is the department that is best on validation, by its model or by label propagation); the "
    "average of the departments' predictions (ensemble); this average, propagated over each department's edges "
    "(smooth); GLASU with exact gradients (Q=1) and with four local steps per exchange (Q=4); one model on pooled data "
    "(centralized)."
)
DEMO_METHODS = {  # name in the table -> name of the settings, in the order of the table
    "standalone": "standalone",
    "ensemble": "ensemble",
    "smooth": "smooth",
    "GLASU Q=4": "glasu-4",
    "GLASU Q=1": "glasu-1",
    "centralized": "centralized",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=parse_path, default=Path("runs/demo"), metavar="DIR", help="output folder (default: runs/demo)"
    )
    parser.add_argument("--rounds", type=int, default=120, metavar="T", help="rounds per method (default: 120)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of data, splits and weights (default: 0)"
    )


def make_demo_config(num_rounds: int, seed: int) -> RunConfig:
    """Return the settings that all methods of the demo share.

    Both SAGE layers aggregate. The first aggregation brings the users' profiles to the department with the network.
    There, the second layer averages the profiles over the followed users, and combines the average with the user's
    reading habit.
    """
    return RunConfig(
        data=DataConfig(name="demo"),
        model=ModelConfig(backbone="sage", num_layers=2, hidden=32, aggregation_layers=(0, 1), dropout=0.2),
        train=TrainConfig(
            preset="none",
            patience=0,
            num_rounds=num_rounds,
            seed=seed,
            evaluate_every=5,
            learning_rate=0.02,
            weight_decay=0.0005,
        ),
    )


def run(args: argparse.Namespace) -> None:
    base = make_demo_config(args.rounds, args.seed)

    from glasu.runtime.output_dir import refuse_contents_of_others

    refuse_contents_of_others(args.out, "other")
    out = make_output_folder(args.out)

    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from glasu.cli.progress import show_progress
    from glasu.data.sources.catalog import load_parties
    from glasu.files import write_atomically
    from glasu.html_report import format_rows, list_headings, render_report
    from glasu.model.task import make_task
    from glasu.report import find_best_party
    from glasu.runtime.simulation import SimulationOptions, simulate

    reports = {}
    for name, method in DEMO_METHODS.items():
        config = base.replace(train=METHOD_SETTINGS[method])
        with show_progress(name, config.train.num_rounds) as observe:
            reports[name] = simulate(load_parties(config), config, SimulationOptions(observer=observe)).report
        write_atomically(out / method / "report.json", reports[name].to_json().encode())
    write_atomically(out / "report.html", render_report(TITLE, INTRODUCTION, reports).encode())
    task = make_task(base.train)
    table = Table(title=TITLE, box=SIMPLE, pad_edge=False, collapse_padding=True)  # fits into 80 columns
    for heading in list_headings(task):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in format_rows(reports):
        table.add_row(*row)
    Console().print(table)
    pairs = zip(load_parties(base), reports["standalone"].test.per_client or (), strict=True)
    alone = (f"{party.name} {task.selected_by.format(score)}" for party, score in pairs if score is not None)
    print(f"standalone is the mean of the departments: {', '.join(alone)}")
    if (best := find_best_party(reports["standalone"])) is not None:
        print(f"best party is the department that is best on validation: {best.party}, by {best.by}")
    print(f"learning curves: {out / 'report.html'}")
