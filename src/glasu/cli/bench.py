"""glasu bench: measure this machine: time and traffic of a round, and what they would be otherwise.

Runs the scripts of the project's benchmarks/, one question each; what follows the name goes to the script. Without a
name, those that take minutes, not hours; --quick makes them shorter. Figures, and the commands that made them, are in
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

from glasu.errors import ConfigError

EXAMPLE = "glasu bench traffic"
USUAL = ("round", "sampling", "kernels", "speed", "traffic", "convergence")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="show the benchmarks and their questions")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and smaller sizes")
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"which one; without: {', '.join(USUAL)}")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="for the script; NAME --help says what")


def run(args: argparse.Namespace) -> None:
    place = folder()
    found = scripts(place)
    if args.list:
        width = max(map(len, found))
        print("\n".join(f"{name:<{width}}  {question}" for name, question in found.items()))
        return
    if args.name is not None and args.name not in found:
        raise ConfigError(f"there is no benchmark {args.name!r}; choose from {', '.join(found)}.")
    words = ["--quick", *args.words] if args.quick else args.words
    for name in USUAL if args.name is None else [args.name]:
        done = subprocess.run([sys.executable, str(place / f"{name}.py"), *words], check=False)
        if done.returncode:
            raise SystemExit(done.returncode)


def folder() -> Path:
    """Return where the scripts lie: in an installed package inside it, in a clone at its root."""
    package = Path(__file__).parents[1]
    for place in (package / "benchmarks", package.parents[1] / "benchmarks"):
        if place.is_dir():
            return place
    raise ConfigError("the benchmarks were not installed with this package; run it from a clone of the project.")


def scripts(place: Path) -> dict[str, str]:
    """Return name -> question, the docstring's first line, of all that can be run; other files are parts of those."""
    found = {}
    for path in sorted(place.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found
