"""What several commands ask for: a run file with overrides, and a folder to write to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

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


def read_config(args: argparse.Namespace) -> RunConfig:
    """Return the settings that the arguments ask for."""
    from glasu.config import RunConfig

    return RunConfig.from_toml(args.run_file, args.overrides)


def named_path(text: str) -> Path:
    """Return a path that was typed; nothing, as an unset variable leaves it, is not the working folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def output_folder(path: Path) -> Path:
    """Make the folder now, so that a run does not fail at its end for want of one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except OSError as error:
        raise DataError(f"--out {path}: cannot be written to ({error.strerror}); choose another folder.") from None
    return path
