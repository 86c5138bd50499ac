"""glasu join: take part in a training between organisations, with one party's data.

The data stays here: what leaves is counted in report.json. The server sends the settings, which are shown; with
--expect any difference is refused. The same command started again after a crash goes on. Writes report.json and model/.
"""

from __future__ import annotations

import argparse

from glasu.cli.arguments import named_path, output_folder

INTERRUPTED = "the others wait; the same command goes on"
EXAMPLE = "glasu join parties/a --server localhost:9443 --kit kits/a --out runs/a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("party", type=named_path, metavar="PARTY", help="the party's folder: party.toml, nodes, edges")
    parser.add_argument("--server", required=True, metavar="HOST:PORT", help="where glasu serve listens")
    parser.add_argument(
        "--kit", type=named_path, required=True, metavar="KIT", help="the party's, from glasu provision"
    )
    parser.add_argument(
        "--out", type=named_path, required=True, metavar="DIR", help="folder for results and checkpoints"
    )
    parser.add_argument("--expect", type=named_path, metavar="RUN.toml", help="refuse settings that differ from these")
    parser.add_argument(
        "--run", dest="only", metavar="ID", help="take part in this run only: `run` in the server's serving.json"
    )
    parser.add_argument(
        "--missing",
        choices=("refuse", "zero", "mean"),
        default="refuse",
        help="what stands for missing feature values (refuse)",
    )
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="SECONDS", help="how long the server may be away (600)"
    )
    parser.add_argument("--fresh", action="store_true", help="start over, even if DIR holds an unfinished run")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> None:
    out = output_folder(args.out)

    from glasu.cli.progress import say
    from glasu.config import RunConfig
    from glasu.data.files import held
    from glasu.kits.kit import open_kit
    from glasu.runtime.network.streams import check_address

    address, kit = check_address(args.server), open_kit(args.kit, "party")
    expect = None if args.expect is None else RunConfig.from_toml(args.expect)

    from glasu.data.cache import open_folder
    from glasu.protocol.messages import Event, RoundDone
    from glasu.runtime.network.join import join

    party = open_folder(args.party, args.missing)

    def observe(event: Event) -> None:
        if isinstance(event, RoundDone) and not args.quiet:
            loss = "" if event.loss is None else f", loss {event.loss:.3f}"
            say([f"glasu join: {party.name}: round {event.round + 1} done{loss}"])

    with held(out):
        report = join(
            party,
            kit,
            address,
            out,
            expect=expect,
            run=args.only,
            fresh=args.fresh,
            wait=args.wait,
            observe=observe,
            tell=lambda line: say([f"glasu join: {line}"]),
        )
    moved = report["traffic"]["bytes_to_server"] / 1e6
    print(f"{party.name}: finished; {moved:.1f} MB left this party. Weights SHA-256 {report['weights_sha256'][0]}")
