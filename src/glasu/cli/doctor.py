"""glasu doctor: find out before a run whether it can take place.

Start it at the server and at every party, with the arguments that serve and join will have, but for --predict. It
looks at certificates, reachability, clocks, versions, disks, folders, data and ids, shows the same verdict to all, and
ends with 0 (ready) or 1 (not). What it tells the others are counts and digests, never an id or a value.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from glasu.cli.arguments import add_log, add_overrides, gibibytes, named_path, output_folder, seconds
from glasu.errors import ConfigError, GlasuError

if TYPE_CHECKING:
    from glasu.data.party import PartyData
    from glasu.network.doctor.findings import Finding, Verdict

INTERRUPTED = "nothing was changed"
EXAMPLE = "glasu doctor parties/a --server localhost:9443 --kit kits/a --out runs/a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject", type=named_path, metavar="PARTY|RUN.toml", help="at a party its folder, at the server the settings"
    )
    add_overrides(parser, "at the server: override one setting; may be given several times")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", metavar="HOST:PORT", help="at a party: where the server listens")
    where.add_argument("--listen", metavar="HOST:PORT", help="at the server: where the parties will connect to")
    parser.add_argument("--kit", type=named_path, required=True, metavar="KIT", help="from glasu provision")
    parser.add_argument(
        "--out", type=named_path, required=True, metavar="DIR", help="folder that the run will write to"
    )
    parser.add_argument(
        "--missing",
        choices=("refuse", "zero", "mean"),
        default="refuse",
        help="at a party: what stands for missing feature values (refuse)",
    )
    parser.add_argument(
        "--expect", type=named_path, metavar="RUN.toml", help="at a party: the settings that were agreed on"
    )
    parser.add_argument("--run", dest="only", metavar="ID", help="at a party: as for glasu join")
    parser.add_argument("--max-memory", type=gibibytes, metavar="GIB", help="at a party: as for glasu join")
    parser.add_argument("--metrics", metavar="[HOST:]PORT", help="at the server: whether that can be listened on")
    parser.add_argument("--on-nonsense", choices=("stop", "wait"), help="at the server: as for glasu serve")
    parser.add_argument("--fresh", action="store_true", help="what starting over would remove; nothing is removed now")
    parser.add_argument(
        "--wait", type=seconds, default=600.0, metavar="SECONDS", help="how long to wait for the others (600)"
    )
    add_log(parser)


def run(args: argparse.Namespace) -> int:
    if args.server and args.overrides:
        raise ConfigError(f"--set {args.overrides[0]}: the server has the settings; set it there.")
    elsewhere, where = (
        (("metrics", "on_nonsense"), "server") if args.server else (("expect", "only", "max_memory"), "parties")
    )
    for name in elsewhere:
        if getattr(args, name) is not None:
            option = {"only": "--run"}.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"{option}: is for the {where}; leave it out here.")
    verdict = _at_party(args) if args.server else _at_server(args)
    for line in verdict.lines():
        print(line)
    print(verdict.in_words())
    return 0 if verdict.is_ready else 1


def _at_server(args: argparse.Namespace) -> Verdict:
    from glasu.network.tls_log import handshakes_told, own_lines_asked

    everything = own_lines_asked()  # before anything below loads gRPC

    from glasu.cli.log import Log
    from glasu.config import RunConfig
    from glasu.network.compatibility import for_network
    from glasu.network.doctor.examination import examine
    from glasu.network.doctor.findings import Verdict, told
    from glasu.network.doctor.folder import server_folder
    from glasu.network.doctor.machine import kit_findings, present
    from glasu.network.transport import check_address
    from glasu.runtime.output_dir import refuse_contents_of_others

    config, address = RunConfig.from_toml(args.subject, args.overrides), check_address(args.listen, "--listen")
    tell = Log(args, "server").tell
    refuse_contents_of_others(args.out, "server")
    out = output_folder(args.out)
    kit, own = kit_findings(args.kit, "server", present())
    if args.metrics is not None:
        own.append(_metrics(args.metrics, address))
    if kit is not None:
        own += server_folder(out, for_network(config, kit.roster), kit.roster, fresh=args.fresh)
    told(own, tell)
    if kit is None:
        return Verdict({"server": own})
    host, roster = address.rpartition(":")[0], kit.roster

    def listened(port: int) -> None:
        tell(f"listening on {host}:{port}, waiting for {', '.join(roster)}")

    with handshakes_told(tell, everything=everything):
        return examine(config, kit, address, out, own=own, wait=args.wait, tell=tell, listened=listened)


def _metrics(text: str, listen: str) -> Finding:
    """Try to listen where Prometheus will ask."""
    from glasu.integrations.prometheus import metrics_address, metrics_served, refuse_where_parties_come
    from glasu.network.doctor.findings import Finding

    refuse_where_parties_come(text, listen)
    address = metrics_address(text)
    try:
        with metrics_served(address, lambda: None):
            return Finding("metrics", "good", "the address for Prometheus is free")
    except ConfigError as error:
        return Finding("metrics", "bad", str(error).rstrip("."))


def _at_party(args: argparse.Namespace) -> Verdict:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # why a connection fails is said in our words

    from glasu.cli.log import Log
    from glasu.config import RunConfig
    from glasu.network.doctor.findings import Verdict, told
    from glasu.network.doctor.folder import party_folder
    from glasu.network.doctor.machine import kit_findings, present
    from glasu.network.transport import check_address
    from glasu.runtime.output_dir import refuse_contents_of_others

    address = check_address(args.server, "--server")
    expect = None if args.expect is None else RunConfig.from_toml(args.expect)
    if not args.subject.is_dir():
        raise ConfigError(f"{args.subject}: there is no such folder; name the party's, with party.toml in it.")
    kit, own = kit_findings(args.kit, "party", present())
    refuse_contents_of_others(args.out, "party", None if kit is None else kit.name)
    out = output_folder(args.out)
    party, found = _data(args.subject, args.missing)
    tell = Log(args, args.subject.resolve().name if kit is None else kit.name).tell
    own = told([*own, *found, *party_folder(out, party, args.only, fresh=args.fresh)], tell)
    if kit is None:
        return Verdict({args.subject.resolve().name: own})
    if party is not None and party.name != kit.name:
        raise ConfigError(
            f"the data is of party {party.name!r} and the kit of party {kit.name!r}; one of them is wrong."
        )

    from glasu.network.doctor.visit import visit

    memory = args.max_memory
    return visit(party, kit, address, out, own=own, expect=expect, wait=args.wait, max_memory=memory, tell=tell)


def _data(folder: Path, missing: str) -> tuple[PartyData | None, list[Finding]]:
    """Read the party's data; None where that fails, and why."""
    from glasu.data.cache.entries import open_folder
    from glasu.network.doctor.findings import Finding

    try:
        return open_folder(folder, missing), []  # type: ignore[arg-type]
    except GlasuError as error:
        return None, [Finding("data", "bad", "its files cannot be used; it says there why", str(error))]
