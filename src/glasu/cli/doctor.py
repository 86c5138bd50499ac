"""glasu doctor: check before a run that all parties and the server are ready.

Start it at the server and at every party, with the arguments of serve and join except --predict. It checks
certificates, connections, clocks, versions, disks, folders, data and ids. It prints the same verdict everywhere and
exits with 0 (ready) or 1 (not ready). It sends counts and digests, never an id or a value, and writes nothing.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from glasu.cli.arguments import (
    add_extensions,
    add_log_options,
    add_overrides,
    parse_gibibytes,
    parse_path,
    parse_seconds,
)
from glasu.errors import ConfigError, GlasuError

if TYPE_CHECKING:
    from glasu.data.party import PartyData
    from glasu.network.findings import Finding, Verdict

INTERRUPTED = "nothing was changed"
SERVER_LOG = logging.getLogger("glasu.server")
EXAMPLE = "glasu doctor parties/a --server localhost:9443 --kit kits/a --out runs/a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject", type=parse_path, metavar="PARTY|RUN.toml", help="at a party: its folder; at the server: the settings"
    )
    add_overrides(parser, "at the server: override one setting; may be given several times")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", metavar="HOST:PORT", help="at a party: the address of the server")
    where.add_argument("--listen", metavar="HOST:PORT", help="at the server: address that the parties connect to")
    parser.add_argument(
        "--kit", type=parse_path, required=True, metavar="KIT", help="the kit of this role, from glasu provision"
    )
    parser.add_argument(
        "--out", type=parse_path, required=True, metavar="DIR", help="folder that the run will write to"
    )
    parser.add_argument(
        "--missing",
        choices=("refuse", "zero", "mean"),
        default="refuse",
        help="at a party: replacement for missing feature values (refuse)",
    )
    parser.add_argument(
        "--expect", type=parse_path, metavar="RUN.toml", help="at a party: refuse settings that differ from these"
    )
    parser.add_argument("--run", dest="only", metavar="ID", help="at a party: as for glasu join")
    parser.add_argument("--max-memory", type=parse_gibibytes, metavar="GIB", help="at a party: as for glasu join")
    parser.add_argument("--metrics", metavar="[HOST:]PORT", help="at the server: check that this address is free")
    parser.add_argument("--on-invalid-message", choices=("abort", "wait"), help="at the server: as for glasu serve")
    parser.add_argument(
        "--fresh", action="store_true", help="list the files that a fresh start would remove; nothing is removed now"
    )
    parser.add_argument(
        "--wait", type=parse_seconds, default=600.0, metavar="SECONDS", help="how long to wait for the others (600)"
    )
    add_extensions(parser)
    add_log_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.server and args.overrides:
        raise ConfigError(f"--set {args.overrides[0]}: settings belong to the server; pass this option there.")
    elsewhere, where = (
        (("metrics", "on_invalid_message"), "server") if args.server else (("expect", "only", "max_memory"), "parties")
    )
    for name in elsewhere:
        if getattr(args, name) is not None:
            option = {"only": "--run"}.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"{option} is an option of the {where}; remove it here.")
    verdict = _at_party(args) if args.server else _at_server(args)
    for line in verdict.lines():
        print(line)
    print(verdict.summary())
    return 0 if verdict.is_ready else 1


def _at_server(args: argparse.Namespace) -> Verdict:
    from glasu.cli.log import Log
    from glasu.config import RunConfig
    from glasu.network.compatibility import config_for_network
    from glasu.network.doctor.folder import check_server_folder
    from glasu.network.doctor.machine import check_kit, check_writable, current_time
    from glasu.network.doctor.server import examine
    from glasu.network.findings import Verdict
    from glasu.network.options import Listening, RoleEvent, ServeOptions
    from glasu.network.transport import check_address, check_listen_address
    from glasu.runtime.output_dir import refuse_contents_of_others

    config, address = RunConfig.from_toml(args.subject, args.overrides), check_address(args.listen, "--listen")
    refuse_contents_of_others(args.out, "server")
    check_listen_address(address)
    with Log(args, "server") as log:
        kit, certificate = check_kit(args.kit, "server", current_time(), SERVER_LOG)
        own = [certificate, *check_writable(args.out)]
        if args.metrics is not None:
            own.append(_check_metrics(args.metrics, address))
        if kit is None:
            return Verdict({"server": tuple(own)})
        roster = kit.roster
        config = config_for_network(config, roster)
        own += check_server_folder(args.out, config, roster, SERVER_LOG, fresh=args.fresh)

        def observe(event: RoleEvent) -> None:
            if isinstance(event, Listening):
                host = address.rpartition(":")[0]
                log.write_notice(f"listening on {host}:{event.port}, waiting for {', '.join(roster)}")

        options = ServeOptions(config=config, kit=kit, listen=address, out=args.out, wait=args.wait, observer=observe)
        return examine(options, own)


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


def _at_party(args: argparse.Namespace) -> Verdict:
    from glasu.cli.log import Log
    from glasu.config import RunConfig
    from glasu.network.doctor.folder import check_joining_folder
    from glasu.network.doctor.machine import check_kit, check_writable, current_time
    from glasu.network.findings import Verdict
    from glasu.network.transport import check_address
    from glasu.runtime.output_dir import refuse_contents_of_others

    address = check_address(args.server, "--server")
    expect = None if args.expect is None else RunConfig.from_toml(args.expect)
    if not args.subject.is_dir():
        raise ConfigError(f"{args.subject}: no such folder; give the folder of the party, which contains party.toml.")
    folder_name = args.subject.resolve().name
    with Log(args, folder_name):
        log = logging.getLogger(f"glasu.party.{folder_name}")
        kit, certificate = check_kit(args.kit, "party", current_time(), log)
        refuse_contents_of_others(args.out, "party", None if kit is None else kit.name)
        party, found = _read_data(args.subject, args.missing, log)
        own = [certificate, *check_writable(args.out), *found]
        name = folder_name if kit is None else kit.name
        own += check_joining_folder(args.out, name, party, args.only, log, fresh=args.fresh)
        if kit is None:
            return Verdict({folder_name: tuple(own)})
        if party is not None and party.name != kit.name:
            raise ConfigError(
                f"the data belongs to party {party.name!r} and the kit to party {kit.name!r}; use the kit of "
                f"{party.name!r}."
            )

        from glasu.network.doctor.party import VisitOptions, visit

        options = VisitOptions(
            party=party,
            kit=kit,
            server=address,
            out=args.out,
            expect=expect,
            wait=args.wait,
            max_memory=args.max_memory,
        )
        return visit(options, own)


def _read_data(folder: Path, missing: str, log: logging.Logger) -> tuple[PartyData | None, list[Finding]]:
    """Read the data of the party. If that fails, return a finding."""
    from glasu.data.folders import read_party_once
    from glasu.network.doctor.machine import log_detail
    from glasu.network.findings import Finding

    try:
        return read_party_once(folder, missing), []  # type: ignore[arg-type]
    except GlasuError as error:
        log_detail(log, "data", str(error))
        return None, [Finding("data", "bad", "its files cannot be used; see that party's log")]
