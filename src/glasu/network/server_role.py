"""The purposes of a server share one driver: what a purpose provides, and how its script's requests are performed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from glasu.network.admission import Admission
from glasu.network.handshake import Finished
from glasu.network.server_session import ServerSession
from glasu.protocol.limits import Limits
from glasu.protocol.requests import Broadcast, Event, Receive, Save, Scatter, Script
from glasu.runtime.telemetry import Telemetry
from glasu.wire.message_key import Key

Report = TypeVar("Report", covariant=True)


@dataclass(frozen=True, eq=False)
class Plan:
    """One attempt: the round after which it starts, and the server's script."""

    attempt: int
    round: int
    digests: tuple[str, ...]  # of the parties' checkpoints of that round, in client order
    limits: Limits
    script: Script[Any]


class ServerRole(Protocol[Report]):
    """What a server does besides talking: training, prediction."""

    @property
    def admission(self) -> Admission: ...

    @property
    def telemetry(self) -> Telemetry: ...

    @property
    def run(self) -> str:
        """The id of the run."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether an earlier process has finished this run."""
        ...

    def pin(self) -> None:
        """Begin the run in the folder. Called before parties can connect."""
        ...

    def plan(self) -> Plan:
        """Plan the next attempt. Called when every party has stated its facts and checkpoints."""
        ...

    def save(self, state: Any) -> None: ...

    def settle(self) -> None:
        """Wait until the last saved state is durable."""
        ...

    def observe(self, event: Event) -> None: ...

    def finish(self, result: Any, finished: Sequence[Finished]) -> Report:
        """Write the report, from the script's result and from what the parties state."""
        ...

    def close(self, *, finished: bool) -> None: ...


class ServerPerformer:
    """Performs the requests of a server's script over a session."""

    def __init__(self, session: ServerSession, role: ServerRole[Any]) -> None:
        self.session, self.role = session, role

    def __call__(self, request: Any) -> Any:
        """Perform one request and return its result."""
        role = self.role
        match request:
            case Receive():
                return self._receive(request)
            case Broadcast(message, rides):
                role.settle()  # a checkpoint must be durable before the next message leaves
                role.telemetry.sent_to_clients(message, self.session.num_parties)
                self._count_exchange(message.key, rides=rides)
                with role.telemetry.watch.measure("communication"):
                    self.session.broadcast(message)
            case Scatter(messages, rides):
                role.settle()
                for message in messages:
                    role.telemetry.sent_to_clients(message)
                self._count_exchange(messages[0].key, rides=rides)
                with role.telemetry.watch.measure("communication"):
                    self.session.scatter(messages)
            case Save(take_state):
                role.save(take_state())
            case _:
                role.observe(request)
        return None

    def _receive(self, request: Receive) -> Any:
        with self.role.telemetry.watch.measure("waiting"):
            messages = self.session.receive(request)
        for message in messages:
            self.role.telemetry.sent_to_server(message)
        return messages

    def _count_exchange(self, key: Key, *, rides: bool) -> None:
        if key.chunk == 0 and not rides:
            self.role.telemetry.exchange(key)
