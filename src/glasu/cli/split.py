"""glasu split: divide a named data set into one folder per party.

A folder contains party.toml, the nodes with the party's features, and the party's edges; see docs/party-folders.md.
"""

from __future__ import annotations

import argparse

from glasu.cli.arguments import add_extensions, add_run_file, make_output_folder, parse_path, read_config

EXAMPLE = "glasu split examples/cora.toml --out parties"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_extensions(parser)
    parser.add_argument("--out", type=parse_path, required=True, metavar="PARTIES", help="folder for the party folders")
    parser.add_argument(
        "--format",
        choices=("parquet", "csv"),
        default="parquet",
        help="file format of nodes and edges (default: parquet)",
    )


def run(args: argparse.Namespace) -> None:
    method = {"method": "glasu", "backward": "local"}  # the data of the parties does not depend on the method
    config = read_config(args).replace(train=method)

    from glasu.cli.progress import print_lines
    from glasu.data.folders import refuse_existing, write_party
    from glasu.data.sources.catalog import load_data
    from glasu.data.statistics import describe_size
    from glasu.runtime.output_dir import refuse_contents_of_others

    refuse_contents_of_others(args.out, "other")
    loaded = load_data(config)
    out = make_output_folder(args.out)
    for party in loaded.parties:
        refuse_existing(out / party.name)
        refuse_contents_of_others(out / party.name, "other")
    print_lines([describe_size(loaded.statistics, config.data.name), *loaded.notes])
    for party in loaded.parties:
        write_party(party, out / party.name, args.format)
        print(
            f"{out / party.name}: {party.num_nodes} nodes, {party.num_features} features, "
            f"{party.graph.num_edges} edges, {'with' if party.labels is not None else 'without'} labels"
        )
