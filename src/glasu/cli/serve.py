"""glasu serve: run the server of a training between organisations.

It waits for the parties of its kit's roster, sends them the settings, and adds up what they send; it needs no data and
loads neither torch nor PyG. The same command started again after a crash goes on. Writes report.json. With --predict it
serves one prediction instead, and writes prediction.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from glasu.cli.arguments import add_log, add_run_file, named_path, output_folder, read_config, seconds
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from glasu.cli.log import Log
    from glasu.config import RunConfig
    from glasu.pki.kit import Kit

INTERRUPTED = "parties that have come wait; the same command goes on"
FOR_STRAGGLERS = "for some seconds only: parties that have not heard it may ask"
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
        "--wait",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long a party may be without a connection (600)",
    )
    parser.add_argument(
        "--on-nonsense",
        choices=("stop", "wait"),
        default="stop",
        help="when a party sends what cannot be: end the run, or refuse that party and wait for its return (stop)",
    )
    parser.add_argument(
        "--predict", action="store_true", help="serve a prediction with the trained models instead of a training"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over, even if DIR holds an unfinished run; not for going on after a stop",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="answer Prometheus there while the training lasts; the host is 127.0.0.1 unless given",
    )
    add_log(parser)


def run(args: argparse.Namespace) -> None:
    if args.predict and (args.fresh or args.metrics):
        extra = "--fresh" if args.fresh else "--metrics"
        raise ConfigError(f"{extra}: is for trainings, and this is a prediction; leave it out.")
    config = read_config(args)

    from glasu.network.tls_log import handshakes_told, own_lines_asked

    everything = own_lines_asked()  # before anything below loads gRPC

    from glasu.cli.log import Log
    from glasu.files import hold_folder, raise_descriptor_limit
    from glasu.network.transport import check_address
    from glasu.pki.kit import open_kit
    from glasu.runtime.output_dir import refuse_contents_of_others

    raise_descriptor_limit()
    refuse_contents_of_others(args.out, "server")
    out = output_folder(args.out)
    address, kit, log = check_address(args.listen, "--listen"), open_kit(args.kit, "server"), Log(args, "server")
    host = address.rpartition(":")[0]

    def listened(port: int, *, finished: bool = False) -> None:
        purpose = f"waiting for {', '.join(kit.roster)}"
        log.tell(f"listening on {host}:{port}, {FOR_STRAGGLERS if finished else purpose}")

    with hold_folder(out), handshakes_told(log.tell, everything=everything):
        if args.predict:
            _predict(args, config, kit, address, log, listened)
        else:
            _train(args, config, kit, address, log, listened)


def _predict(
    args: argparse.Namespace, config: RunConfig, kit: Kit, address: str, log: Log, listened: Callable[[int], None]
) -> None:
    from glasu.network.serve_prediction import serve_prediction

    found = serve_prediction(
        config,
        kit,
        address,
        args.out,
        wait=args.wait,
        on_nonsense=args.on_nonsense,
        tell=log.tell,
        listened=listened,
    )
    log.finished(args.out / "prediction.json")
    print(f"predicted {found['nodes']} nodes; {found['traffic']['bytes_to_clients'] / 1e6:.1f} MB went out.")


def _train(
    args: argparse.Namespace, config: RunConfig, kit: Kit, address: str, log: Log, listened: Callable[..., None]
) -> None:
    from glasu.integrations.prometheus import metrics_address, metrics_served, refuse_where_parties_come
    from glasu.network.serve import serve
    from glasu.network.status import View

    watched: list[Callable[[], View]] = []
    with ExitStack() as stack:
        if args.metrics is not None:
            refuse_where_parties_come(args.metrics, address)
            where = metrics_address(args.metrics)
            port = stack.enter_context(metrics_served(where, lambda: watched[0]() if watched else None))
            log.tell(f"metrics for Prometheus at http://{where[0]}:{port}/metrics")
        report = serve(
            config,
            kit,
            address,
            args.out,
            fresh=args.fresh,
            wait=args.wait,
            on_nonsense=args.on_nonsense,
            observe=log.observe,
            tell=log.tell,
            status=log.status,
            watched=watched.append,
            listened=lambda port: listened(port, finished=watched[0]().finished),
        )
    log.finished(args.out / "report.json")
    if report is not None:
        print(report.summary())
