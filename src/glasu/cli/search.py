"""glasu search: find the settings that do best on validation, within a byte budget if asked.

Writes study.db (optuna's, to go on with the same command), trials.csv and best.toml to the output folder; then
`glasu train DIR/best.toml --out RUN` trains with what was found.
"""

from __future__ import annotations

import argparse
import re

from glasu.cli.arguments import add_extensions, add_run_file, named_path, output_folder

INTERRUPTED = "the trials that ended are kept, and the same command goes on from here"
EXAMPLE = "glasu search examples/cora.toml --space bytes --max-bytes 20MB --trials 60 --jobs 2 --out runs/search"
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def number_of_bytes(text: str) -> int:
    """Read 79MB, 79e6 or 79000000."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgt]?i?b?)\s*", text, re.IGNORECASE)
    try:
        if found is None:
            raise ValueError
        return round(float(found[1]) * UNITS[found[2].lower()])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write 79MB, 79e6 or 79000000") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    add_extensions(parser)
    parser.add_argument(
        "--out", type=named_path, required=True, metavar="DIR", help="folder for study.db and best.toml"
    )
    parser.add_argument(
        "--space", default="default", metavar="NAME|FILE.toml", help="what varies: default, bytes, paper, or a file"
    )
    parser.add_argument("--sampler", default="tpe", metavar="tpe|grid|random", help="how points are chosen (tpe)")
    parser.add_argument("--trials", type=int, metavar="N", help="trials in the end (40; of a grid, all points)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per trial (1)")
    parser.add_argument(
        "--max-bytes", type=number_of_bytes, metavar="B", help="what a run may move until its best model, as 79MB"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trials at once, one process each (1)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> None:
    from glasu.cli.log import show_log
    from glasu.experiments.search import search

    with show_log(quiet=args.quiet):
        result = search(
            args.run_file,
            output_folder(args.out),
            overrides=args.overrides,
            space=args.space,
            sampler=args.sampler,
            trials=args.trials,
            seeds=args.seeds,
            max_bytes=args.max_bytes,
            jobs=args.jobs,
        )
    print(result.summary())
