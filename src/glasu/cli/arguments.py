"""Command-line arguments that several commands share: run file, overrides, options of a role, output folder."""

from __future__ import annotations

import argparse
import json
import math
import typing
from datetime import datetime
from pathlib import Path
from typing import Any

from glasu.config import DataConfig, RunConfig
from glasu.config_sections import Missing
from glasu.errors import DataError


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """Add the arguments RUN.toml and `--set section.key=value`."""
    parser.add_argument("run_file", type=Path, metavar="RUN.toml", help="the run's settings")
    add_overrides(parser, "override one setting; may be given several times")


def add_overrides(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the argument `--set section.key=value`."""
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE", help=purpose
    )


def add_extensions(parser: argparse.ArgumentParser) -> None:
    """Add `--extension MODULE`. `glasu.cli.main` loads the modules before it runs the command."""
    parser.add_argument(
        "--extension",
        action="append",
        default=[],
        dest="extensions",
        metavar="MODULE",
        help="Python module that registers your own choices, such as a sampler; may be given several times",
    )


def add_role_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that glasu serve, glasu join and glasu doctor share."""
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
        help="how long to wait for the other side, at the start or after a lost connection (default: 600)",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over even if DIR contains an unfinished run; to resume a run, leave this option out",
    )
    add_extensions(parser)
    add_log_options(parser)


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Add --quiet and --log-format."""
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="text lines, or one JSON object per line (default: text)",
    )


def add_server_options(parser: argparse.ArgumentParser, where: str = "") -> None:
    """Add the options of the server; their help starts with `where`."""
    parser.add_argument(
        "--on-invalid-message",
        choices=("abort", "wait"),
        help=f"{where}abort the run, or drop the sender and wait for it to reconnect (default: abort)",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help=f"{where}serve Prometheus metrics at this address during the training (default host: 127.0.0.1)",
    )


def add_party_options(parser: argparse.ArgumentParser, where: str = "") -> None:
    """Add the options of a party; their help starts with `where`."""
    parser.add_argument(
        "--expect", type=parse_path, metavar="RUN.toml", help=f"{where}refuse settings that differ from this file"
    )
    parser.add_argument(
        "--run",
        dest="only",
        metavar="ID",
        help=f"{where}join only this run; the id is `run` in the server's serving.json",
    )
    parser.add_argument(
        "--missing",
        choices=typing.get_args(Missing),
        default=DataConfig.missing,
        help=f"{where}treatment of missing feature values (default: %(default)s)",
    )
    parser.add_argument(
        "--max-memory",
        type=parse_gibibytes,
        metavar="GIB",
        help=f"{where}refuse settings whose model needs more memory (default: half of this machine's memory)",
    )
    add_policy(parser, where=where)


def add_policy(
    parser: argparse.ArgumentParser, found: str = "next to the data or in the kit", *, where: str = ""
) -> None:
    """Add --policy. `found` says where the default policy.toml is; the help starts with `where`."""
    parser.add_argument(
        "--policy",
        type=parse_path,
        metavar="FILE",
        help=f"{where}refuse releases that this file forbids (default: policy.toml {found})",
    )


def format_event(command: str, event: str, now: datetime, **fields: Any) -> str:
    """Format an event as one JSON object: time, command, event name, and its fields."""
    from glasu.report import to_json_value

    time = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps(to_json_value({"time": time, "command": command, "event": event, **fields}), allow_nan=False)


def read_config(args: argparse.Namespace) -> RunConfig:
    """Read RUN.toml and apply the overrides."""
    return RunConfig.from_toml(args.run_file, args.overrides)


def parse_path(text: str) -> Path:
    """Parse a path. Refuse an empty path, because an unset shell variable must not mean the working folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def parse_seconds(text: str) -> float:
    """Parse a number of seconds to wait; 0 means to try once. NaN and infinity are refused."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, 0 or more")
    return value


def parse_count(text: str) -> int:
    """Parse a positive integer."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of 1 or more")
    return int(text)


def parse_gibibytes(text: str) -> int:
    """Parse a positive number of GiB; return bytes."""
    try:
        value = float(text) * 2**30
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of GiB")
    return int(value)


def make_output_folder(path: Path) -> Path:
    """Create the output folder before the run, so that a wrong path fails at the start and not at the end."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except FileExistsError:
        raise DataError(f"--out {path}: is a file, not a folder; choose another folder.") from None
    except OSError as error:
        raise DataError(f"--out {path}: cannot write here ({error.strerror}); choose another folder.") from None
    return path
