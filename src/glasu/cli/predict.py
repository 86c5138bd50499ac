"""glasu predict: predict the class, or for regression the number, of every node that all parties have.

It runs exact joint inference with a trained model, all parties in one process. The columns of the output file are id,
prediction, and p_<class> per class. Releases are recorded in the ledgers of RUN_DIR.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from glasu.cli.arguments import add_extensions, add_overrides, add_policy, make_output_folder, parse_path
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from glasu.data.party import PartyData

EXAMPLE = "glasu predict runs/cora --out predictions.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the output folder of `glasu train`")
    add_overrides(parser, "set the location of the data if it has moved, for example data.root=elsewhere")
    add_extensions(parser)
    parser.add_argument("--party", metavar="NAME", help="after standalone training: the party whose model predicts")
    parser.add_argument(
        "--parties", metavar="A,B", help="after training with party dropout: predict with these parties only"
    )
    add_policy(parser, "of each party's folder")
    parser.add_argument("--out", type=parse_path, required=True, metavar="FILE", help="predictions.parquet or .csv")


def run(args: argparse.Namespace) -> None:
    if args.out.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"--out {args.out}: must end with .parquet or .csv.")

    from glasu.runtime.output_dir import refuse_file_among_others

    folder = args.run_dir.parent if args.run_dir.name == "model" else args.run_dir
    refuse_file_among_others(args.out, folder)
    make_output_folder(args.out.parent)

    from glasu.data.methods import has_server
    from glasu.data.sources.catalog import load_parties
    from glasu.files import OTHER_COMMAND, hold_folder
    from glasu.report import describe_missing
    from glasu.runtime.ledger_file import LEDGERS
    from glasu.runtime.policy_file import find_policies
    from glasu.runtime.trained_model import TrainedModel, write_predictions

    if (folder / "joining.json").is_file():
        raise ConfigError(
            f"{args.run_dir}: holds the model of one party; the parties predict through a server. Start glasu serve "
            f"--predict and, at every party, glasu join PARTY --server HOST:PORT --kit KIT --out {folder} --predict."
        )
    model = TrainedModel.load(args.run_dir)
    ledgers = folder / LEDGERS if has_server(model.config) and (folder / LEDGERS).is_dir() else None
    parties = load_parties(model.config.apply_overrides(args.overrides, ("data",)), for_prediction=True)
    if args.parties is not None:
        parties = _choose(parties, args.parties)
    names = [party.name for party in parties]
    policies = find_policies(args.policy, model.config.data.parties, model.names if args.policy is None else names)
    with nullcontext() if ledgers is None else hold_folder(folder, OTHER_COMMAND):
        predicted = model.scores(parties, party=args.party, ledgers=ledgers, policies=policies)
    write_predictions(args.out, parties[0].ids, predicted, model.classes, model.config.train)
    print(f"{args.out}: {len(predicted)} nodes" + (f", {len(model.classes)} classes" if model.classes else ""))
    if missing := [name for name in model.names if name not in names]:
        scores = model.find_subset(names)
        print(describe_missing(missing, None if scores is None else scores.metrics))


def _choose(parties: list[PartyData], names: str) -> list[PartyData]:
    """Return the parties that --parties names."""
    chosen, known = names.split(","), [party.name for party in parties]
    for name in chosen:
        if chosen.count(name) > 1:
            raise ConfigError(f"--parties {names}: {name!r} is named twice; name it once.")
        if name not in known:
            raise ConfigError(f"--parties {names}: there is no party {name!r}; the parties are {', '.join(known)}.")
    return [party for party in parties if party.name in chosen]
