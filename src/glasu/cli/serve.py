"""glasu serve: run the server of a training between organisations.

It waits for the parties of its kit's roster, sends them the settings, and adds up what they send; it needs no data and
loads neither torch nor PyG. The same command started again after a crash goes on. Writes report.json. With --predict it
serves one prediction instead, and writes prediction.json.
"""

from __future__ import annotations

import argparse

from glasu.cli.arguments import add_run_file, named_path, output_folder, read_config
from glasu.errors import ConfigError

INTERRUPTED = "the parties wait; the same command goes on"
EXAMPLE = "glasu serve run.toml --listen 0.0.0.0:9443 --kit kits/server --out runs/server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where the parties will connect to")
    parser.add_argument(
        "--kit", type=named_path, required=True, metavar="KIT", help="the server's, from glasu provision"
    )
    parser.add_argument(
        "--out", type=named_path, required=True, metavar="DIR", help="folder for report.json and checkpoints"
    )
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="SECONDS", help="how long a party may be missing (600)"
    )
    parser.add_argument(
        "--predict", action="store_true", help="serve a prediction with the trained models instead of a training"
    )
    parser.add_argument("--fresh", action="store_true", help="start over, even if DIR holds an unfinished run")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> None:
    if args.predict and args.fresh:
        raise ConfigError("--fresh: a prediction has nothing to start over; leave it out.")
    config = read_config(args)
    out = output_folder(args.out)

    from glasu.cli.progress import say, shown
    from glasu.data.files import held
    from glasu.kits.kit import open_kit
    from glasu.runtime.network.handshakes import handshakes_told
    from glasu.runtime.network.serve import serve
    from glasu.runtime.network.streams import check_address

    address, kit = check_address(args.listen), open_kit(args.kit, "server")
    host = address.rpartition(":")[0]

    def tell(line: str) -> None:
        say([f"glasu serve: {line}"])

    def listened(port: int) -> None:
        tell(f"listening on {host}:{port}, waiting for {', '.join(kit.roster)}")

    if args.predict:
        from glasu.runtime.network.serve_prediction import serve_prediction

        with held(out), handshakes_told(tell):
            found = serve_prediction(config, kit, address, out, wait=args.wait, tell=tell, listened=listened)
        print(f"predicted {found['nodes']} nodes; {found['traffic']['bytes_to_clients'] / 1e6:.1f} MB went out.")
        return
    with held(out), handshakes_told(tell), shown("serve", config.train.num_rounds, quiet=args.quiet) as observe:
        report = serve(
            config,
            kit,
            address,
            out,
            fresh=args.fresh,
            wait=args.wait,
            observe=observe,
            tell=tell,
            listened=listened,
        )
    if report is not None:
        print(report.summary())
