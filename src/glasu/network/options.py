"""Options of the roles, and the events that an observer receives. Torch is not loaded here.

Roles write to `logging` for people: the server to the logger `glasu.server`, party NAME to `glasu.party.NAME`. An
observer receives events for programs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from glasu.config import RunConfig
from glasu.protocol.requests import Event
from glasu.report import Seconds, Traffic
from glasu.runtime.telemetry import Telemetry
from glasu.timing import Clock

if TYPE_CHECKING:
    from glasu.pki.kit import Kit
    from glasu.runtime.policy_file import PolicyFile

OnInvalidMessage = Literal["abort", "wait"]
DEFAULT_WAIT = 600.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Status:
    """Event: the progress of one role after a round. It holds no private data."""

    round: int  # completed rounds
    num_rounds: int
    attempt: int
    loss: float | None  # loss of the last round; at the server the mean over all parties
    bytes_to_server: int
    bytes_to_clients: int
    seconds: float  # running time of this role's processes

    @classmethod
    def of(cls, telemetry: Telemetry, round_index: int, num_rounds: int, attempt: int, loss: float | None) -> Status:
        """Return the progress of one role. `telemetry` contains the role's traffic and running time."""
        return cls(
            round=round_index,
            num_rounds=num_rounds,
            attempt=attempt,
            loss=loss,
            bytes_to_server=telemetry.traffic.bytes_to_server,
            bytes_to_clients=telemetry.traffic.bytes_to_clients,
            seconds=telemetry.elapsed(),
        )

    def line(self) -> str:
        """Return the status line of a round."""
        loss = "" if self.loss is None else f"loss {self.loss:.3f}, "
        return (
            f"round {self.round}/{self.num_rounds} done, {loss}{self.bytes_to_server / 1e6:.2f} MB to the server, "
            f"{self.bytes_to_clients / 1e6:.2f} MB back, {self.seconds:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class View:
    """The state of a server at one moment, for monitoring. It holds no private data."""

    status: Status
    connected: Mapping[str, bool]  # by party
    refused: int  # processes and connections that the server refused after the TLS handshake
    traffic: Traffic
    seconds: Seconds
    scores: Mapping[str, float] = field(default_factory=dict)  # scores of the last evaluation on validation nodes
    finished: bool = False


@dataclass(frozen=True)
class Serving:
    """Event: the server process has started. Any thread may call its functions."""

    view: Callable[[], View | None]  # returns the current state of the server; None if the server does not train
    stop: Callable[[str], None]  # ends the run for all roles; the argument is the reason


@dataclass(frozen=True)
class Listening:
    """Event: parties can connect."""

    port: int


RoleEvent = Event | Serving | Listening | Status
RoleObserver = Callable[[RoleEvent], None]


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """The options that both roles have."""

    kit: Kit
    out: Path  # folder of the results and checkpoints
    fresh: bool = False  # start over; earlier checkpoints are removed once the run begins
    wait: float = DEFAULT_WAIT  # seconds that the other side may be without a connection
    observer: RoleObserver | None = None
    clock: Clock = time.perf_counter

    @property
    def log(self) -> logging.Logger:
        """The logger of this role."""
        return logging.getLogger("glasu.server" if self.kit.role == "server" else f"glasu.party.{self.kit.name}")

    def emit(self, event: RoleEvent) -> None:
        """Pass an event to the observer, if there is one."""
        if self.observer is not None:
            self.observer(event)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(RoleOptions):
    """Options of a server with any purpose. The roster of the kit lists the parties."""

    config: RunConfig
    listen: str  # host:port
    on_invalid_message: OnInvalidMessage = "abort"


@dataclass(frozen=True, kw_only=True)
class JoinOptions(RoleOptions):
    """Options of one party. The certificate of the kit contains the party's name."""

    server: str  # host:port
    expect: RunConfig | None = None  # the agreed settings; the party refuses different settings
    run: str | None = None  # the id of the only run that the party may join; None: any run
    policy: PolicyFile | None = None  # the rules of the party about what it may release
    max_memory: int | None = None  # bytes that the server's settings may require; None: half of this machine's memory
