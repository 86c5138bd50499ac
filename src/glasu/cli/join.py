"""glasu join: take part in a training between organisations, with one party's data.

The data stays here; report.json counts everything that leaves. The server sends the settings, and this command prints
them. With --expect, it refuses other settings. After a crash, start the same command again: it resumes. It writes
report.json and model/. With --predict, the party takes part in a prediction with the trained model instead. A party
that requested nodes, or that has the labels, receives predictions.csv (or .parquet).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from glasu.cli.arguments import (
    add_extensions,
    add_log_options,
    make_output_folder,
    parse_gibibytes,
    parse_path,
    parse_seconds,
)
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from glasu.cli.log import Log
    from glasu.network.options import JoinOptions

INTERRUPTED = "the other parties wait; start the same command again to resume"
WAIT = "wait until it ends, or end it"  # another folder is no remedy: this party would join twice
NOTHING = Path()  # --predict without a file
EXAMPLE = "glasu join parties/a --server localhost:9443 --kit kits/a --out runs/a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("party", type=parse_path, metavar="PARTY", help="the party's folder: party.toml, nodes, edges")
    parser.add_argument("--server", required=True, metavar="HOST:PORT", help="the address of glasu serve")
    parser.add_argument(
        "--kit", type=parse_path, required=True, metavar="KIT", help="the kit of the party, from glasu provision"
    )
    parser.add_argument(
        "--out", type=parse_path, required=True, metavar="DIR", help="folder for results and checkpoints"
    )
    parser.add_argument("--expect", type=parse_path, metavar="RUN.toml", help="refuse settings that differ from these")
    parser.add_argument(
        "--run", dest="only", metavar="ID", help="join only this run; the id is `run` in the server's serving.json"
    )
    parser.add_argument(
        "--missing",
        choices=("refuse", "zero", "mean"),
        default="refuse",
        help="replacement for missing feature values (refuse)",
    )
    parser.add_argument(
        "--wait",
        type=parse_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for the server to reconnect (600)",
    )
    parser.add_argument(
        "--max-memory",
        type=parse_gibibytes,
        metavar="GIB",
        help="refuse settings whose model needs more memory (half of this machine's)",
    )
    parser.add_argument(
        "--predict",
        type=Path,
        nargs="?",
        const=NOTHING,
        metavar="IDS",
        help="after the training: request class probabilities of the ids in this .csv or .parquet file; without a "
        "file, only help the others to predict",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over even if DIR holds an unfinished run; do not use it to resume",
    )
    add_extensions(parser)
    add_log_options(parser)


def run(args: argparse.Namespace) -> None:
    if args.predict is not None and (args.fresh or args.expect):
        extra = "--fresh" if args.fresh else "--expect"
        raise ConfigError(f"{extra}: a prediction uses the model and the settings of its training; remove this option.")

    from glasu.cli.log import Log
    from glasu.config import RunConfig
    from glasu.files import hold_folder, raise_descriptor_limit
    from glasu.network.transport import check_address
    from glasu.pki.kit import open_kit
    from glasu.runtime.output_dir import refuse_contents_of_others

    address, kit = check_address(args.server, "--server"), open_kit(args.kit, "party")
    raise_descriptor_limit()
    refuse_contents_of_others(args.out, "party", kit.name)
    expect = None if args.expect is None else RunConfig.from_toml(args.expect)
    out = make_output_folder(args.out)

    from glasu.data.folders import read_party_once
    from glasu.network.options import JoinOptions

    party = read_party_once(args.party, args.missing)
    log = Log(args, party.name)
    options = JoinOptions(
        party=party,
        kit=kit,
        server=address,
        out=out,
        expect=expect,
        run=args.only,
        fresh=args.fresh,
        wait=args.wait,
        max_memory=args.max_memory,
        observer=log.observe,
    )
    with hold_folder(out, WAIT), log:
        if args.predict is None:
            _train(options, log)
        else:
            _predict(options, log, args)


def _train(options: JoinOptions, log: Log) -> None:
    from glasu.network.join import join

    report = join(options)
    log.write_finished(options.out / "report.json")
    sent, name = report["traffic"]["bytes_to_server"] / 1e6, options.party.name
    print(f"{name}: finished; {sent:.1f} MB left this party. Weights SHA-256 {report['weights_sha256'][0]}")


def _predict(options: JoinOptions, log: Log, args: argparse.Namespace) -> None:
    """Take part in a prediction and print the result of this party."""
    import numpy as np

    from glasu.data.folders import find_query_nodes
    from glasu.network.join import join_prediction
    from glasu.network.prediction_party import Query

    query = Query(np.empty(0, np.int64))
    if args.predict != NOTHING:
        nodes = find_query_nodes(args.predict, args.party, options.party)
        query = Query(nodes, args.predict.suffix.removeprefix("."))
    predicted = join_prediction(options, query)
    file = None if predicted.file is None else str(predicted.file)
    log.write_finished(options.out / "prediction.json", predictions=file)
    if file is None:
        print(f"{options.party.name}: the prediction is finished; this party received no class probabilities.")
    else:
        print(f"{file}: {len(predicted.nodes)} nodes")
