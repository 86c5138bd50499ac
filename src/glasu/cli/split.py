"""glasu split: divide a named data set into one folder per party.

Each folder holds party.toml, the nodes with that party's features, and its edges; see the docs on party folders.
"""

from __future__ import annotations

import argparse

from glasu.cli.arguments import add_run_file, named_path, output_folder, read_config

EXAMPLE = "glasu split examples/cora.toml --out parties"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--out", type=named_path, required=True, metavar="PARTIES", help="folder for the parties' folders"
    )
    parser.add_argument("--format", choices=("parquet", "csv"), default="parquet", help="of nodes and edges")


def run(args: argparse.Namespace) -> None:
    method = {"method": "glasu", "backward": "local"}  # what the parties hold, whatever method trains on it
    config = read_config(args).replace(train=method)

    from glasu.cli.progress import say
    from glasu.data.folders import refuse_existing, write_party
    from glasu.data.sources.catalog import load
    from glasu.data.statistics import summary

    loaded = load(config)
    out = output_folder(args.out)
    for party in loaded.parties:
        refuse_existing(out / party.name)
    say([summary(loaded.statistics, config.data.name), *loaded.notes])
    for party in loaded.parties:
        write_party(party, out / party.name, args.format)
        print(
            f"{out / party.name}: {party.num_nodes} nodes, {party.num_features} features, "
            f"{party.graph.num_edges} edges, {'with' if party.labels is not None else 'without'} labels"
        )
