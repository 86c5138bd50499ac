"""glasu serve: run the server of a training between organisations.

The server waits for the parties of its kit's roster, sends them the settings and aggregates their messages. It needs no
data and loads neither torch nor PyG. After a crash, start the same command again: it continues. It writes report.json.
With --predict it serves one prediction instead and writes prediction.json. After a training with party dropout, the
connected parties predict without those that are absent for --wait seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from glasu.cli.arguments import add_role_options, add_run_file, add_server_options, make_output_folder, read_config
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from glasu.network.options import RoleEvent, View

INTERRUPTED = "connected parties wait; start the same command again to resume"
EXAMPLE = "glasu serve run.toml --listen 0.0.0.0:9443 --kit kits/server --out runs/server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address that the parties connect to")
    parser.add_argument(
        "--predict", action="store_true", help="serve a prediction with the trained models, not a training"
    )
    add_server_options(parser)
    add_role_options(parser)


def run(args: argparse.Namespace) -> None:
    if args.predict and (args.fresh or args.metrics):
        extra = "--fresh" if args.fresh else "--metrics"
        raise ConfigError(f"{extra} is an option of training; remove it for a prediction.")
    config = read_config(args)

    from glasu.cli.log import Log
    from glasu.files import hold_folder, raise_descriptor_limit, share_one_heap
    from glasu.integrations.prometheus import parse_metrics_address, refuse_shared_address, serve_metrics
    from glasu.network.address import check_address
    from glasu.network.options import ServeOptions, Serving
    from glasu.network.prediction_server import PredictionServer
    from glasu.network.serve import serve
    from glasu.network.training_server import TrainingServer
    from glasu.pki.kit import open_kit
    from glasu.runtime.output_dir import refuse_contents_of_others

    address = check_address(args.listen, "--listen")
    kit, log = open_kit(args.kit, "server"), Log(args, "server")
    refuse_contents_of_others(args.out, "server")
    if args.metrics is not None:
        refuse_shared_address(args.metrics, address)
    raise_descriptor_limit()
    share_one_heap()
    out = make_output_folder(args.out)
    views: list[Callable[[], View | None]] = []

    def observe(event: RoleEvent) -> None:
        if isinstance(event, Serving):
            views.append(event.view)
        log.observe(event)

    options = ServeOptions(
        config=config,
        kit=kit,
        listen=address,
        out=out,
        fresh=args.fresh,
        wait=args.wait,
        on_invalid_message=args.on_invalid_message or "abort",
        observer=observe,
    )
    with hold_folder(out), log, ExitStack() as stack:
        if args.metrics is not None:
            where = parse_metrics_address(args.metrics)
            port = stack.enter_context(serve_metrics(where, lambda: views[0]() if views else None))
            log.write_notice(f"metrics for Prometheus at http://{where[0]}:{port}/metrics")
        report = serve(PredictionServer(options)) if args.predict else serve(TrainingServer(options))
        log.write_finished(out / ("prediction.json" if args.predict else "report.json"))
        if report is not None:
            print(report.summary())
