"""Run settings through the command line and return their outcome as plain values; imports nothing from glasu.

As a script, `python runs.py TREE OUT.json NAME...` runs settings with the package of a checkout.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib
import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from settings import BASE, SETTINGS, Setting

Main = Callable[[Sequence[str]], int]
Start = Callable[[Path, Sequence[str]], tuple[int, str]]  # checkout, arguments -> exit code, standard error
TREE = Path(__file__).resolve().parents[2]
LOGGER = "glasu.wire"
TRAFFIC = ("round", "bytes", "exchanges")  # keys of an entry of the report's history that do not depend on the CPU
LAST_RENAME = 5  # a killed run ends before this rename in its output folder: after some checkpoints, not after all
CLASSES = ("sun", "rain", "wind")
NEWER = ("data.features",)  # keys that older checkouts refuse; these run without them


def find_main(tree: Path = TREE) -> Main:
    """Return the function behind the `glasu` command of a checkout; its package must be on the path."""
    scripts = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, name = scripts["glasu"].partition(":")
    main: Main = getattr(importlib.import_module(module), name)
    return main


def run(name: str, folder: Path, tree: Path = TREE, start: Start | None = None) -> dict[str, Any]:
    """Train and predict with one setting, in this process.

    Args:
        name: of the setting.
        folder: for the files of the run; empty.
        tree: the checkout whose package is on the path.
        start: runs this script in another process, for a run that is killed; None: in a new interpreter.

    Returns:
        "recorded": fields that do not depend on the CPU. "local": fields that can differ from one CPU to another.
    """
    main, setting = find_main(tree), SETTINGS[name]
    keys = {**BASE, **setting.keys}
    if tree != TREE:
        keys = {key: value for key, value in keys.items() if key not in NEWER or _accepts(main, key, value)}
    overrides = _write_data(main, setting, keys, folder)
    outcome = _train_and_predict(main, setting, folder / "out", overrides)
    if setting.killed:
        out = folder / "killed"
        _train_until_killed(start or start_interpreter, tree, out, _train_command(out, overrides))
        resumed = _train_and_predict(main, setting, out, overrides)
        outcome["recorded"]["resumed"] = {
            "differs_from_unbroken_run": list(differing_fields(outcome["local"], resumed["local"])),
            "repeats_all_rounds": _num_lines(resumed) >= _num_lines(outcome) > 0,
        }
    return outcome


def _accepts(main: Main, key: str, value: Any) -> bool:
    """Return whether a checkout accepts a key; `glasu split` is the fastest command that reads a run file."""
    with tempfile.TemporaryDirectory() as folder:
        data = {name: BASE[name] for name in ("data.name", "data.num_nodes", "data.num_features")}
        file, out = Path(folder, "run.toml"), Path(folder, "parties")
        file.write_text("", encoding="utf-8")
        try:
            _trace(main, ["split", str(file), *_overrides({**data, key: value}), "--out", str(out)])
        except RuntimeError:
            return False
    return True


def _train_command(out: Path, overrides: Sequence[str]) -> list[str]:
    return ["train", str(out.parent / "run.toml"), *overrides, "--quiet", "--out", str(out)]


def _train_and_predict(main: Main, setting: Setting, out: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train, predict for all nodes, and return the fields of the report and of the trace."""
    trained = _trace(main, _train_command(out, overrides))
    party = () if setting.party is None else ("--party", setting.party)
    table = out.parent / f"{out.name}.csv"
    predicted = _trace(main, ["predict", str(out), *party, "--out", str(table)])
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return {
        "recorded": {
            # Older checkouts do not count headers apart. The trace has the bytes of every message.
            "traffic": {key: value for key, value in report["traffic"].items() if key != "headers_to_server"},
            "traffic_by_round": [[entry[key] for key in TRAFFIC] for entry in report["history"]],
            "releases": {
                ledger["party"]: [
                    " ".join(f"{key}={value}" for key, value in row.items()) for row in ledger["releases"]
                ]
                for ledger in report["privacy"]["ledger"]
            },
            "trace": {"train": trained, "predict": predicted},
        },
        "local": {
            **{key: report[key] for key in ("weights_sha256", "losses", "validation", "test", "overridden")},
            "evaluations": [
                {key: value for key, value in entry.items() if key not in (*TRAFFIC[1:], "seconds")}
                for entry in report["history"]
            ],
            "predictions_sha256": hashlib.sha256(table.read_bytes()).hexdigest(),
        },
    }


def _num_lines(outcome: dict[str, Any]) -> int:
    return len(outcome["recorded"]["trace"]["train"])


def _trace(main: Main, command: Sequence[str]) -> list[str]:
    """Run a command and return its messages and exchanges, in order, as the logger `glasu.wire` lists them."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(LOGGER)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = main(list(command))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    if code:
        raise RuntimeError(f"glasu {' '.join(command)}: exit code {code}. {printed.getvalue()}")
    return fold_clients(lines)


def fold_clients(lines: Sequence[str]) -> list[str]:
    """Join neighbouring lines that differ only in client and bytes, for shorter records; nothing is lost.

    `... client=0 bytes=9`, `... client=1 bytes=8` become `... client=0,1 bytes=9,8`.
    """
    folded: list[tuple[str, list[str], list[str]]] = []
    for line in lines:
        about, found, rest = line.partition(" client=")
        client, _, size = rest.partition(" bytes=")
        if folded and found and folded[-1][0] == about:
            folded[-1][1].append(client)
            folded[-1][2].append(size)
        else:
            folded.append((about, [client], [size]) if found else (line, [], []))
    return [
        f"{about} client={','.join(clients)} bytes={','.join(sizes)}" if clients else about
        for about, clients, sizes in folded
    ]


def differing_fields(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Return a description for every field that differs, by its dotted name; lists are compared as a whole."""
    before, after = flatten(old), flatten(new)
    names = [*before, *(name for name in after if name not in before)]
    return {
        name: _describe(before.get(name, "absent"), after.get(name, "absent"))
        for name in names
        if before.get(name, "absent") != after.get(name, "absent")
    }


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def _describe(old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list):
        at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        first, second = (repr(items[at]) if at < len(items) else "the end" for items in (old, new))
        return f"entry {at} of {len(old)} -> {len(new)}: {first} -> {second}"
    return f"{old!r} -> {new!r}"


