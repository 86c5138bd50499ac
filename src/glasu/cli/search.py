"""glasu search: find the settings with the best validation score, optionally within a byte budget.

It writes study.db (the optuna study; the same command resumes it), trials.csv and best.toml to the output folder. Train
with the best settings: `glasu train DIR/best.toml --out RUN`.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import fields

from glasu.cli.arguments import add_extensions, add_run_file, make_output_folder, parse_path

INTERRUPTED = "finished trials are stored; start the same command again to resume"
EXAMPLE = "glasu search examples/cora.toml --space bytes --max-bytes 20MB --trials 60 --jobs 2 --out runs/search"
UNIT_BYTES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: 79MB, 79e6 or 79000000."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgt]?i?b?)\s*", text, re.IGNORECASE)
    try:
        if found is None:
            raise ValueError
        return round(float(found[1]) * UNIT_BYTES[found[2].lower()])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; write 79MB, 79e6 or 79000000") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_extensions(parser)
    parser.add_argument(
        "--out", type=parse_path, required=True, metavar="DIR", help="folder for study.db and best.toml"
    )
    parser.add_argument(
        "--space", default="default", metavar="NAME|FILE.toml", help="search space: default, bytes, paper, or a file"
    )
    parser.add_argument("--sampler", default="tpe", metavar="tpe|grid|random", help="search method (default: tpe)")
    parser.add_argument(
        "--trials", type=int, metavar="N", help="total number of trials (default: 40; for a grid, all points)"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per trial (default: 1)")
    parser.add_argument(
        "--max-bytes",
        type=parse_bytes,
        metavar="B",
        help="byte limit of a run, for example 79MB; later evaluations of the run do not count",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="parallel trials, one process each (default: 1)"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> None:
    from glasu.cli.log import LineLog
    from glasu.experiments.search import SearchOptions, search
    from glasu.runtime.output_dir import refuse_contents_of_others

    options = SearchOptions(**{item.name: getattr(args, item.name) for item in fields(SearchOptions)})
    refuse_contents_of_others(args.out, "other")
    make_output_folder(args.out)
    with LineLog(quiet=args.quiet):
        print(search(options).summary())
