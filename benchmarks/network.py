"""How much longer does a run take over mutual TLS and on slow links? How much memory does the server use?

The script starts one `glasu serve` and three `glasu join` processes on this machine, as users do, and makes kits (keys
and certificates) for them. A relay simulates a slow link: in each direction and for each party, it delays every byte by
half a round trip and limits the bandwidth. Seconds are wall time. The time of a round is the difference between the
times of a long and a short run, divided by the number of additional rounds, so it contains neither start nor
evaluation. The time of a whole run goes from the first command to the last exit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import markdown, place, show

GLASU = [sys.executable, "-m", "glasu.cli.main"]
SHORT, LONG = 20, 120  # rounds of the short and the long run
BUFFERED = 0.02  # seconds; with limited bandwidth, the relay buffers about as many bytes as it sends in this time
CORA = """
[data]
name = "{name}"
[model]
backbone = "gcnii"
num_layers = 4
aggregation_layers = [1, 3]
hidden = 192
[train]
backward = "local"
num_rounds = {rounds}
num_local_steps = 4
batch_size = 16
sampler = "neighbor"
fanout = 2
evaluate_every = 1000000
evaluate_nodes = 64
sampled_evaluation = true
"""
WHOLE = """
[data]
name = "{name}"
[model]
backbone = "gcnii"
num_layers = 4
aggregation_layers = [1, 3]
hidden = 192
[train]
backward = "local"
num_rounds = {rounds}
"""
SMALL = """
[data]
name = "synthetic"
num_nodes = 500
num_features = 16
num_classes = 3
[model]
backbone = "gcnii"
num_layers = 4
aggregation_layers = [1, 3]
hidden = 16
[train]
backward = "local"
num_rounds = {rounds}
num_local_steps = 1
batch_size = 16
sampler = "neighbor"
fanout = 2
evaluate_every = 1000000
"""
LARGE = """
[data]
name = "synthetic"
num_nodes = {nodes}
num_features = 16
num_classes = 3
[model]
backbone = "gcn"
hidden = 64
aggregation = "concat"
[train]
backward = "local"
num_rounds = {rounds}
num_local_steps = 1
batch_size = 0
sampler = "full"
evaluate_every = 2
"""


@dataclass(frozen=True)
class Line:
    """The link between a party and the server."""

    round_trip: float = 0.0  # seconds
    bandwidth: float = float("inf")  # bytes per second, each way

    def __str__(self) -> str:
        thin = f", {8e-6 * self.bandwidth:.0f} Mbit/s" if self.bandwidth < float("inf") else ""
        return f"{1e3 * self.round_trip:.0f} ms{thin}"


LOOPBACK = Line()


class Relay(threading.Thread):
    """Pass bytes between the parties and the server with the delay and bandwidth of the simulated link."""

    def __init__(self, target: int, line: Line) -> None:
        super().__init__(daemon=True)
        self.target, self.line, self.port, self.ready = target, line, 0, threading.Event()
        self.start()
        self.ready.wait()

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._relay_connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        await server.serve_forever()

    async def _relay_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(self._pass(reader, back), self._pass(onward, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read without delay, keep the bytes in transit, and write them when they are due."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        clock = asyncio.get_running_loop().time
        delay, bandwidth, free = self.line.round_trip / 2, self.line.bandwidth, clock()

        async def write() -> None:
            while True:
                due, data = await held.get()
                await asyncio.sleep(max(0.0, due - clock()))
                if not data:
                    writer.close()
                    return
                writer.write(data)

        task = asyncio.create_task(write())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                free = max(free, clock()) + len(data) / bandwidth  # when the link will have sent all data
                held.put_nowait((free + delay, data))
                if bandwidth < float("inf"):  # a real link buffers only a little, too
                    await asyncio.sleep(max(0.0, free - clock() - BUFFERED))
        held.put_nowait((max(free, clock()) + delay, b""))
        await task


@dataclass
class Run:
    """The result of a run: its report, the server's memory in KiB (samples, then the peak) and the wall time."""

    report: dict[str, Any]
    memory: list[int]
    peak: int
    whole: float  # seconds from the first command to the last exit
    cpu: float  # seconds of all processes, user and system

    @property
    def seconds(self) -> float:
        return float(self.report["seconds"]["total"])


