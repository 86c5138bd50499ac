"""Run the same settings in two checkouts on this machine and compare them bit by bit.

    python tests/golden/compare.py OLD_TREE [--setting NAME]...

Compares weights, predictions, losses, evaluations and traffic. The exit code is 1 if a field differs that CHANGES.md
does not list. Both checkouts run with this Python; no internal name of either is used.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from runs import TREE, differing_fields, environment
from settings import SETTINGS

CHANGES = Path(__file__).parent / "CHANGES.md"
COLUMNS = {  # title: fields
    "weights": ("weights_sha256",),
    "predictions": ("predictions_sha256",),
    "losses": ("losses", "evaluations", "validation", "test", "overridden"),
    "traffic": ("traffic", "traffic_by_round", "releases"),
    "trace": ("trace",),
    "resumed": ("resumed",),
}
Change = tuple[str, str, str]  # patterns for setting and field, and the reason


def read_changes(text: str) -> list[Change]:
    """Return the lines `- setting: field: reason`; setting and field may hold * as a wildcard."""
    found = re.findall(r"^- ([^:\s]+): ([^:\s]+): (\S.*)$", text, re.MULTILINE)
    return [(setting, field, reason) for setting, field, reason in found]


def find_reason(changes: Sequence[Change], setting: str, field: str) -> str | None:
    """Return the listed reason for a difference."""
    fits = (reason for name, part, reason in changes if fnmatchcase(setting, name) and fnmatchcase(field, part))
    return next(fits, None)


def run_tree(tree: Path, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run settings with the package of a checkout, in a separate process."""
    result = folder / "outcomes.json"
    script = Path(__file__).with_name("runs.py").resolve()
    env = {**environment(tree), "GLASU_CACHE": str(folder / "cache")}
    with (folder / "stderr").open("w+b") as errors:
        code = subprocess.run([sys.executable, script, tree, result, *names], env=env, stderr=errors).returncode
        if code:
            errors.seek(0)
            sys.exit(f"{tree}: exit code {code}\n{errors.read().decode(errors='replace')}")
    outcomes: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return outcomes


def find_differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Return all differing fields of one setting; a failed run differs from everything."""
    errors = [f"{side}: {outcome['error']}" for side, outcome in (("old", old), ("new", new)) if "error" in outcome]
    if errors:
        return {"error": "; ".join(errors)}
    before, after = ({**outcome["recorded"], **outcome["local"]} for outcome in (old, new))
    if not is_traced(old) or not is_traced(new):
        del before["trace"], after["trace"]
    return differing_fields(before, after)


def is_traced(outcome: dict[str, Any]) -> bool:
    """Return whether the checkout logs its messages; versions before the logger `glasu.wire` do not."""
    recorded = outcome["recorded"]
    return bool(recorded["trace"]["train"]) or not recorded["traffic"]["messages"]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two checkouts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_TREE", help="checkout to compare with")
    parser.add_argument("--new", type=Path, default=TREE, metavar="TREE", help="the other one; by default, this one")
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), metavar="NAME", help="may be repeated")
    args = parser.parse_args(argv)
    names, changes = args.setting or list(SETTINGS), read_changes(CHANGES.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        old = run_tree(args.old.resolve(), names, Path(first))
        new = run_tree(args.new.resolve(), names, Path(second))
    width = max(map(len, names))
    print("  ".join([" " * width, *(f"{title:7}" for title in COLUMNS)]))
    details, used, unlisted = [], set(), 0
    for name in names:
        differences = find_differences(old[name], new[name])
        reasons = {field: find_reason(changes, name, field) for field in differences}
        for field, change in differences.items():
            listed = field != "error" and reasons[field] is not None
            unlisted += not listed
            used.add(reasons[field])
            details.append(f"{name}: {field}: {change} [{reasons[field] if listed else 'NOT LISTED'}]")
        cells = []
        for title, fields in COLUMNS.items():
            found = [field for field in differences if field.split(".")[0] in (*fields, "error")]
            state = "DIFFERS" if any(reasons[field] is None for field in found) else "listed"
            absent = title == "trace" and not found and not all(map(is_traced, (old[name], new[name])))
            absent = absent or (title == "resumed" and not SETTINGS[name].killed)
            cells.append(f"{state if found else '-' if absent else 'same':{max(7, len(title))}}")
        print("  ".join([f"{name:{width}}", *cells]))
    for line in details:
        print(line)
    for setting, field, reason in changes:
        if not args.setting and reason not in used:
            print(f"CHANGES.md lists a difference that was not found: {setting}: {field}: {reason}")
    print(f"{len(names)} settings, {len(details)} differences, {unlisted} of them not listed in CHANGES.md")
    return 1 if unlisted else 0


if __name__ == "__main__":
    sys.exit(main())
