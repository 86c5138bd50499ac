"""Options of the roles, and the events that an observer receives. Torch is not loaded here.

Roles write to `logging` for people: the server to the logger `glasu.server`, party NAME to `glasu.party.NAME`. An
observer receives events for programs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from glasu.config import RunConfig
from glasu.network.status import Status, View
from glasu.pki.kit import Kit
from glasu.protocol.requests import Event
from glasu.timing import Clock

if TYPE_CHECKING:
    from glasu.data.party import PartyData

OnInvalidMessage = Literal["abort", "wait"]
DEFAULT_WAIT = 600.0  # seconds


@dataclass(frozen=True)
class Serving:
    """Event: the server process has started. Any thread may call its functions."""

    view: Callable[[], View] | None  # returns the server at this moment; None in a prediction
    stop: Callable[[str], None]  # the reason to end the run for all roles


@dataclass(frozen=True)
class Listening:
    """Event: parties can connect."""

    port: int
    finished: bool = False  # the run is finished; parties can only ask for that


RoleEvent = Event | Serving | Listening | Status
Observer = Callable[[RoleEvent], None]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How to serve a training, a prediction or a dry run."""

    config: RunConfig
    kit: Kit  # the server's; its roster lists the parties
    listen: str  # host:port
    out: Path  # folder of the results and checkpoints
    fresh: bool = False  # start over; earlier checkpoints are removed once all parties have joined
    wait: float = DEFAULT_WAIT  # seconds that a party may be without a connection
    on_invalid_message: OnInvalidMessage = "abort"
    observer: Observer | None = None
    clock: Clock = time.perf_counter

    @property
    def log(self) -> logging.Logger:
        return logging.getLogger("glasu.server")

    def emit(self, event: RoleEvent) -> None:
        """Give an event to the observer, if there is one."""
        if self.observer is not None:
            self.observer(event)


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """How one party takes part in a training, a prediction or a dry run."""

    party: PartyData
    kit: Kit  # the party's; the name in its certificate is the party's name
    server: str  # host:port
    out: Path  # folder of the results and checkpoints
    expect: RunConfig | None = None  # refuse other settings
    run: str | None = None  # take part in this run only
    fresh: bool = False  # start over; earlier checkpoints are removed once the run begins
    wait: float = DEFAULT_WAIT  # seconds that the server may be away
    max_memory: int | None = None  # bytes that the server's settings may require; None: half of this machine's
    observer: Observer | None = None
    clock: Clock = time.perf_counter

    @property
    def log(self) -> logging.Logger:
        return logging.getLogger(f"glasu.party.{self.party.name}")

    def emit(self, event: RoleEvent) -> None:
        """Give an event to the observer, if there is one."""
        if self.observer is not None:
            self.observer(event)
