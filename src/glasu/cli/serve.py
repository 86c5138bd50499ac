"""glasu serve: run the server of a training run between organisations.

The server waits for the parties of its kit's roster, sends them the settings and aggregates their messages. It needs no
data and loads neither torch nor PyG. After a crash, start the same command again: it continues. It writes report.json.
With --predict it serves one prediction instead and writes prediction.json. After training with party dropout, the
connected parties predict without the parties that are absent for --wait seconds. With --align it serves one private
alignment of the parties' ids (`glasu align`) and writes alignment.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from glasu.cli.align import add_max_ids
from glasu.cli.arguments import add_role_options, add_run_file, add_server_options, make_output_folder, read_config
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from glasu.network.options import RoleEvent, ServeOptions, View

INTERRUPTED = "connected parties wait; start the same command again to resume"
EXAMPLE = "glasu serve run.toml --listen 0.0.0.0:9443 --kit kits/server --out runs/server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address that the parties connect to")
    parser.add_argument(
        "--predict", action="store_true", help="serve a prediction with the trained models instead of training"
    )
    parser.add_argument(
        "--align", action="store_true", help="serve a private alignment of the parties' ids instead of training"
    )
    add_max_ids(parser, "with --align: ")
    add_server_options(parser)
    add_role_options(parser)


def run(args: argparse.Namespace) -> None:
    if args.predict and args.align:
        raise ConfigError("--predict and --align cannot be combined; remove one of them.")
    if (args.predict or args.align) and (args.fresh or args.metrics):
        extra = "--fresh" if args.fresh else "--metrics"
        what = "a prediction" if args.predict else "an alignment"
        raise ConfigError(f"{extra} is an option for training; remove it for {what}.")
    config = read_config(args)

    from glasu.cli.log import Log
    from glasu.files import hold_folder, raise_descriptor_limit, share_one_heap
    from glasu.integrations.prometheus import parse_metrics_address, refuse_shared_address, serve_metrics
    from glasu.network.address import check_address
    from glasu.network.options import ServeOptions, Serving
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
        summary, name = _serve(options, args)
        log.write_finished(out / name)
        if summary is not None:
            print(summary)


def _serve(options: ServeOptions, args: argparse.Namespace) -> tuple[str | None, str]:
    """Serve training, a prediction or an alignment; return its result in one sentence and the name of the report."""
    from glasu.network.alignment_server import AlignmentServer
    from glasu.network.prediction_server import PredictionServer
    from glasu.network.serve import serve
    from glasu.network.training_server import TrainingServer

    if args.align:
        return serve(AlignmentServer(options, args.max_ids)).summary(), "alignment.json"
    if args.predict:
        return serve(PredictionServer(options)).summary(), "prediction.json"
    report = serve(TrainingServer(options))
    return None if report is None else report.summary(), "report.json"
