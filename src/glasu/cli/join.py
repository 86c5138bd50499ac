"""glasu join: join a training run between organisations, with one party's data.

The data stays on this machine; report.json counts everything that is sent. The server sends the settings, and this
command prints them. With --expect, it refuses other settings. After a crash, start the same command again: it resumes.
It writes report.json and model/. With --predict, the party joins a prediction with the trained model instead. A party
that requested nodes, or that has the labels, receives predictions.csv or predictions.parquet.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from glasu.cli.arguments import add_party_options, add_role_options, make_output_folder, parse_path
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from glasu.cli.log import Log
    from glasu.data.party import PartyData
    from glasu.network.options import JoinOptions

INTERRUPTED = "the other parties wait; start the same command again to resume"
NO_FILE = Path()  # --predict without a file
EXAMPLE = "glasu join parties/a --server localhost:9443 --kit kits/a --out runs/a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("party", type=parse_path, metavar="PARTY", help="the party's folder: party.toml, nodes, edges")
    parser.add_argument("--server", required=True, metavar="HOST:PORT", help="the address of glasu serve")
    parser.add_argument(
        "--predict",
        type=Path,
        nargs="?",
        const=NO_FILE,
        metavar="IDS",
        help="after the training: request predictions for the ids in this .csv or .parquet file; without a "
        "file, only help the other parties to predict",
    )
    add_party_options(parser)
    add_role_options(parser)


def run(args: argparse.Namespace) -> None:
    if args.predict is not None and (args.fresh or args.expect):
        extra = "--fresh" if args.fresh else "--expect"
        raise ConfigError(f"{extra}: a prediction uses the model and the settings of its training; remove this option.")

    from glasu.cli.log import Log
    from glasu.config import RunConfig
    from glasu.data.folders import read_manifest, read_party_once
    from glasu.files import OTHER_COMMAND, hold_folder, raise_descriptor_limit
    from glasu.network.address import check_address
    from glasu.pki.kit import open_kit, refuse_data_of_others
    from glasu.runtime.output_dir import refuse_contents_of_others

    address, kit = check_address(args.server, "--server"), open_kit(args.kit, "party")
    raise_descriptor_limit()
    # Check the kit first: with a wrong kit, the --out folder seems to contain the results of another party.
    refuse_data_of_others(kit, read_manifest(args.party).name)
    refuse_contents_of_others(args.out, "party", kit.name)
    expect = None if args.expect is None else RunConfig.from_toml(args.expect)
    out = make_output_folder(args.out)

    from glasu.network.options import JoinOptions
    from glasu.runtime.policy_file import find_policy

    party = read_party_once(args.party, args.missing)
    log = Log(args, party.name)
    options = JoinOptions(
        kit=kit,
        server=address,
        out=out,
        expect=expect,
        run=args.only,
        fresh=args.fresh,
        wait=args.wait,
        policy=find_policy(args.policy, args.party, args.kit),
        max_memory=args.max_memory,
        observer=log.observe,
    )
    with hold_folder(out, OTHER_COMMAND), log:  # in another folder, this party would join twice
        if args.predict is None:
            _train(options, party, log)
        else:
            _predict(options, party, log, args)


def _train(options: JoinOptions, party: PartyData, log: Log) -> None:
    from glasu.network.join import join
    from glasu.network.training_party import TrainingParty
    from glasu.privacy.accounting import SpentEpsilon
    from glasu.records import read_record

    report = join(TrainingParty(options, party))
    log.write_finished(options.out / "report.json")
    sent = report.traffic.bytes_to_server / 1e6
    print(f"{party.name}: finished; this party sent {sent:.1f} MB. Weights SHA-256 {report.weights_sha256[0]}")
    if (spent := report.privacy.differential_privacy) is not None:
        print(f"{party.name}: {read_record(SpentEpsilon, spent, 'report.json', partial=True)}.")


def _predict(options: JoinOptions, party: PartyData, log: Log, args: argparse.Namespace) -> None:
    """Join a prediction and print the result of this party."""
    import numpy as np

    from glasu.data.folders import find_query_nodes
    from glasu.network.join import join
    from glasu.network.prediction_party import PredictionParty, Query

    query = Query(np.empty(0, np.int64))
    if args.predict != NO_FILE:
        query = Query(find_query_nodes(args.predict, args.party, party), args.predict.suffix.removeprefix("."))
    predicted = join(PredictionParty(options, party, query))
    file = None if predicted.file is None else str(predicted.file)
    log.write_finished(options.out / "prediction.json", predictions=file)
    if file is None:
        print(f"{party.name}: the prediction is finished; this party received no predictions.")
    else:
        mark = f", predicted without {', '.join(predicted.missing)}" if predicted.missing else ""
        print(f"{file}: {len(predicted.nodes)} nodes{mark}")
