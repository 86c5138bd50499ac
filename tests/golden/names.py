"""Check that no test was lost: python tests/golden/names.py [TREE] [--write].

Every name in test_names.txt must still be the name of a test somewhere under tests/, or have a line in
test_names_changed.txt: `path::old -> path::successor`, or `path::old: reason for its removal`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAMES, CHANGED = "test_names.txt", "test_names_changed.txt"
LINE = re.compile(r"(?P<old>\S+::\S+?)(?: -> (?P<successor>\S+::\S+)|: (?P<reason>\S.*))")


def list_tests(tree: Path) -> list[str]:
    """Return `path::name` of all test functions below tests/, those that need an extra included."""
    found = []
    for path in sorted((tree / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(tree).as_posix()}::{name}" for name in _test_functions(module.body)]
    return found


def _test_functions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield prefix + node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _test_functions(node.body, f"{prefix}{node.name}::")


def find_faults(old: list[str], new: list[str], changed: list[str]) -> list[str]:
    """Return the old names without a successor or reason, and the invalid lines."""
    faults, explained = [], set()
    for line in changed:
        match = LINE.fullmatch(line)
        if match is None:
            faults.append(f"{line}: expected `path::old -> path::successor` or `path::old: reason`")
        elif match["old"] not in old:
            faults.append(f"{match['old']}: is not in {NAMES}")
        elif match["successor"] and match["successor"] not in new:
            faults.append(f"{match['old']}: its successor {match['successor']} does not exist")
        else:
            explained.add(match["old"])
    there = Counter(_function(test) for test in new)
    same_place = set(new)
    for test in sorted(old, key=lambda test: test not in same_place):  # the remaining names are tests that moved
        name = _function(test)
        if there[name]:
            there[name] -= 1
        elif test not in explained:
            faults.append(f"{test}: is gone, without a successor or a reason in {CHANGED}")
    return faults


def _function(test: str) -> str:
    return test.rpartition("::")[2]


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def main() -> int:
    """Check a checkout, or write the list of its tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, nargs="?", default=FOLDER.parents[1], help="checkout; by default, this one")
    parser.add_argument("--write", action="store_true", help="write test_names.txt instead")
    args = parser.parse_args()
    if args.write:
        (FOLDER / NAMES).write_text("".join(f"{test}\n" for test in list_tests(args.tree)), encoding="utf-8")
        return 0
    old, new = _lines(FOLDER / NAMES), list_tests(args.tree)
    faults = find_faults(old, new, _lines(FOLDER / CHANGED))
    print(*faults, f"{len(old)} tests before, {len(new)} now, {len(faults)} unexplained", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
