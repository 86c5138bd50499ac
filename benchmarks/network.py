"""How much longer does a run take over mutual TLS, and on long lines? How much memory has the server?

Starts `glasu serve` and three `glasu join` on this machine, as users do, with kits made for it. A long line is a relay
that holds every byte back for half a round trip, each way. Seconds are wall time, as the reports have them: of a round,
the difference between a long and a short run, so that start and evaluation drop out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
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
PARTIES = "abc"
SHORT, LONG = 20, 120  # rounds
CORA = """
[data]
name = "{name}"
[model]
hidden = 192
[train]
num_rounds = {rounds}
num_local_steps = 4
batch_size = 16
sampler = "neighbor"
fanout = 2
evaluate_every = 1000000
evaluate_nodes = 64
sampled_evaluation = true
"""
SMALL = """
[data]
name = "synthetic"
num_nodes = 500
num_features = 16
num_classes = 3
[model]
hidden = 16
[train]
num_rounds = {rounds}
num_local_steps = 1
batch_size = 16
sampler = "neighbor"
fanout = 2
evaluate_every = 1000000
"""


class Relay(threading.Thread):
    """Passes bytes on between the parties and the server, each way half a round trip late."""

    def __init__(self, target: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self.target, self.delay, self.port, self.ready = target, seconds / 2, 0, threading.Event()
        self.start()
        self.ready.wait()

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(self._pass(reader, back), self._pass(onward, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read at once, write when it is time: a long line holds many bytes."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        clock = asyncio.get_running_loop().time

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
                held.put_nowait((clock() + self.delay, data))
        held.put_nowait((clock() + self.delay, b""))
        await task


@dataclass
class Run:
    """What a run left behind: its report, and the server's memory in KiB, now and then."""

    report: dict[str, Any]
    memory: list[int]

    @property
    def seconds(self) -> float:
        return float(self.report["seconds"]["total"])


class Place:
    """A folder with kits, and the parties' data."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.folder, self.settings = folder, settings
        glasu("split", self.run_file(1), "--out", folder / "parties")
        glasu("provision", "--parties", ",".join(PARTIES), "--host", "localhost", "--out", folder / "kits")

    def run_file(self, rounds: int) -> Path:
        path = self.folder / f"{rounds}.toml"
        path.write_text(self.settings.format(rounds=rounds))
        return path

    def alone(self, rounds: int) -> Run:
        """Train in one process."""
        with tempfile.TemporaryDirectory() as out:
            glasu("train", self.run_file(rounds), "--out", out, "--quiet")
            return Run(json.loads((Path(out) / "report.json").read_text()), [])

    def apart(self, rounds: int, round_trip: float = 0.0) -> Run:
        """Train between four processes, the parties at the far end of a line."""
        with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as stack:
            words = ["serve", self.run_file(rounds), "--listen", "127.0.0.1:0", *self._common("server", out)]
            log = stack.enter_context((Path(out) / "log").open("w+"))
            server = stack.enter_context(started(words, log))
            port = listening(Path(out) / "log", server)
            port = Relay(port, round_trip).port if round_trip else port
            for name in PARTIES:
                words = ["join", self.folder / "parties" / name, "--server", f"localhost:{port}"]
                stack.enter_context(started([*words, *self._common(name, out)], log))
            memory = list(watched(server))
            if server.wait():
                raise SystemExit((Path(out) / "log").read_text())
            return Run(json.loads((Path(out) / "server" / "report.json").read_text()), memory)

    def _common(self, role: str, out: str) -> list[str | Path]:
        return ["--kit", self.folder / "kits" / role, "--out", Path(out) / role, "--quiet"]

    def per_round(self, turns: int, round_trip: float | None = None) -> float:
        """Return the median seconds of a round, in one process (None) or between four."""
        found = []
        for _ in range(turns):
            runs = [self.alone(n) if round_trip is None else self.apart(n, round_trip) for n in (SHORT, LONG)]
            found.append((runs[1].seconds - runs[0].seconds) / (LONG - SHORT))
        return statistics.median(found)


def glasu(*words: object) -> None:
    """Give a command, and stop with what it said where it fails."""
    done = subprocess.run([*GLASU, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)


@contextlib.contextmanager
def started(words: list[str | Path], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command and see that it is gone in the end."""
    with subprocess.Popen([*GLASU, *map(str, words)], stdout=log, stderr=log) as process:
        try:
            yield process
            process.wait(120)
        finally:
            process.kill()


def listening(log: Path, server: subprocess.Popen[bytes]) -> int:
    """Wait until the server says at which port it listens."""
    while "listening on 127.0.0.1:" not in log.read_text():
        if server.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.05)
    return int(log.read_text().split("listening on 127.0.0.1:")[1].split(",")[0])


def watched(server: subprocess.Popen[bytes]) -> Iterator[int]:
    """Yield the resident memory of the server, in KiB, every half second until it ends."""
    while server.poll() is None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, StopIteration):
            status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
            yield int(next(line for line in status if line.startswith("VmRSS")).split()[1])
        time.sleep(0.5)


def lines(cora: Place, turns: int, name: str) -> str:
    """Return the table of round trips."""
    alone = cora.per_round(turns)
    near = cora.per_round(turns, 0.0)
    rows = [["one process", "-", f"{1e3 * alone:.0f}", "1.0", "-"]]
    rows.append(["four, mutual TLS, loopback", "0", f"{1e3 * near:.0f}", f"{near / alone:.1f}", "-"])
    for round_trip in (0.05, 0.1):
        far = cora.per_round(turns, round_trip)
        least = 2 * round_trip + near  # K = 2 exchanges
        figures = [f"{1e3 * round_trip:.0f}", f"{1e3 * far:.0f}", f"{far / alone:.1f}", f"{far / least:.2f}"]
        rows.append(["the same, long lines", *figures])
    header = ["run", "round trip, ms", "ms / round", "x one process", "x (2 round trips + loopback)"]
    return f"{name}, M = 3, K = 2, Q = 4, hidden 192, batch 16; median of {turns}\n\n{markdown(header, rows)}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn, and 200 rounds instead of 2,000")
    parser.add_argument("--out", type=place, help="also write the tables to this Markdown file")
    args = parser.parse_args()
    turns, rounds, name = (1, 200, "demo") if args.quick else (3, 2000, "demo")
    name = "cora" if os.environ.get("GLASU_DATA_ROOT") else name
    with tempfile.TemporaryDirectory() as folder:
        for part in ("cora", "small"):
            (Path(folder) / part).mkdir()
        text = lines(Place(Path(folder) / "cora", CORA.replace("{name}", name)), turns, name)
        memory = Place(Path(folder) / "small", SMALL).apart(rounds).memory
    early, late = memory[len(memory) // 4], memory[-1]
    rows = [[f"{rounds}", f"{early / 1024:.0f}", f"{late / 1024:.0f}", f"{max(memory) / 1024:.0f}"]]
    header = ["rounds", "MiB after a quarter", "MiB at the end", "most"]
    show(f"{text}\n\nThe server's resident memory, 500 nodes, hidden 16\n\n{markdown(header, rows)}", args.out)


if __name__ == "__main__":
    main()
