"""glasu reproduce: run the paper's experiments and show its tables beside ours.

Runs that the output folder already holds are not repeated, so a command that was stopped goes on where it was. Writes
results.csv (one row per run), curves.csv, tables.md and report.html with plots over rounds, bytes and time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from glasu.cli.arguments import named_path, output_folder
from glasu.experiments.plan import TABLES

EXAMPLE = "glasu reproduce accuracy --datasets cora,citeseer --seeds 3 --out runs/reproduce"
INTERRUPTED = "what is done is kept, and the same command goes on from here"


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} must be names with commas between them")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 1 to 10000")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", choices=[*TABLES, "all"], metavar="TABLE", help=f"{', '.join(TABLES)} or all")
    parser.add_argument("--datasets", type=_names, metavar="A,B", help="on these data sets (those of the table)")
    parser.add_argument("--seeds", type=_positive, metavar="N", help="seeds 0..N-1 (5; with --quick 1)")
    parser.add_argument("--jobs", type=_positive, metavar="J", help="runs at once (as many as there are cores)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds, one seed: to see it work")
    parser.add_argument("--out", type=named_path, metavar="DIR", help="output folder (runs/reproduce, or runs/quick)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _command_line(args: argparse.Namespace) -> str:
    """Return the command without --out."""
    words = ["glasu reproduce", args.table]
    words += ["--datasets " + ",".join(args.datasets)] if args.datasets else []
    words += [f"--{name} {value}" for name in ("seeds", "jobs") if (value := getattr(args, name)) is not None]
    return " ".join([*words, *(["--quick"] if args.quick else [])])


def run(args: argparse.Namespace) -> None:
    out = output_folder(args.out or Path("runs/quick" if args.quick else "runs/reproduce"))

    from glasu.cli.log import show_log
    from glasu.experiments.reproduce import QUICK, reproduce
    from glasu.experiments.tables import to_markdown
    from glasu.runtime.inprocess import cores

    with show_log(quiet=args.quiet):
        reproduction = reproduce(
            TABLES if args.table == "all" else [args.table],
            out,
            datasets=args.datasets,
            seeds=args.seeds or (1 if args.quick else 5),
            jobs=args.jobs or cores(),
            quick=args.quick,
            command=_command_line(args),
        )
    print(to_markdown(reproduction.tables, QUICK if args.quick else ""))
    print(f"tables and plots: {out / 'report.html'}")
