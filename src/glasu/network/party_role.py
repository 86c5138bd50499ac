"""The purposes of a party share one driver: what a purpose provides, and how its script's requests are performed."""

from __future__ import annotations

from typing import Any, Protocol

from glasu.network.client_session import ClientSession
from glasu.network.control import ProposedAttempt
from glasu.network.handshake import ClientHandshake, Finished
from glasu.protocol.limits import Limits
from glasu.protocol.messages import Message
from glasu.protocol.requests import Event, Receive, Save, Script, Send
from glasu.runtime.drive import check_answer
from glasu.runtime.telemetry import Telemetry
from glasu.timing import Stopwatch
from glasu.wire.message_key import Key


class PartyRole(ClientHandshake, Protocol):
    """What a party does besides talking: training, prediction."""

    @property
    def telemetry(self) -> Telemetry: ...

    @property
    def watch(self) -> Stopwatch:
        """Adds up the computing time of the script."""
        ...

    @property
    def limits(self) -> Limits:
        """The greatest sizes of the server's messages."""
        ...

    def begin(self, attempt: ProposedAttempt) -> Script[Any]:
        """Restore the checkpoint of an attempt and return the script that continues from it."""
        ...

    def save(self, state: Any) -> None: ...

    def settle(self) -> None:
        """Wait until the last saved state is durable."""
        ...

    def observe(self, event: Event) -> None: ...

    def finish(self, result: Any) -> Finished:
        """Write the results of this party."""
        ...

    def close(self, *, finished: bool) -> None:
        """Stop the threads and files of this role; `finished`: every party is finished."""
        ...


class PartyPerformer:
    """Performs the requests of a party's script over a session."""

    def __init__(self, session: ClientSession, role: PartyRole) -> None:
        self.session, self.role = session, role
        self._exchange: Key | None = None  # the last answer of the exchange that is not counted yet

    def __call__(self, request: Any) -> Any:
        """Perform one request and return its result."""
        role = self.role
        if isinstance(request, Receive):
            return self._receive(request)
        self.count_exchange()
        match request:
            case Send(message):
                role.settle()  # a checkpoint must be durable before the next message leaves
                role.telemetry.sent_to_server(message)
                with role.telemetry.watch.measure("communication"):
                    self.session.send(message)
            case Save(take_state):
                role.save(take_state())
            case _:
                role.observe(request)
        return None

    def _receive(self, request: Receive) -> Message:
        with self.role.telemetry.watch.measure("communication"):
            message = check_answer(request, self.session.receive(request))
        self.role.telemetry.sent_to_clients(message)
        if request.key.chunk == 0:  # in an exchange with a rider, the answer to the main script comes last
            self._exchange = request.key
        return message

    def count_exchange(self) -> None:
        """Count the exchange whose answers have all arrived. Called after the script's end, too."""
        if self._exchange is not None:
            self.role.telemetry.exchange(self._exchange)
            self._exchange = None