class Place:
    """A folder with kits and the data of the parties; all commands run with `environment`."""

    def __init__(self, folder: Path, settings: str, environment: dict[str, str] | None = None) -> None:
        self.folder, self.settings, self.environment = folder, settings, environment
        said = self._glasu("split", self.run_file(1), "--out", folder / "parties").splitlines()  # one line per party
        folders = [line.split(":")[0] for line in said if line.startswith(str(folder / "parties"))]
        self.parties = [Path(name).name for name in folders]
        self._glasu("provision", "--parties", ",".join(self.parties), "--host", "localhost", "--out", folder / "kits")

    def run_file(self, rounds: int) -> Path:
        path = self.folder / f"{rounds}.toml"
        path.write_text(self.settings.format(rounds=rounds))
        return path

    def alone(self, rounds: int) -> Run:
        """Train in one process."""
        with tempfile.TemporaryDirectory() as out:
            path, start, spent = self.run_file(rounds), time.perf_counter(), cpu_of_children()
            self._glasu("train", path, "--out", out, "--quiet")
            report = json.loads((Path(out) / "report.json").read_text())
            return Run(report, [], 0, time.perf_counter() - start, cpu_of_children() - spent)

    def apart(self, rounds: int, line: Line = LOOPBACK) -> Run:
        """Train in four processes; the parties connect through a link."""
        start, spent, memory, peak = time.perf_counter(), cpu_of_children(), [], 0
        with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as stack:
            words = ["serve", self.run_file(rounds), "--listen", "127.0.0.1:0", *self._common("server", out)]
            log = stack.enter_context((Path(out) / "log").open("w+"))
            server = stack.enter_context(self._start_command(words, log))
            port = wait_for_port(Path(out) / "log", server)
            port = port if line == LOOPBACK else Relay(port, line).port
            parties = []
            for name in self.parties:
                words = ["join", self.folder / "parties" / name, "--server", f"localhost:{port}"]
                parties.append(stack.enter_context(self._start_command([*words, *self._common(name, out)], log)))
            for now, most in watch_memory(server):
                memory.append(now)
                peak = most
                if any(party.poll() for party in parties):
                    raise SystemExit((Path(out) / "log").read_text())
            if server.wait() or any(party.wait() for party in parties):
                raise SystemExit((Path(out) / "log").read_text())
            whole = time.perf_counter() - start
            report = json.loads((Path(out) / "server" / "report.json").read_text())
            return Run(report, memory, peak, whole, cpu_of_children() - spent)

    def _common(self, role: str, out: str) -> list[str | Path]:
        return ["--kit", self.folder / "kits" / role, "--out", Path(out) / role, "--quiet"]

    def _glasu(self, *words: object) -> str:
        """Run a command and return its output; if it fails, exit with its error message."""
        command = [*GLASU, *map(str, words)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout

    @contextlib.contextmanager
    def _start_command(self, words: list[str | Path], log: Any) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command; end its process when the block ends."""
        command = [*GLASU, *map(str, words)]
        with subprocess.Popen(command, env=self.environment, stdout=log, stderr=log) as process:
            try:
                yield process
                process.wait(600)
            finally:
                process.kill()

    def per_round(self, turns: int, line: Line | None = None) -> tuple[float, float, float]:
        """Return median seconds, exchanges and bytes of a round. If `line` is None, train in one process."""
        found = []
        for _ in range(turns):
            runs = [self.alone(n) if line is None else self.apart(n, line) for n in (SHORT, LONG)]
            found.append((runs[1].seconds - runs[0].seconds) / (LONG - SHORT))
        few, many = (run.report["traffic"] for run in runs)
        spent = [
            (many[key] - few[key]) / (LONG - SHORT) for key in ("exchanges", "bytes_to_server", "bytes_to_clients")
        ]
        return statistics.median(found), spent[0], spent[1] + spent[2]


def cpu_of_children() -> float:
    """Return the CPU seconds (user and system) of the processes that this process has started and waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def wait_for_port(log: Path, server: subprocess.Popen[bytes]) -> int:
    """Wait until the server listens, and return its port."""
    while "listening on 127.0.0.1:" not in log.read_text():
        if server.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.05)
    return int(log.read_text().split("listening on 127.0.0.1:")[1].split(",")[0])


