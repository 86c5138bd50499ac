"""A server and its parties in threads of this process, over real gRPC with mutual TLS on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.network.alignment_party import AlignmentParty
from glasu.network.alignment_server import AlignmentServer
from glasu.network.connection import ConnectOptions
from glasu.network.join import PartyPerformer, join
from glasu.network.options import JoinOptions, Listening, RoleEvent, ServeOptions, Serving
from glasu.network.prediction_party import PredictionParty, Query
from glasu.network.prediction_server import PredictionServer
from glasu.network.serve import ServerPerformer, serve
from glasu.network.training_party import TrainingParty
from glasu.network.training_server import TrainingServer
from glasu.pki.kit import open_kit
from glasu.report import RunReport
from support.log_lines import on_log
from support.ports import choose_port
from support.roles import Role

NOBODY = np.empty(0, np.int64)


@dataclass
class Cluster:
    """Starts the roles of one run; all write below `folder`, and their log lines are kept by role."""

    config: RunConfig
    parties: Sequence[PartyData]
    kits: Path
    folder: Path
    port: int = 0
    lines: dict[str, list[str]] = field(default_factory=dict)
    serving: list[Serving] = field(default_factory=list)  # of the servers that were started

    def serve(
        self,
        role: type[TrainingServer] = TrainingServer,
        performer: type[ServerPerformer] = ServerPerformer,
        **options: Any,
    ) -> Role:
        """Start the server of a training, and return when it listens."""
        return self._start_server(lambda ready: serve(role(self._serve_options(ready, options)), performer))

    def serve_prediction(self, role: type[PredictionServer] = PredictionServer, **options: Any) -> Role:
        """Start the server of a prediction, and return when it listens."""
        return self._start_server(lambda ready: serve(role(self._serve_options(ready, options))))

    def serve_alignment(self, max_ids: int = 1000, **options: Any) -> Role:
        """Start the server of an alignment, and return when it listens."""
        return self._start_server(lambda ready: serve(AlignmentServer(self._serve_options(ready, options), max_ids)))

    def align_with(
        self,
        name: str,
        folder: Path,
        secret: bytes | None = None,
        max_ids: int = 1000,
        performer: type[PartyPerformer] = PartyPerformer,
        role: Callable[..., AlignmentParty] = AlignmentParty,
    ) -> Role:
        """Start a party of an alignment with the tables in this folder."""
        kit, server = open_kit(self.kits / name, "party"), f"localhost:{self.port}"
        options = JoinOptions(kit=kit, server=server, out=folder, wait=60.0)
        return self._start_party(name, lambda: join(role(options, max_ids, secret), performer))

    def _serve_options(self, ready: Callable[[int], None], changes: dict[str, Any]) -> ServeOptions:
        observer = changes.get("observer")

        def observe(event: RoleEvent) -> None:
            if isinstance(event, Serving):
                self.serving.append(event)
            elif isinstance(event, Listening):
                ready(event.port)
            if observer is not None:
                observer(event)

        values = {
            "config": self.config,
            "kit": open_kit(self.kits / "server", "server"),
            "listen": f"127.0.0.1:{self.port or choose_port()}",
            "out": self.folder / "server",
            "wait": 60.0,
            **changes,
            "observer": observe,
        }
        return ServeOptions(**values)

    def _start_server(self, work: Callable[[Callable[[int], None]], Any]) -> Role:
        listens = threading.Event()

        def ready(port: int) -> None:
            self.port = port
            listens.set()

        def run() -> Any:
            with on_log(self.lines.setdefault("server", []).append, "glasu.server"):
                return work(ready)

        role = Role("server", run)
        while not listens.wait(0.02) and role.is_alive():
            pass
        return role

    def join(
        self,
        name: str,
        role: type[TrainingParty] = TrainingParty,
        performer: type[PartyPerformer] = PartyPerformer,
        connect: Any = None,
        **options: Any,
    ) -> Role:
        """Start a party of a training. Its outcome is the content of report.json."""

        def work() -> Any:
            used, party = self._join_options(name, options)
            made = role(used, party)
            connect_options = None
            if connect is not None:
                connect_options = ConnectOptions(used.kit, used.server, used.wait, used.log, connect=connect)
            join(made, performer, connect_options)
            return json.loads((used.out / "report.json").read_text())

        return self._start_party(name, work)

    def predict_with(
        self,
        name: str,
        nodes: Any = NOBODY,
        performer: type[PartyPerformer] = PartyPerformer,
        role: type[PredictionParty] = PredictionParty,
        **options: Any,
    ) -> Role:
        """Start a party of a prediction that requests these nodes."""
        query = Query(np.asarray(nodes, np.int64))
        return self._start_party(name, lambda: join(role(*self._join_options(name, options), query), performer))

    def _join_options(self, name: str, changes: dict[str, Any]) -> tuple[JoinOptions, PartyData]:
        """Return the options and the data of a party; `changes` may hold other data as `party`."""
        own = next(party for party in self.parties if party.name == name)
        values = {
            "server": f"localhost:{self.port}",
            "wait": 60.0,
            **changes,
            "kit": open_kit(self.kits / changes.get("kit", name), "party"),
            "out": self.folder / changes.get("out", name),
        }
        party = values.pop("party", own)
        return JoinOptions(**values), party

    def _start_party(self, name: str, work: Callable[[], Any]) -> Role:
        lines = self.lines.setdefault(name, [])

        def run() -> Any:
            with on_log(lines.append, f"glasu.party.{name}"):
                return work()

        return Role(name, run)

    def predict(self, **requested: Any) -> tuple[Any, dict[str, Any]]:
        """Predict without a fault; parties that are not named request nothing. Every call uses a free port."""
        self.port = 0
        server = self.serve_prediction()
        roles = {party.name: self.predict_with(party.name, requested.get(party.name, NOBODY)) for party in self.parties}
        found = {name: role.outcome() for name, role in roles.items()}
        return server.outcome(), found

    def until(self, who: str, words: str, seconds: float = 100.0) -> None:
        """Wait until a role has logged something."""
        deadline = time.monotonic() + seconds
        while not any(words in line for line in self.lines.get(who, [])):
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.02)

    def end(self, *roles: Role) -> None:
        """Let the server end the run."""
        self.serving[-1].stop("enough")
        for role in roles:
            assert "enough" in str(role.error())

    def run_id(self) -> str:
        """Return the id of the run in the server's folder."""
        return str(json.loads((self.folder / "server" / "serving.json").read_text())["run"])

    def run(self) -> tuple[RunReport, dict[str, Any]]:
        """Run everything without a fault."""
        server = self.serve()
        roles = {party.name: self.join(party.name) for party in self.parties}
        reports = {name: role.outcome() for name, role in roles.items()}
        return server.outcome(), reports


def list_weights(reports: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the digests of the parties' weights, from their own reports."""
    return tuple(reports[name]["weights_sha256"][0] for name in sorted(reports))
