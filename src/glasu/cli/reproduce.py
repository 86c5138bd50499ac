"""glasu reproduce: run the paper's experiments and compare the results with its tables.

Runs with stored results are not repeated, so the same command resumes after an interruption. It writes results.csv (one
row per run), curves.csv, tables.md, and report.html with plots over rounds, bytes and time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from glasu.cli.arguments import make_output_folder, parse_path
from glasu.experiments.plan import PAPER_TABLES, TABLE_NAMES

EXAMPLE = "glasu reproduce accuracy --datasets cora,citeseer --seeds 3 --out runs/reproduce"
INTERRUPTED = "finished runs are stored; start the same command again to resume"


def _parse_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} must be a comma-separated list of names")
    return names


def _parse_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 1 to 10000")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "table",
        choices=[*TABLE_NAMES, "all"],
        metavar="TABLE",
        help=f"{', '.join(TABLE_NAMES)}, or all (the tables of the paper)",
    )
    parser.add_argument("--datasets", type=_parse_names, metavar="A,B", help="data sets (default: all of the table)")
    parser.add_argument(
        "--methods",
        type=_parse_names,
        metavar="A,B",
        help="methods, as in results.csv, for example glasu-4 (default: all)",
    )
    parser.add_argument("--seeds", type=_parse_count, metavar="N", help="seeds 0..N-1 (default: 5; with --quick 1)")
    parser.add_argument("--jobs", type=_parse_count, metavar="J", help="parallel runs (default: one per core)")
    parser.add_argument("--quick", action="store_true", help="a quick try: a quarter of the rounds, one seed")
    parser.add_argument(
        "--out", type=parse_path, metavar="DIR", help="output folder (default: runs/reproduce, or runs/quick)"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _format_command(args: argparse.Namespace) -> str:
    """Return the command line with these arguments, but without --out."""
    words = ["glasu reproduce", args.table]
    words += [f"--{name} {','.join(named)}" for name in ("datasets", "methods") if (named := getattr(args, name))]
    words += [f"--{name} {value}" for name in ("seeds", "jobs") if (value := getattr(args, name)) is not None]
    return " ".join([*words, *(["--quick"] if args.quick else [])])


def run(args: argparse.Namespace) -> None:
    from glasu.runtime.output_dir import refuse_contents_of_others

    out = args.out or Path("runs/quick" if args.quick else "runs/reproduce")
    refuse_contents_of_others(out, "other")
    make_output_folder(out)

    from glasu.cli.log import LineLog
    from glasu.experiments.reproduce import QUICK, reproduce
    from glasu.experiments.tables import to_markdown
    from glasu.runtime.inprocess import count_cores

    with LineLog(quiet=args.quiet):
        reproduction = reproduce(
            PAPER_TABLES if args.table == "all" else [args.table],
            out,
            datasets=args.datasets,
            seeds=args.seeds or (1 if args.quick else 5),
            jobs=args.jobs or count_cores(),
            quick=args.quick,
            methods=args.methods,
            command=_format_command(args),
        )
    print(to_markdown(reproduction.tables, QUICK if args.quick else ""))
    print(f"tables and plots: {out / 'report.html'}")