def watch_memory(server: subprocess.Popen[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the server's resident memory and its peak in KiB, every half second until the server ends."""
    while server.poll() is None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):  # the process may end at this moment
            status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
            sizes = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Vm")}
            yield int(sizes["VmRSS"]), int(sizes["VmHWM"])
        time.sleep(0.5)


def lines(cora: Place, turns: int, name: str) -> str:
    """Return the table of links, with the time of a round and its lower bound."""
    alone, _, _ = cora.per_round(turns)
    near, exchanges, size = cora.per_round(turns, LOOPBACK)
    rows = [["one process", "-", f"{1e3 * alone:.0f}", "1.0", "-"]]
    four = "four processes, mutual TLS"
    rows.append([f"{four}, loopback", "0", f"{1e3 * near:.0f}", f"{near / alone:.1f}", "-"])
    for line in (Line(0.05), Line(0.1), Line(0.05, 100e6 / 8), Line(0.1, 100e6 / 8)):
        far, _, _ = cora.per_round(turns, line)
        least = exchanges * line.round_trip + size / len(cora.parties) / line.bandwidth + near
        rows.append([four, str(line), f"{1e3 * far:.0f}", f"{far / alone:.1f}", f"{far / least:.2f}"])
    header = ["run", "link", "ms / round", "x one process", "x least"]
    what = f"{exchanges:.1f} exchanges and {size / len(cora.parties) / 1e3:.0f} kB per party and round"
    meaning = "least: round trip x exchanges + bytes / bandwidth + a round on loopback"
    title = f"{name}, M = 3, K = 2, Q = 4, hidden 192, batch 16, {what}; median of {turns}; {meaning}"
    return f"{title}\n\n{markdown(header, rows)}"


def whole(cora: Place, turns: int, rounds: int, name: str) -> str:
    """Return the table of whole runs with default settings. The times include the start of the commands."""
    runs = [(cora.alone(rounds), cora.apart(rounds)) for _ in range(turns)]
    seconds = [statistics.median(run.whole for run in own) for own in zip(*runs, strict=True)]
    digests = {tuple(run.report["weights_sha256"]) for pair in runs for run in pair}
    if len(digests) != 1:
        raise SystemExit("the runs ended with different weights.")
    rows = [
        [what, f"{own:.1f}", f"{own / seconds[0]:.2f}"]
        for what, own in zip(("`glasu train`", "`glasu serve`, 3 x `glasu join`"), seconds, strict=True)
    ]
    title = f"{name}, K = 2, Q = 4, hidden 192, {rounds} rounds, default settings; "
    title += f"both commands end with the same weights; median of {turns}"
    return f"{title}\n\n{markdown(['command', 's, from start to last exit', 'x one process'], rows)}"


def memory(folder: Path, rounds: int, nodes: int) -> str:
    """Return the table of the server's memory: one row for many small rounds, one for a large graph."""
    rows = []
    for what, settings, count in (
        ("500 nodes, hidden 16, batch 16", SMALL, rounds),
        (f"{nodes:,} nodes, hidden 64, concat, full batch", LARGE.replace("{nodes}", str(nodes)), 2),
    ):
        place_ = folder / what
        place_.mkdir()
        run = Place(place_, settings).apart(count)
        early, late = run.memory[len(run.memory) // 4], run.memory[-1]
        rows.append([what, f"{count}", *(f"{size / 1024:.0f}" for size in (early, late, run.peak))])
    return markdown(["run", "rounds", "MiB after a quarter", "MiB at the end", "peak"], rows)


PARTS = ("lines", "whole", "memory")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn, few rounds, a tenth of the nodes")
    parser.add_argument("--part", choices=PARTS, action="append", help="print only this table; may be repeated")
    parser.add_argument("--out", type=place, help="also write the tables to this Markdown file")
    args = parser.parse_args()
    turns, many, few, nodes = (1, 200, 20, 20_000) if args.quick else (3, 2000, 100, 200_000)
    name = "cora" if os.environ.get("GLASU_DATA_ROOT") else "demo"
    texts = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for part in args.part or PARTS:
            (folder / part).mkdir()
        if "lines" in (args.part or PARTS):
            texts.append(lines(Place(folder / "lines", CORA.replace("{name}", name)), turns, name))
        if "whole" in (args.part or PARTS):
            texts.append(whole(Place(folder / "whole", WHOLE.replace("{name}", name)), turns, few, name))
        if "memory" in (args.part or PARTS):
            table = memory(folder / "memory", many, nodes)
            texts.append(f"The server's resident memory\n\n{table}")
    show("\n\n".join(texts), args.out)


if __name__ == "__main__":
    main()
