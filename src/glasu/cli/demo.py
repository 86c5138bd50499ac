"""glasu demo: compare all methods on built-in data, in about a minute.

Three departments of a news service have different data about the same users. The demo trains each department alone,
all of them with pooled data, and all of them with GLASU, which does not move features or edges.
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
    "Three departments of a news service have different data about the same users: a professional, a personal and a "
    "follower network, with different features. They predict the main interest of every user in four ways: with pooled "
    "data (centralized), alone (standalone), with an exchange at every layer (simulated), and with GLASU, which "
    "exchanges two of four layers once per Q updates."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=parse_path, default=Path("runs/demo"), metavar="DIR", help="folder for report.html (runs/demo)"
    )
    parser.add_argument("--rounds", type=int, default=80, metavar="T", help="rounds per method (80)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of data, splits and weights (0)")


def demo_config(num_rounds: int, seed: int) -> RunConfig:
    """Return the settings that all methods of the demo share."""
    return RunConfig(
        data=DataConfig(name="demo"),
        model=ModelConfig(hidden=32),
        train=TrainConfig(num_rounds=num_rounds, seed=seed, evaluate_every=5, learning_rate=0.01),
    )


def run(args: argparse.Namespace) -> None:
    base = demo_config(args.rounds, args.seed)
    out = make_output_folder(args.out)

    from rich.console import Console
    from rich.table import Table

    from glasu.cli.progress import show_progress
    from glasu.data.sources.catalog import load_parties
    from glasu.files import write_atomically
    from glasu.html_report import format_row, list_headings, render_report
    from glasu.model.task import task_of
    from glasu.runtime.simulation import SimulationOptions, simulate

    reports = {}
    for method, changes in METHOD_SETTINGS.items():
        name = f"GLASU Q={changes['num_local_steps']}" if method.startswith("glasu") else method
        config = base.replace(train=changes)
        with show_progress(name, config.train.num_rounds) as observe:
            reports[name] = simulate(load_parties(config), config, SimulationOptions(observer=observe)).report
        write_atomically(out / method / "report.json", reports[name].to_json().encode())
    write_atomically(out / "report.html", render_report(TITLE, INTRODUCTION, reports).encode())
    table = Table(title=TITLE)
    for heading in list_headings(task_of(base.train)):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for name, report in reports.items():
        table.add_row(name, *format_row(report))
    Console().print(table)
    print(f"learning curves: {out / 'report.html'}")
