"""Options that glasu serve, glasu join and glasu doctor share."""

from __future__ import annotations

import argparse

from glasu.cli.arguments import add_extensions, add_log_options, parse_gibibytes, parse_path, parse_seconds


def add_role_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every role."""
    parser.add_argument(
        "--kit", type=parse_path, required=True, metavar="KIT", help="the kit of this role, from glasu provision"
    )
    parser.add_argument(
        "--out", type=parse_path, required=True, metavar="DIR", help="folder for results and checkpoints"
    )
    parser.add_argument(
        "--wait",
        type=parse_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for the other side to connect or reconnect (600)",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over even if DIR holds an unfinished run; do not use it to resume",
    )
    add_extensions(parser)
    add_log_options(parser)


def add_server_options(parser: argparse.ArgumentParser, where: str = "") -> None:
    """Add the options of the server; their help starts with `where`."""
    parser.add_argument(
        "--on-invalid-message",
        choices=("abort", "wait"),
        help=f"{where}on an invalid message: abort the run, or drop the sender and wait for it to reconnect (abort)",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help=f"{where}serve Prometheus metrics at this address during the training (host 127.0.0.1)",
    )


def add_party_options(parser: argparse.ArgumentParser, where: str = "") -> None:
    """Add the options of a party; their help starts with `where`."""
    parser.add_argument(
        "--expect", type=parse_path, metavar="RUN.toml", help=f"{where}refuse settings that differ from these"
    )
    parser.add_argument(
        "--run",
        dest="only",
        metavar="ID",
        help=f"{where}join only this run; the id is `run` in the server's serving.json",
    )
    parser.add_argument(
        "--missing",
        choices=("refuse", "zero", "mean"),
        default="refuse",
        help=f"{where}replacement for missing feature values (refuse)",
    )
    parser.add_argument(
        "--max-memory",
        type=parse_gibibytes,
        metavar="GIB",
        help=f"{where}refuse settings whose model needs more memory (half of this machine's)",
    )
