"""A server and its parties in threads of this process, over real gRPC with mutual TLS on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.errors import TransportError
from glasu.network import serve as serving
from glasu.network import server_session as hubs
from glasu.network.join import join
from glasu.pki.kit import open_kit
from glasu.report import RunReport


class Killed(BaseException):
    """Ends a role as a signal would: nobody is told."""


class SeenHub(hubs.Hub):
    """A hub that a test can look at, and end."""

    last: ClassVar[SeenHub]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        SeenHub.last = self


serving.Hub = SeenHub  # type: ignore[misc]


class Role(threading.Thread):
    """One role in a thread; `outcome` waits for it and returns its result, or raises what it raised."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._result, self._error = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def error(self, seconds: float = 120) -> BaseException | None:
        self.join(seconds)
        assert not self.is_alive(), f"{self.name} hangs"
        return self._error

    def outcome(self, seconds: float = 120) -> Any:
        error = self.error(seconds)
        if error is not None:
            raise error
        return self._result


@dataclass
class Cluster:
    """Starts the roles of one run; all write below `folder`, and remember what they were told."""

    config: RunConfig
    parties: Sequence[PartyData]
    kits: Path
    folder: Path
    port: int = 0
    lines: dict[str, list[str]] = field(default_factory=dict)

    def serve(self, **options: Any) -> Role:
        """Start the server, and return when it listens."""
        ready = threading.Event()

        def listened(port: int) -> None:
            self.port = port
            ready.set()

        kit = open_kit(self.kits / "server", "server")
        said = self.lines.setdefault("server", [])
        options = {"wait": 60.0, "tell": said.append, **options}
        config = options.pop("config", self.config)
        role = Role(
            lambda: serving.serve(
                config, kit, f"127.0.0.1:{self.port}", self.folder / "server", listened=listened, **options
            ),
            "server",
        )
        while not ready.wait(0.05) and role.is_alive():
            pass
        return role

    def join(self, name: str, **options: Any) -> Role:
        """Start a party."""
        party = options.pop("party", None) or next(party for party in self.parties if party.name == name)
        kit = open_kit(self.kits / options.pop("kit", name), "party")
        said = self.lines.setdefault(name, [])
        options = {"wait": 60.0, "tell": said.append, **options}
        out = self.folder / options.pop("out", name)
        return Role(lambda: join(party, kit, f"localhost:{self.port}", out, **options), name)

    def until(self, who: str, words: str) -> None:
        """Wait until a role has been told something."""
        deadline = time.monotonic() + 100
        while not any(words in line for line in self.lines.get(who, [])):
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.02)

    def end(self, *roles: Role) -> None:
        """Let the server end the run, for the test has seen enough."""
        SeenHub.last.fail(TransportError("enough"))
        for role in roles:
            assert "enough" in str(role.error())

    def run_id(self) -> str:
        """Return the identity of the run, as the server remembers it."""
        return str(json.loads((self.folder / "server" / "serving.json").read_text())["run"])

    def run(self) -> tuple[RunReport, dict[str, Any]]:
        """Run everything without a fault."""
        server = self.serve()
        roles = {party.name: self.join(party.name) for party in self.parties}
        reports = {name: role.outcome() for name, role in roles.items()}
        return server.outcome(), reports
