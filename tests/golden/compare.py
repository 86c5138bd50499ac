"""Run the same settings in two checkouts on this machine and compare them bit by bit.

    python tests/golden/compare.py OLD_TREE [--setting NAME]...

Compares weights, predictions, losses, evaluations and traffic. The exit code is 1 if a field differs that CHANGES.md
does not list, or if traffic changes by another amount than listed there. Both checkouts run with this Python; no
internal name of either is used.
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

from runs import TRAFFIC, TREE, differing_fields, environment, flatten
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
Amounts = tuple[list[str], dict[str, int]]  # patterns for settings; field -> new value minus old value


def read_changes(text: str) -> list[Change]:
    """Return the lines `- setting: field: reason`; setting and field may hold * as a wildcard."""
    found = re.findall(r"^- ([^:\s]+): ([^:\s]+): (\S.*)$", text, re.MULTILINE)
    return [(setting, field, reason) for setting, field, reason in found]


def read_amounts(text: str) -> list[Amounts]:
    """Return the rows of the table of amounts: settings, a remark, and one column per field of `traffic`."""
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    fields = [f"traffic.{cell}" for cell in table[0][2:]] if table else []
    rows = [(names, zip(fields, cells, strict=True)) for names, _, *cells in table[1:]]
    return [(re.findall(r"`(.+?)`", names), {key: int(cell) for key, cell in row if cell}) for names, row in rows]


def find_amounts(table: Sequence[Amounts], setting: str) -> dict[str, int]:
    """Return the amounts of the first row that fits a setting."""
    fits = (amounts for names, amounts in table if any(fnmatchcase(setting, name) for name in names))
    return next(fits, {})


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


def find_differences(old: dict[str, Any], new: dict[str, Any], amounts: dict[str, int]) -> dict[str, str]:
    """Return all differing fields of one setting; a failed run differs from everything.

    Args:
        old: outcome of the old checkout.
        new: outcome of the new one.
        amounts: listed changes of traffic. They are added to the old values of fields that differ.
    """
    errors = [f"{side}: {outcome['error']}" for side, outcome in (("old", old), ("new", new)) if "error" in outcome]
    if errors:
        return {"error": "; ".join(errors)}
    before, after = ({**divide_lists(outcome["recorded"]), **outcome["local"]} for outcome in (old, new))
    if not is_traced(old) or not is_traced(new):
        del before["trace"], after["trace"]
    expected, found = flatten(before), differing_fields(before, after)
    expected |= {field: expected.get(field, 0) + amount for field, amount in amounts.items() if field in found}
    return differing_fields(expected, after)


def divide_lists(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return recorded fields with one list per column of `traffic_by_round`, and per phase and kind of release."""
    rounds = {key: [entry[at] for entry in recorded["traffic_by_round"]] for at, key in enumerate(TRAFFIC)}
    releases: dict[str, dict[str, list[str]]] = {}
    for party, rows in recorded["releases"].items():
        lists = releases.setdefault(party, {})
        for row in rows:
            about, _, rest = row.partition(" layer=")
            phase, _, kind = about.removeprefix("phase=").partition(" kind=")
            lists.setdefault(f"{phase}.{kind.replace(' ', '_')}", []).append(f"layer={rest}")
    return {**recorded, "traffic_by_round": rounds, "releases": releases}


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
    names, text = args.setting or list(SETTINGS), CHANGES.read_text(encoding="utf-8")
    changes, table = read_changes(text), read_amounts(text)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        old = run_tree(args.old.resolve(), names, Path(first))
        new = run_tree(args.new.resolve(), names, Path(second))
    width = max(map(len, names))
    print("  ".join([" " * width, *(f"{title:7}" for title in COLUMNS)]))
    details, used, unlisted = [], set(), 0
    for name in names:
        differences = find_differences(old[name], new[name], find_amounts(table, name))
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
