"""glasu train: train all parties in one process with the settings of RUN.toml.

It writes report.json (metrics, traffic, time, releases), model/ (the selected weights) and ledger/ (every release of
every party) to the output folder. During the training, the folder also contains checkpoints. If the run is interrupted,
the same command resumes from them. They are removed at the end. A finished run is replaced only with --fresh. With
--baselines, the command also trains the parties alone, and compares the result with each party alone, with averaged
predictions, and with averages that are smoothed over the edges. If a preset chose the settings of the run, each of
these methods tries the settings of every candidate and the settings without a preset. It then uses the settings with
the best validation score.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from glasu.cli.arguments import add_extensions, add_policy, add_run_file, make_output_folder, parse_path, read_config
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from glasu.config import RunConfig
    from glasu.data.sources.catalog import LoadedParties
    from glasu.report import RunReport
    from glasu.runtime.output_dir import FinishedRun
    from glasu.runtime.policy_file import PolicyFile

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
        "--baselines", action="store_true", help="also train every party alone, combine the predictions, and compare"
    )
    add_policy(parser, "of each party's folder")
    parser.add_argument(
        "--transcript", action="store_true", help="record every message in DIR/transcript, to attack the run later"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> None:
    config = read_config(args)

    from glasu.cli.log import LineLog
    from glasu.runtime.output_dir import refuse_contents_of_others

    refuse_contents_of_others(args.out, "train")
    with LineLog("glasu train: ", quiet=args.quiet):
        finished = None if args.fresh else _find_finished_run(args, config)
        if finished is not None and (finished.baselines or not args.baselines):
            again = "to train again, give --fresh or another --out"
            print(f"{args.out}: this run is finished, see report.json there; {again}.")
            return
        report = _train(args, config, make_output_folder(args.out))
    print(report.summary())
    if report.privacy.differential_privacy is not None:
        print(report.privacy.differential_privacy)
    if args.baselines:
        from glasu.runtime.baselines import compare_baselines

        print(compare_baselines(report, report.baselines))


def _find_finished_run(args: argparse.Namespace, config: RunConfig) -> FinishedRun | None:
    """Return the finished run in the output folder, or None. If its settings differ, report input faults first."""
    from glasu.runtime.output_dir import find_finished_run

    try:
        return find_finished_run(args.out, config)
    except ConfigError:
        _read_input(args, config)
        raise


def _read_input(args: argparse.Namespace, config: RunConfig) -> tuple[LoadedParties, dict[str, PolicyFile]]:
    """Load the data and the policies."""
    from glasu.data.sources.catalog import load_data
    from glasu.runtime.policy_file import find_policies

    loaded = load_data(config)
    return loaded, find_policies(args.policy, config.data.parties, [party.name for party in loaded.parties])


def _train(args: argparse.Namespace, config: RunConfig, out: Path) -> RunReport:
    """Train, and write the model and the report to the output folder."""
    from glasu.cli.progress import show_progress
    from glasu.config import describe_profile
    from glasu.data.sources.catalog import load_parties
    from glasu.data.statistics import describe_size
    from glasu.files import hold_folder, write_atomically
    from glasu.runtime.baselines import list_settings, train_baselines
    from glasu.runtime.ledger_file import LEDGERS
    from glasu.runtime.output_dir import remove_finished_run
    from glasu.runtime.simulation import SimulationOptions, simulate
    from glasu.runtime.simulation_checkpoints import hold_checkpoint_folder
    from glasu.runtime.trained_model import TrainedModel, remove_model
    from glasu.runtime.transcript import TRANSCRIPT

    loaded, policies = _read_input(args, config)
    profile = [line] if (line := describe_profile(config)) else []
    about = (describe_size(loaded.statistics, config.data.name), *profile, *loaded.notes)
    with hold_folder(out), hold_checkpoint_folder(out / "checkpoints") as checkpoints:
        if args.fresh:  # otherwise, if the new run is interrupted, old results would look like its results
            remove_finished_run(out)
            remove_model(out / "model")
        with show_progress(config.train.method, config.train.num_rounds, about=about, quiet=args.quiet) as observer:
            options = SimulationOptions(
                observer=observer,
                notes=loaded.notes,
                checkpoints=checkpoints,
                fresh=args.fresh,
                ledgers=out / LEDGERS,
                policies=policies,
                transcript=out / TRANSCRIPT if args.transcript else None,
            )
            simulation = simulate(loaded.parties, config, options)
        TrainedModel.of(simulation.clients).save(out / "model")
        report = simulation.report
        if args.baselines:
            tried = list_settings(config, report.race)
            report = replace(report, baselines=train_baselines(tried, load_parties))
        write_atomically(out / "report.json", report.to_json().encode())
        for path in checkpoints.glob("*.checkpoint"):
            path.unlink()
    return report
