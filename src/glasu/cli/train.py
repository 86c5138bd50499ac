"""glasu train: train all parties in one process, as RUN.toml says.

Writes report.json (metrics, traffic, time, releases) and model/ (the selected weights) to the output folder.
"""

from __future__ import annotations

import argparse

from glasu.cli.arguments import add_run_file, named_path, output_folder, read_config

EXAMPLE = "glasu train examples/cora.toml --set train.seed=1 --out runs/cora"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--out", type=named_path, required=True, metavar="DIR", help="folder for report.json and model/"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> None:
    config = read_config(args)
    out = output_folder(args.out)

    from glasu.cli.progress import shown
    from glasu.data.datasets import load
    from glasu.data.files import write_atomically
    from glasu.data.statistics import summary
    from glasu.runtime.simulation import simulate
    from glasu.runtime.trained import TrainedModel

    loaded = load(config)
    about = (summary(loaded.statistics, config.data.name), *loaded.notes)
    with shown(config.train.method, config.train.num_rounds, about=about, quiet=args.quiet) as observe:
        simulation = simulate(loaded.parties, config, observe=observe, notes=loaded.notes)
    TrainedModel.of(simulation).save(out / "model")
    write_atomically(out / "report.json", simulation.report.to_json().encode())
    print(simulation.report.summary())
