"""What several commands ask for: a run file with overrides, and a folder to write to."""

from __future__ import annotations

import argparse
import json
import math
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glasu.errors import DataError

if TYPE_CHECKING:
    from glasu.config import RunConfig


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """Ask for RUN.toml and `--set section.key=value`."""
    parser.add_argument("run_file", type=Path, metavar="RUN.toml", help="the run's settings")
    add_overrides(parser, "override one setting; may be given several times")


def add_overrides(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Ask for `--set section.key=value`."""
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE", help=purpose
    )


def add_extensions(parser: argparse.ArgumentParser) -> None:
    """Ask for `--extension MODULE`. `glasu.cli.main` loads the modules before it runs the command."""
    parser.add_argument(
        "--extension",
        action="append",
        default=[],
        dest="extensions",
        metavar="MODULE",
        help="Python module that registers choices of yours, such as a sampler; may be given several times",
    )


def add_log(parser: argparse.ArgumentParser) -> None:
    """Ask how a role of a network run writes to standard error."""
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="lines for people, or one JSON object per line (text)",
    )


def record(command: str, event: str, now: datetime, **fields: Any) -> str:
    """Return one JSON object: when, which command, what happened, and the rest."""
    from glasu.report import plain

    time = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps(plain({"time": time, "command": command, "event": event, **fields}), allow_nan=False)


def read_config(args: argparse.Namespace) -> RunConfig:
    """Return the settings that the arguments ask for."""
    from glasu.config import RunConfig

    return RunConfig.from_toml(args.run_file, args.overrides)


def named_path(text: str) -> Path:
    """Return a path that was typed; nothing, as an unset variable leaves it, is not the working folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def seconds(text: str) -> float:
    """Return for how long to wait, 0 to try once; what is no time would wait for ever."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value


def gibibytes(text: str) -> int:
    """Return a positive number of GiB in bytes."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of GiB")
    return int(value * 2**30)


def output_folder(path: Path) -> Path:
    """Make the folder now, so that a run does not fail at its end for want of one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except OSError as error:
        raise DataError(f"--out {path}: cannot be written to ({error.strerror}); choose another folder.") from None
    return path