def _train_until_killed(start: Start, tree: Path, out: Path, command: Sequence[str]) -> None:
    """Train in a separate process and kill it with SIGKILL while it saves a checkpoint."""
    code, errors = start(tree, [str(tree), "--kill", str(out), *command])
    if code != -signal.SIGKILL:
        raise RuntimeError(
            f"the run in {out} was not killed: it ended with code {code} before it renamed {LAST_RENAME} files in its "
            f"folder. {errors}"
        )


def start_interpreter(tree: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Run this script in a new interpreter; return its exit code and its standard error."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    finished = subprocess.run(command, env=environment(tree), capture_output=True, text=True)
    return finished.returncode, finished.stderr


def _kill_at_rename(out: Path) -> None:
    """Kill this process when it is about to rename a file in `out` for the LAST_RENAME-th time."""
    count = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event == "os.rename" and Path(os.fsdecode(arguments[1])).is_relative_to(out):
            count += 1
            if count == LAST_RENAME:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def environment(tree: Path) -> dict[str, str]:
    """Return an environment in which Python imports the package of this checkout."""
    return {**os.environ, "PYTHONPATH": str(tree / "src")}


def _write_data(main: Main, setting: Setting, keys: dict[str, Any], folder: Path) -> list[str]:
    """Write the run file, and party folders if the setting has some; return the arguments `--set key=value`."""
    (folder / "run.toml").write_text("", encoding="utf-8")
    if setting.data != "built-in":
        parties = folder / "parties"
        if setting.data == "split":
            _trace(main, ["split", str(folder / "run.toml"), *_overrides(keys), "--out", str(parties)])
            names = sorted(path.name for path in parties.iterdir())
        else:
            names = _write_parties(parties, weighted=setting.data == "weighted")
        kept = [key for key in keys if not key.startswith("data.") or key == "data.features"]
        keys = {key: keys[key] for key in kept}
        keys["data.parties"] = [f"parties/{name}" for name in names]
    return _overrides(keys)


def _overrides(keys: dict[str, Any]) -> list[str]:
    return [item for key, value in keys.items() for item in ("--set", f"{key}={json.dumps(value)}")]


def _write_parties(folder: Path, weighted: bool) -> list[str]:
    """Write three small party folders by hand: one class per node and edge weights, or several labels per node."""
    draw = random.Random(5)  # its `random` gives the same values on every machine and Python version
    nodes = range(70)
    labels = [[int(draw.random() < 0.4) for _ in CLASSES] for _ in nodes]
    splits = [("train", "validation", "test")[int(draw.random() * 3)] for _ in nodes]
    for name in ("east", "west", "north"):
        (folder / name).mkdir(parents=True)
        label = "label" if weighted else [f"is_{each}" for each in CLASSES]
        manifest = {"label": label, "split": "split", "classes": CLASSES, **({"weight": "weight"} if weighted else {})}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in manifest.items())
        (folder / name / "party.toml").write_text(text, encoding="utf-8")
        rows = []
        for node in nodes:
            features = [round(sum(labels[node]) + draw.random(), 3) for _ in range(4)]
            own = [CLASSES[labels[node].index(max(labels[node]))]] if weighted else labels[node]
            rows.append([f"n{node:02}", *features, *own, splits[node]])
        columns = ["label"] if weighted else [f"is_{each}" for each in CLASSES]
        _write_csv(folder / name / "nodes.csv", ["id", "x0", "x1", "x2", "x3", *columns, "split"], rows)
        edges = sorted({(int(draw.random() * 70), int(draw.random() * 70)) for _ in range(200)})
        ends = [[f"n{source:02}", f"n{target:02}"] for source, target in edges if source != target]
        if weighted:
            ends = [[*pair, str(round(0.5 + draw.random(), 2))] for pair in ends]
        _write_csv(folder / name / "edges.csv", ["source", "target", "weight"][: len(ends[0])], ends)
    return ["east", "west", "north"]


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def main(arguments: Sequence[str]) -> int:
    """Run settings and write their outcomes, or train until killed."""
    tree = Path(arguments[0])
    package = Path(importlib.import_module("glasu").__file__ or "").resolve()
    if not package.is_relative_to(tree):
        raise RuntimeError(f"{package} is not below {tree}; set PYTHONPATH={tree / 'src'}.")
    if arguments[1] == "--kill":
        _kill_at_rename(Path(arguments[2]))
        return find_main(tree)(arguments[3:])
    outcomes: dict[str, Any] = {}
    for name in arguments[2:]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcomes[name] = run(name, Path(folder).resolve(), tree)
            except Exception as error:  # run the remaining settings as well
                outcomes[name] = {"error": f"{type(error).__name__}: {error}"}
    Path(arguments[1]).write_text(json.dumps(outcomes), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
