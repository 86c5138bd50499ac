"""How much CPU time does this checkout take compared with another checkout?

    python benchmarks/compare_trees.py OLD_TREE [--turns N] [--cases PATTERN]...

The cases are those of round.py, speed.py and network.py. In each turn, both checkouts run each case once; the order of
the checkouts changes from turn to turn. The measured time is the user and system time of all processes of a run. If a
case is not a whole run, the script subtracts the time of a short run from the time of a long run. The difference is
the time of the rounds, without start and evaluation. Each case first runs once without being timed, to compile the
loops and convert the data.

The script uses both checkouts only through the public API and the command line, with the current Python. The table
shows the median over the turns of the ratio new / old, and its 95 % interval from order statistics. Ctrl-C ends the
measurement and prints the table of the turns so far. The exit code is 1 if the interval of a case lies above --limit.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from network import CORA, LARGE, LOOPBACK, SMALL, WHOLE, Line, Place
from paper import WINDOW, dense_twin, paper_settings
from tables import markdown, place, positive, show

if TYPE_CHECKING:
    from glasu import PartyData

TREE = Path(__file__).resolve().parents[1]
PROCESS_TURNS = 5  # after every 5 turns, new processes replace those that run the cases of class Rounds
NAME = "cora" if os.environ.get("GLASU_DATA_ROOT") else "demo"


@dataclass(frozen=True)
class Rounds:
    """Rounds of all parties in one process, without checkpoints."""

    train: dict[str, Any]  # the keys of [train] that differ from the paper's settings
    data: dict[str, Any]
    # Number of timed windows, each of WINDOW rounds. A large graph needs more, because the time before its rounds is
    # long and varies.
    windows: int = 2
    dense: bool = False  # whether to store sparse features as a dense array


@dataclass(frozen=True)
class Commands:
    """A run from the command line, either in one process or between a server and three parties."""

    settings: str
    long: int  # rounds of the long run
    short: int = 0  # rounds of the short run; 0: time the whole run
    line: Line | None = None  # link between the parties and the server; None: train in one process


JOINT = {"backward": "joint", "num_local_steps": 1, "optimizer": "sgd"}
STALE = {"num_local_steps": 4, "optimizer": "sgd"}
CASES: dict[str, Rounds | Commands] = {
    "round: Q = 1, lean": Rounds(JOINT, {"name": NAME}, windows=4),
    "round: Q = 1, same edges and rows": Rounds({**JOINT, "blocks": "induced"}, {"name": NAME}, dense=True),
    "round: Q = 4, lean": Rounds(STALE, {"name": NAME}),
    "round: Q = 4, same edges and rows": Rounds({**STALE, "blocks": "induced"}, {"name": NAME}, 1, dense=True),
    "speed: fanout 2": Rounds({"fanout": 2}, {"name": NAME}),
    "speed: fanout 3": Rounds({"fanout": 3}, {"name": NAME}),
    **{
        f"speed: {nodes} nodes, degree {degree}": Rounds(
            {}, {"name": "synthetic", "num_nodes": nodes, "average_degree": float(degree)}, max(1, nodes // 20000)
        )
        for nodes, degree in ((20000, 16), (80000, 16), (320000, 16), (20000, 64), (20000, 256), (20000, 1024))
    },
    "network: rounds, one process": Commands(CORA.replace("{name}", NAME), 120, 20),
    "network: rounds, four processes": Commands(CORA.replace("{name}", NAME), 120, 20, LOOPBACK),
    "network: rounds, four processes, 50 ms": Commands(CORA.replace("{name}", NAME), 70, 20, Line(0.05)),
    "network: small rounds, four processes": Commands(SMALL, 220, 20, LOOPBACK),
    "network: whole run, one process": Commands(WHOLE.replace("{name}", NAME), 20),
    "network: whole run, four processes": Commands(WHOLE.replace("{name}", NAME), 20, line=LOOPBACK),
    "network: 20000 nodes, full batch": Commands(LARGE.replace("{nodes}", "20000"), 2, line=LOOPBACK),
}


class Worker:
    """A process that times the cases of class Rounds. It uses the package of one checkout."""

    def __init__(self, environment: dict[str, str], cases: Sequence[str]) -> None:
        command = [sys.executable, __file__, "--worker", *cases]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()  # the worker is ready

    def measure(self, case: str) -> float:
        """Return the CPU seconds of a case."""
        assert self._process.stdin is not None
        print(case, file=self._process.stdin, flush=True)
        return float(self._read())

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a worker ended with code {self._process.wait()}.")
        return line


def work(cases: Sequence[str]) -> None:
    """Run the worker: load the data, run every case once, then read case names from standard input and time them."""
    loaded: dict[str, list[PartyData]] = {}

    def seconds(name: str, windows: int) -> float:
        case = CASES[name]
        assert isinstance(case, Rounds)
        key = json.dumps([case.data, case.dense])
        if key not in loaded:
            loaded[key] = _load(case)
        config = paper_settings(**{**case.train, "num_rounds": windows * WINDOW})
        start = time.process_time()
        train(loaded[key], config, workers=1)
        return time.process_time() - start

    from glasu import train  # the checkout's own package, which PYTHONPATH selects

    for name in cases:
        seconds(name, 2)  # the second window also runs the code that agrees on the node sets of a later window
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip()
        case = CASES[name]
        assert isinstance(case, Rounds)
        print(seconds(name, 1 + case.windows) - seconds(name, 1), flush=True)


def _load(case: Rounds) -> list[PartyData]:
    from glasu import DataConfig, RunConfig, load_parties

    parties = list(load_parties(RunConfig(data=DataConfig(**case.data))))
    return [dense_twin(party) for party in parties] if case.dense else parties


class Checkout:
    """One of the two checkouts. It times the cases with its own package."""

    def __init__(self, tree: Path, folder: Path, cases: Sequence[str]) -> None:
        self.tree = tree
        self.rounds = [name for name in cases if isinstance(CASES[name], Rounds)]
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(tree / "src"),
            "GLASU_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        self.places: dict[str, Place] = {}
        for name in cases:
            case = CASES[name]
            if isinstance(case, Commands):
                if case.settings not in self.places:
                    own = folder / str(len(self.places))
                    own.mkdir(parents=True)
                    self.places[case.settings] = Place(own, case.settings, self.environment)
                self._run(case, 1)  # this run compiles the loops

    @contextlib.contextmanager
    def start_measuring(self) -> Iterator[Callable[[str], float]]:
        """Start new processes and yield a function that times a case in them."""
        worker = Worker(self.environment, self.rounds) if self.rounds else None

        def measure(name: str) -> float:
            case = CASES[name]
            if isinstance(case, Commands):
                return self._run(case, case.long) - (self._run(case, case.short) if case.short else 0.0)
            assert worker is not None
            return worker.measure(name)

        try:
            yield measure
        finally:
            if worker is not None:
                worker.stop()

    def _run(self, case: Commands, rounds: int) -> float:
        place_ = self.places[case.settings]
        return (place_.alone(rounds) if case.line is None else place_.apart(rounds, case.line)).cpu


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return two order statistics whose interval contains the median with probability `level` or more.

    At level 0.95 this requires six values; with fewer, the result is the smallest and the largest value.
    """
    ordered, count = sorted(values), len(values)
    tail, rank = 0.0, 0  # `tail`: probability that fewer than `rank` + 1 values lie below the median
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 1 - level:
            break
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[count - rank]


