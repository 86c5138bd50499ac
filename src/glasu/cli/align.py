"""glasu align: find the ids that all parties have, and one common order, without revealing an id.

With several folders, all parties are on this disk. With one folder and --server, the command joins an alignment between
organisations, for which `glasu serve --align` runs at the server. The command writes alignment.parquet next to a
party's tables, and ledger.jsonl with every release. Afterwards, `glasu train`, `glasu join` and `glasu predict` use
only the common nodes, in the common order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from glasu.cli.arguments import add_log_options, add_policy, parse_count, parse_path, parse_seconds
from glasu.errors import ConfigError

INTERRUPTED = "no alignment was written; start the server and all parties again"
EXAMPLE = "glasu align parties/a parties/b parties/c"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "parties", type=parse_path, nargs="+", metavar="PARTY", help="folders with party.toml and nodes"
    )
    parser.add_argument("--server", metavar="HOST:PORT", help="the address of glasu serve --align")
    parser.add_argument("--kit", type=parse_path, metavar="KIT", help="with --server: the kit of this party")
    parser.add_argument(
        "--wait",
        type=parse_seconds,
        default=600.0,
        metavar="SECONDS",
        help="with --server: how long to wait for the server, at the start or after a lost connection (default: 600)",
    )
    add_max_ids(parser)
    add_policy(parser)
    add_log_options(parser)


def add_max_ids(parser: argparse.ArgumentParser, where: str = "") -> None:
    """Add --max-ids."""
    parser.add_argument(
        "--max-ids",
        type=parse_count,
        default=1_000_000,
        metavar="N",
        help=f"{where}refuse a party with more ids than this (default: 1000000)",
    )


def run(args: argparse.Namespace) -> None:
    if (args.server is None) != (args.kit is None):
        raise ConfigError(
            "--server and --kit must be given together; without them, all parties are folders on this disk."
        )
    if args.server is None and len(args.parties) == 1:
        raise ConfigError(
            "an alignment on this disk needs the folders of two or more parties; give all of them, or add "
            "--server HOST:PORT --kit KIT to join an alignment between machines."
        )
    if args.server is None:
        _align_here(args)
    elif len(args.parties) > 1:
        raise ConfigError(f"--server: expected the folder of this party only, got {len(args.parties)} folders.")
    else:
        _take_part(args, args.parties[0])


def _align_here(args: argparse.Namespace) -> None:
    from glasu.cli.log import Log
    from glasu.data.folders import read_manifest
    from glasu.runtime.local_alignment import AlignmentOptions, align_folders
    from glasu.runtime.policy_file import find_policies

    log = Log(args, "align")
    with log:
        names = [read_manifest(folder).name for folder in args.parties]
        policies = find_policies(args.policy, args.parties, names)
        options = AlignmentOptions(max_ids=args.max_ids, observer=log.observe, policies=policies)
        aligned = align_folders(args.parties, options)
    for name, file, size in zip(aligned.names, aligned.files, aligned.comparison.sizes, strict=True):
        print(f"{file}: {name}, {aligned.comparison.common} of {size} ids are common")


def _take_part(args: argparse.Namespace, folder: Path) -> None:
    from glasu.cli.log import Log
    from glasu.files import OTHER_COMMAND, hold_folder, raise_descriptor_limit
    from glasu.network.address import check_address
    from glasu.network.alignment_party import AlignmentParty
    from glasu.network.join import join
    from glasu.network.options import JoinOptions
    from glasu.pki.kit import open_kit
    from glasu.runtime.policy_file import find_policy

    address, kit = check_address(args.server, "--server"), open_kit(args.kit, "party")
    raise_descriptor_limit()
    log = Log(args, kit.name)
    policy = find_policy(args.policy, folder, args.kit)
    options = JoinOptions(kit=kit, server=address, out=folder, wait=args.wait, policy=policy, observer=log.observe)
    work = AlignmentParty(options, args.max_ids)
    with hold_folder(folder, OTHER_COMMAND), log:
        aligned = join(work)
    print(f"{aligned.file}: {aligned.party}, {aligned.common} of {aligned.ids} ids are common")
