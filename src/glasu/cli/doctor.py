"""glasu doctor: check that all parties and the server are ready for a run.

Start it at the server and at every party, with the same arguments as `glasu serve` and `glasu join`, but without
--predict. It checks certificates, connections, clocks, versions, disks, folders, data and ids. Every role prints the
same diagnosis and exits with 0 (ready) or 1 (not ready). The command sends counts and digests, never an id or a value,
and writes no file. If --align is given at every role, the command checks instead that the ids of all parties can be
aligned (`glasu align`).
"""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from glasu.cli.align import add_max_ids
from glasu.cli.arguments import add_overrides, add_party_options, add_role_options, add_server_options, parse_path
from glasu.errors import ConfigError, GlasuError

if TYPE_CHECKING:
    from glasu.network.findings import Diagnosis, Finding

INTERRUPTED = "nothing was changed"
EXAMPLE = "glasu doctor parties/a --server localhost:9443 --kit kits/a --out runs/a"
AT_SERVER = {"metrics": "--metrics", "on_invalid_message": "--on-invalid-message"}
AT_PARTY = {"expect": "--expect", "only": "--run", "max_memory": "--max-memory", "policy": "--policy"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject", type=parse_path, metavar="PARTY|RUN.toml", help="at a party: its folder; at the server: the settings"
    )
    add_overrides(parser, "at the server: override one setting; may be given several times")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", metavar="HOST:PORT", help="at a party: the address of the server")
    where.add_argument("--listen", metavar="HOST:PORT", help="at the server: address that the parties connect to")
    parser.add_argument("--align", action="store_true", help="check an alignment of the ids instead of training")
    add_max_ids(parser, "with --align: ")
    add_party_options(parser, "at a party: ")
    add_server_options(parser, "at the server: ")
    add_role_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.server and args.overrides:
        raise ConfigError(f"--set {args.overrides[0]}: only the server has settings; pass this option there.")
    elsewhere, where = (AT_SERVER, "server") if args.server else (AT_PARTY, "parties")
    for name, option in elsewhere.items():
        if getattr(args, name) is not None:
            raise ConfigError(f"{option} is an option of the {where}; remove it here.")
    diagnosis = _run_at_party(args) if args.server else _run_at_server(args)
    for line in diagnosis.lines():
        print(line)
    print(diagnosis.summary("align their ids" if args.align else "train together"))
    return 0 if diagnosis.is_ready else 1


def _run_at_server(args: argparse.Namespace) -> Diagnosis:
    from glasu.cli.log import Log
    from glasu.config import RunConfig
    from glasu.network.address import check_address
    from glasu.network.doctor.machine import check_group, check_kit
    from glasu.network.doctor.server import DryRunServer
    from glasu.network.findings import Diagnosis
    from glasu.network.options import ServeOptions
    from glasu.network.purposes import ALIGNMENT_DRY_RUN
    from glasu.network.serve import serve
    from glasu.runtime.output_dir import refuse_contents_of_others

    config, address = RunConfig.from_toml(args.subject, args.overrides), check_address(args.listen, "--listen")
    refuse_contents_of_others(args.out, "server")
    with Log(args, "server"):
        kit, certificate = check_kit(args.kit, "server", logging.getLogger("glasu.server"))
        own = [certificate, *([] if args.metrics is None else [_check_metrics(args.metrics, address)])]
        if kit is None:
            return Diagnosis({"server": tuple(own)})
        options = ServeOptions(config=config, kit=kit, listen=address, out=args.out, fresh=args.fresh, wait=args.wait)
        if args.align:
            return serve(DryRunServer(options, [*own, check_group(options.log)], ALIGNMENT_DRY_RUN))
        return serve(DryRunServer(options, own))


def _check_metrics(text: str, listen: str) -> Finding:
    """Check that the metrics address is free."""
    from glasu.integrations.prometheus import parse_metrics_address, refuse_shared_address, serve_metrics
    from glasu.network.findings import Finding

    refuse_shared_address(text, listen)
    address = parse_metrics_address(text)
    try:
        with serve_metrics(address, lambda: None):
            return Finding("metrics", "good", "the metrics address is free")
    except ConfigError as error:
        return Finding("metrics", "bad", str(error).rstrip("."))


def _run_at_party(args: argparse.Namespace) -> Diagnosis:
    from glasu.cli.log import Log
    from glasu.config import RunConfig
    from glasu.data.folders import read_party_once
    from glasu.network.address import check_address
    from glasu.network.doctor.machine import check_kit, explain_error
    from glasu.network.findings import Diagnosis
    from glasu.runtime.output_dir import refuse_contents_of_others
    from glasu.runtime.policy_file import find_policy

    address = check_address(args.server, "--server")
    expect = None if args.expect is None else RunConfig.from_toml(args.expect)
    policy = find_policy(args.policy, args.subject, args.kit)
    if not args.subject.is_dir():
        raise ConfigError(f"{args.subject}: no such folder; give the folder of the party, which contains party.toml.")
    folder_name = args.subject.resolve().name
    log, party = logging.getLogger(f"glasu.party.{folder_name}"), None
    with Log(args, folder_name):
        kit, certificate = check_kit(args.kit, "party", log)
        refuse_contents_of_others(args.out, "party", None if kit is None else kit.name)
        own = [certificate]
        if not args.align:
            try:
                party = read_party_once(args.subject, args.missing)
            except GlasuError as error:
                own.append(explain_error("data", error, log, "its files cannot be used; see that party's log"))
        if kit is None:
            return Diagnosis({folder_name: tuple(own)})

        from glasu.network.doctor.alignment import AlignmentDryRunParty
        from glasu.network.doctor.party import DryRunParty, join_dry_run
        from glasu.network.options import JoinOptions

        options = JoinOptions(
            kit=kit,
            server=address,
            out=args.subject if args.align else args.out,
            expect=expect,
            run=args.only,
            fresh=args.fresh,
            wait=args.wait,
            policy=policy,
            max_memory=args.max_memory,
        )
        if args.align:
            return join_dry_run(AlignmentDryRunParty(options, args.max_ids, own))
        return join_dry_run(DryRunParty(options, party, own))
