"""glasu train: train all parties in one process with the settings of RUN.toml.

It writes report.json (metrics, traffic, time, releases) and model/ (the selected weights) to the output folder. During
the training the folder also holds checkpoints: the same command resumes from them. They are removed at the end. A
finished run with other settings is replaced only with --fresh. With --baselines it also trains each party alone. It
then compares the result with the parties alone, with the average of their predictions, and with this average smoothed
over the edges.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from glasu.cli.arguments import add_extensions, add_run_file, make_output_folder, parse_path, read_config

INTERRUPTED = "start the same command again to resume after the last checkpoint"
EXAMPLE = "glasu train examples/cora.toml --set train.seed=1 --out runs/cora"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_extensions(parser)
    parser.add_argument(
        "--out", type=parse_path, required=True, metavar="DIR", help="folder for report.json and model/"
    )
    parser.add_argument("--fresh", action="store_true", help="start over and replace the run that DIR holds")
    parser.add_argument(
        "--baselines", action="store_true", help="also train standalone, ensemble and smooth, and compare them"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> None:
    config = read_config(args)

    from glasu.cli.log import LineLog
    from glasu.cli.progress import show_progress
    from glasu.runtime.output_dir import refuse_contents_of_others, refuse_other_finished_run, remove_finished_run

    refuse_contents_of_others(args.out, "train")
    with LineLog("glasu train: ", quiet=args.quiet):
        if not args.fresh:
            refuse_other_finished_run(args.out, config)
        out = make_output_folder(args.out)

        from glasu.config import resolve
        from glasu.data.sources.catalog import load_data, load_parties
        from glasu.data.statistics import describe_size
        from glasu.files import write_atomically
        from glasu.runtime.baselines import compare_baselines, train_baselines
        from glasu.runtime.checkpointing import checkpoint_folder
        from glasu.runtime.simulation import SimulationOptions, simulate
        from glasu.runtime.trained_model import TrainedModel, remove_model

        loaded = load_data(config)
        about = (describe_size(loaded.statistics, config.data.name), *loaded.notes)
        with checkpoint_folder(out / "checkpoints") as checkpoints:
            if args.fresh:  # otherwise results of the old run would look like those of an interrupted new run
                remove_finished_run(out)
                remove_model(out / "model")
            with show_progress(config.train.method, config.train.num_rounds, about=about, quiet=args.quiet) as observer:
                options = SimulationOptions(
                    observer=observer, notes=loaded.notes, checkpoints=checkpoints, fresh=args.fresh
                )
                simulation = simulate(loaded.parties, config, options)
            TrainedModel.of(simulation.clients).save(out / "model")
            report = simulation.report
            if args.baselines:
                decided, _ = resolve(config, loaded.parties[0].num_nodes)
                used = decided if report.race is None else report.config  # the settings that the preset chose
                report = replace(report, baselines=train_baselines(used, load_parties))
            write_atomically(out / "report.json", report.to_json().encode())
            for finished in checkpoints.glob("*.checkpoint"):
                finished.unlink()
    print(report.summary())
    if args.baselines:
        print(compare_baselines(report, report.baselines))
