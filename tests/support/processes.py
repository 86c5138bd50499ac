"""The four commands of a run as processes, started and killed as a user would."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

from glasu.config import RunConfig
from glasu.data.folders import write_party
from glasu.data.sources.catalog import load_parties
from support.commands import GLASU
from support.kits import simulate_with_secrets
from support.ports import choose_port
from support.small import SMALL
from support.warm_process import WarmProcess

SMALL_RUN = (
    SMALL
    + """\
aggregation_layers = [0, 1]
[train]
num_rounds = {rounds}
evaluate_every = 20
sampler = "neighbor"
"""
)


class Processes:
    """The four commands of a run, started and killed as if by hand."""

    def __init__(self, folder: Path, kits: Path, settings: str) -> None:
        self.folder, self.kits, self.port = folder, kits, 0
        (folder / "run.toml").write_text(settings)
        self.config = RunConfig.from_toml(folder / "run.toml")
        self.parties = load_parties(self.config)
        for party in self.parties:
            write_party(party, folder / "parties" / party.name)
        self.words = ["--quiet"]  # of all commands
        self.descriptors: int | None = None  # that the server may open; None: as many as this process
        self.running: dict[str, subprocess.Popen[str] | WarmProcess] = {}
        self.started: dict[str, int] = {}

    def start(self, name: str, *more: str, called: str = "") -> None:
        """Start the command of a role, optionally in another folder."""
        called = called or name
        kit, out = self.kits / name, self.folder / called
        words = (
            ["serve", self.folder / "run.toml", "--listen", f"127.0.0.1:{self.port or choose_port()}"]
            if name == "server"
            else ["join", self.folder / "parties" / name, "--server", f"localhost:{self.port}"]
        )
        self.started[called] = self.started.get(called, 0) + 1
        command = [*map(str, words), "--kit", str(kit), "--out", str(out), *self.words, *more]
        log = self.folder / f"{called}.log"
        log.touch()
        if name != "server":
            self.running[called] = WarmProcess(command, log)
            return
        # A shell sets the limit. With `preexec_fn`, the child would run gRPC's fork handlers, because other tests load
        # gRPC into this process. Then the child sometimes crashes before it executes the command.
        limit = [] if self.descriptors is None else ["sh", "-c", f'ulimit -n {self.descriptors} && exec "$@"', "sh"]
        with log.open("a") as file:
            self.running[called] = subprocess.Popen([*limit, *GLASU, *command], stdout=file, stderr=file, text=True)

    def listen(self, *more: str) -> None:
        """Start the server and wait until it says at which port it listens."""
        log = self.folder / "server.log"
        self.port, before = 0, log.read_text().count("listening on") if log.exists() else 0
        self.start("server", *more)
        self.wait(lambda: self.log("server").count("listening on") > before)
        self.port = int(self.log("server").split("listening on 127.0.0.1:")[-1].split(",")[0])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def rounds(self, name: str) -> int:
        """Return the last round of which a role has a checkpoint."""
        return max(self.saved_rounds(name), default=0)

    def wait(self, condition, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, {name: self.log(name)[-2000:] for name in self.running}
            for name, process in self.running.items():
                assert process.poll() in (None, 0), f"{name}: exit code {process.poll()}\n{self.log(name)}"
            time.sleep(0.02)

    def kill(self, name: str, after: float = 0.0, *, alone: bool = False) -> None:
        """Kill a role without warning, and start it again; at most one round is done again.

        Parties that train alone do so from their own checkpoints, of which the server does not know.
        """
        attempts = self.attempts()
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()
        time.sleep(after)
        reached, common = max(self.rounds(role) for role in self.started), self.common_round()
        self.start(name)
        self.wait(lambda: len(self.attempts()) > len(attempts))
        if alone:
            return
        race = re.search(r"race: (\d+) rounds", self.log("server"))
        if race is None:
            assert self.attempts()[-1] >= reached - 1
            return
        # Checkpoints are numbered through all candidates, with one number between two of them. The log counts the
        # rounds of one candidate. A role that still runs may save one more checkpoint.
        assert common >= reached - 2
        assert (self.attempts()[-1] - common) % (int(race[1]) + 1) <= 1

    def common_round(self) -> int:
        """Return the last round of which every role has a checkpoint."""
        return max(set.intersection(*(self.saved_rounds(role) for role in self.started)), default=0)

    def saved_rounds(self, name: str) -> set[int]:
        """Return the rounds of which a role has a checkpoint."""
        return {int(path.stem.removeprefix("round-")) for path in (self.folder / name).rglob("round-*.checkpoint")}

    def attempts(self) -> list[int]:
        """Return the rounds after which the run continued, in the order of its attempts."""
        found = re.findall(r"all parties are connected; (?:continuing after round (\d+)|starting)", self.log("server"))
        return [int(round_index or 0) for round_index in found]

    def finish(self) -> dict:
        """Wait for all roles, and return the server's report."""
        for name, process in self.running.items():
            assert process.wait(300) == 0, self.log(name)
        return json.loads((self.folder / "server" / "report.json").read_text())

    def run_with_kills(self, party: str) -> dict:
        """Train, kill a party and later the server, and return the server's report."""
        self.listen()
        for name in "abc":
            self.start(name)
        self.wait(lambda: self.rounds("server") >= 5)
        self.kill(party)
        self.wait(lambda: self.rounds("server") >= 12)
        self.kill("server")
        return self.finish()

    def stop(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def assert_same_report(report: dict, roles: Processes) -> None:
    simulated = simulate_with_secrets(roles.parties, roles.config).report
    assert report["weights_sha256"] == list(simulated.weights_sha256)
    assert report["losses"] == list(simulated.losses)
    assert report["test"] == json.loads(simulated.to_json())["test"]
    for name in "abc":
        own = json.loads((roles.folder / name / "report.json").read_text())
        assert own["weights_sha256"][0] == report["weights_sha256"]["abc".index(name)]