def main() -> int:
    """Compare two checkouts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_TREE", help="old checkout")
    parser.add_argument("--new", type=Path, default=TREE, metavar="TREE", help="new checkout (default: this one)")
    parser.add_argument("--turns", type=positive, default=15)
    parser.add_argument("--cases", action="append", metavar="PATTERN", help="such as 'speed*'; may be repeated")
    parser.add_argument("--limit", type=float, default=1.05, help="greatest allowed ratio (%(default)s)")
    parser.add_argument("--out", type=place, help="also write the table to this Markdown file")
    args = parser.parse_args()
    patterns = args.cases or ["*"]
    cases = [name for name in CASES if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not cases:
        parser.error(f"--cases: no case matches; the cases are {', '.join(map(repr, CASES))}")
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        old, new = (
            Checkout(tree.resolve(), Path(folder) / side, cases)
            for side, tree in (("old", args.old), ("new", args.new))
        )
        for first in range(0, args.turns, PROCESS_TURNS):
            with old.start_measuring() as measure_old, new.start_measuring() as measure_new:
                for turn in range(first, min(first + PROCESS_TURNS, args.turns)):
                    for name in cases:
                        order = [measure_old, measure_new] if turn % 2 == 0 else [measure_new, measure_old]
                        spent = {measure: measure(name) for measure in order}
                        before, after = spent[measure_old], spent[measure_new]
                        ratios[name].append(after / before)
                        print(f"{turn + 1}: {name}: {before:.2f} s, {after:.2f} s", file=sys.stderr)
    rows, slower = [], 0
    for name, values in ratios.items():
        if not values:
            continue
        low, high = interval(values)
        slower += low > args.limit
        rows.append([name, f"{median(values):.3f}", f"{low:.3f} to {high:.3f}", f"{len(values)}"])
    show(markdown(["case", "median ratio new / old", "95 % interval", "turns"], rows), args.out)
    return 1 if slower else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    else:
        sys.exit(main())
