"""glasu serve: run the server of a training between organisations.

The server waits for the parties of its kit's roster, sends them the settings and aggregates their messages. It needs no
data and loads neither torch nor PyG. After a crash, start the same command again: it continues. It writes report.json.
With --predict it serves one prediction instead and writes prediction.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from glasu.cli.arguments import (
    add_extensions,
    add_log_options,
    add_run_file,
    make_output_folder,
    parse_path,
    parse_seconds,
    read_config,
)
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from glasu.cli.log import Log
    from glasu.network.options import RoleEvent, ServeOptions
    from glasu.network.status import View

INTERRUPTED = "connected parties wait; start the same command again to resume"
EXAMPLE = "glasu serve run.toml --listen 0.0.0.0:9443 --kit kits/server --out runs/server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address that the parties connect to")
    parser.add_argument(
        "--kit", type=parse_path, required=True, metavar="KIT", help="the kit of the server, from glasu provision"
    )
    parser.add_argument(
        "--out", type=parse_path, required=True, metavar="DIR", help="folder for report.json and checkpoints"
    )
    parser.add_argument(
        "--wait",
        type=parse_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for a party to connect or reconnect (600)",
    )
    parser.add_argument(
        "--on-invalid-message",
        choices=("abort", "wait"),
        default="abort",
        help="on an invalid message: abort the run, or drop the sender and wait for it to reconnect (abort)",
    )
    parser.add_argument(
        "--predict", action="store_true", help="serve a prediction with the trained models, not a training"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over even if DIR holds an unfinished run; do not use it to resume",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="serve Prometheus metrics at this address during the training (host 127.0.0.1)",
    )
    add_extensions(parser)
    add_log_options(parser)


def run(args: argparse.Namespace) -> None:
    if args.predict and (args.fresh or args.metrics):
        extra = "--fresh" if args.fresh else "--metrics"
        raise ConfigError(f"{extra} is an option of training; remove it for a prediction.")
    config = read_config(args)

    from glasu.cli.log import Log
    from glasu.files import hold_folder, raise_descriptor_limit
    from glasu.network.options import Listening, ServeOptions
    from glasu.network.transport import check_address, check_listen_address
    from glasu.pki.kit import open_kit
    from glasu.runtime.output_dir import refuse_contents_of_others

    address = check_address(args.listen, "--listen")
    kit, log = open_kit(args.kit, "server"), Log(args, "server")
    refuse_contents_of_others(args.out, "server")
    check_listen_address(address)  # before the folder is created: a wrong address must leave no folder
    raise_descriptor_limit()
    out = make_output_folder(args.out)

    def observe(event: RoleEvent) -> None:
        if isinstance(event, Listening):
            host = address.rpartition(":")[0]
            purpose = (
                "for parties that still need the result of the finished run"
                if event.finished
                else "for " + ", ".join(kit.roster)
            )
            log.write_notice(f"listening on {host}:{event.port}, waiting {purpose}")
        log.observe(event)

    options = ServeOptions(
        config=config,
        kit=kit,
        listen=address,
        out=out,
        fresh=args.fresh,
        wait=args.wait,
        on_invalid_message=args.on_invalid_message,
        observer=observe,
    )
    with hold_folder(out), log:
        if args.predict:
            _predict(options, log)
        else:
            _train(options, log, args.metrics)


def _predict(options: ServeOptions, log: Log) -> None:
    from glasu.network.serve import serve_prediction

    report = serve_prediction(options)
    log.write_finished(options.out / "prediction.json")
    print(f"predicted {report.nodes} nodes; {report.traffic.bytes_to_clients / 1e6:.1f} MB sent to the parties.")


def _train(options: ServeOptions, log: Log, metrics: str | None) -> None:
    from dataclasses import replace

    from glasu.integrations.prometheus import parse_metrics_address, refuse_shared_address, serve_metrics
    from glasu.network.options import Serving
    from glasu.network.serve import serve

    views: list[Callable[[], View]] = []

    def observe(event: RoleEvent) -> None:
        if isinstance(event, Serving) and event.view is not None:
            views.append(event.view)
        options.emit(event)

    with ExitStack() as stack:
        if metrics is not None:
            refuse_shared_address(metrics, options.listen)
            where = parse_metrics_address(metrics)
            port = stack.enter_context(serve_metrics(where, lambda: views[0]() if views else None))
            log.write_notice(f"metrics for Prometheus at http://{where[0]}:{port}/metrics")
        report = serve(replace(options, observer=observe))
    log.write_finished(options.out / "report.json")
    if report is not None:
        print(report.summary())
