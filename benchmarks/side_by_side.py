"""How much CPU time does a round between processes take in this checkout and in another one, under the same load?

    python benchmarks/side_by_side.py OLD_TREE [--cases "small;cora"]

A server and three parties of each checkout train at the same time on this machine, so other load slows down both
checkouts alike. Alternating runs (compare_trees.py) are less exact: on a busy machine their times vary by a factor of
two. A turn is a window of some seconds. Its result for a checkout is the CPU time that its processes use in the window,
divided by the rounds that they finish in the window. After every fifth turn, new processes start. The table shows the
median over the turns of the ratio new / old, and its 95 % interval from order statistics.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from compare_trees import PROCESS_TURNS, TREE, interval
from network import CORA, GLASU, LOOPBACK, SMALL, Line, Place, Relay, wait_for_port
from tables import markdown, place, positive, show

ROUNDS = 1_000_000  # more rounds than any run reaches
FIRST_ROUND = 40  # the first window begins at this round; the rounds before it compile loops and fill caches
NAME = "cora" if os.environ.get("GLASU_DATA_ROOT") else "demo"
CASES: dict[str, tuple[str, Line]] = {
    "small": (SMALL, LOOPBACK),
    "cora": (CORA.replace("{name}", NAME), LOOPBACK),
    "cora, 50 ms": (CORA.replace("{name}", NAME), Line(0.05)),
}


class Cluster:
    """A server and its parties, of one checkout."""

    def __init__(self, tree: Path, folder: Path, settings: str, line: Line) -> None:
        folder.mkdir()
        environment = {"PYTHONPATH": str(tree / "src"), "GLASU_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **environment}
        self.place, self.line = Place(folder, settings, self.environment), line
        self.processes: list[subprocess.Popen[bytes]] = []
        self.out = folder

    def start(self, out: Path) -> None:
        """Start all processes; they write to `out`."""
        out.mkdir()
        self.out, log = out, out / "log"
        run_file = self.place.run_file(ROUNDS)
        with log.open("w") as file:
            self._start(["serve", run_file, "--listen", "127.0.0.1:0"], "server", file)
            port = wait_for_port(log, self.processes[0])
            port = port if self.line == LOOPBACK else Relay(port, self.line).port
            for name in self.place.parties:
                folder = self.place.folder / "parties" / name
                self._start(["join", folder, "--server", f"localhost:{port}"], name, file)

    def _start(self, words: Sequence[object], role: str, log: object) -> None:
        common = ["--kit", self.place.folder / "kits" / role, "--out", self.out / role, "--quiet"]
        command = [*GLASU, *map(str, [*words, *common])]
        self.processes.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))  # type: ignore[call-overload]

    def read_round(self) -> int:
        """Return the round of the server's last checkpoint."""
        for process in self.processes:
            if process.poll() is not None:
                raise SystemExit((self.out / "log").read_text())
        found = sorted((self.out / "server" / "checkpoints").glob("round-*.checkpoint"))
        return int(found[-1].stem.removeprefix("round-")) if found else 0

    def read_seconds(self) -> float:
        """Return the CPU seconds of all processes so far."""
        ticks = 0
        for process in self.processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # user and system time
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End all processes. The server ends last, because a party without a server would try to connect again."""
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        self.processes.clear()


@contextlib.contextmanager
def run_clusters(clusters: Sequence[Cluster], folder: Path) -> Iterator[None]:
    """Start the clusters and wait until all of them train."""
    try:
        for index, cluster in enumerate(clusters):
            cluster.start(folder / str(index))
        while min(cluster.read_round() for cluster in clusters) < FIRST_ROUND:
            time.sleep(0.2)
        yield
    finally:
        for cluster in clusters:
            cluster.stop()


def measure(clusters: Sequence[Cluster], seconds: float) -> list[float]:
    """Return the CPU seconds per round of each cluster in one window."""
    before = [(cluster.read_round(), cluster.read_seconds()) for cluster in clusters]
    time.sleep(seconds)
    after = [(cluster.read_round(), cluster.read_seconds()) for cluster in clusters]
    return [(last[1] - first[1]) / (last[0] - first[0]) for first, last in zip(before, after, strict=True)]


def main() -> None:
    """Compare two checkouts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_TREE", help="old checkout")
    parser.add_argument("--new", type=Path, default=TREE, metavar="TREE", help="new checkout (default: this one)")
    parser.add_argument("--turns", type=positive, default=15)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a turn (%(default)s)")
    parser.add_argument("--cases", type=lambda text: text.split(";"), default=list(CASES), metavar="A;B")
    parser.add_argument("--out", type=place, help="also write the table to this Markdown file")
    args = parser.parse_args()
    rows = []
    for case in args.cases:
        times: list[list[float]] = []
        with tempfile.TemporaryDirectory() as folder:
            clusters = [
                Cluster(tree.resolve(), Path(folder) / side, *CASES[case])
                for side, tree in (("old", args.old), ("new", args.new))
            ]
            for first in range(0, args.turns, PROCESS_TURNS):
                own = Path(folder) / f"turn {first}"
                own.mkdir()
                with run_clusters(clusters, own):
                    for _ in range(first, min(first + PROCESS_TURNS, args.turns)):
                        times.append(measure(clusters, args.seconds))
                        print(f"{case}: {', '.join(f'{1e3 * each:.1f} ms' for each in times[-1])}", flush=True)
        ratios = [new / old for old, new in times]
        low, high = interval(ratios)
        old, new = (f"{1e3 * median(column):.1f}" for column in zip(*times, strict=True))
        rows.append([case, old, new, f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}", f"{len(ratios)}"])
    show(markdown(["case", "old, ms", "new, ms", "median ratio new / old", "95 % interval", "turns"], rows), args.out)


if __name__ == "__main__":
    main()
