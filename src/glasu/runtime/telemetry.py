"""Measure a run: messages, bytes, evaluations and seconds.

`TrafficCounter` counts encoded messages, both in one process and over the network. `Telemetry` also stores evaluations
and seconds. A resumed run continues with the counts in its checkpoint. Torch is not loaded.

The logger `glasu.wire` writes one line per message and per exchange at level DEBUG, as soon as it is counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from glasu.protocol.messages import Message
from glasu.protocol.requests import (
    Broadcast,
    CandidateDiverged,
    CandidateStarted,
    Collapsed,
    Evaluated,
    Event,
    Propagated,
    Receive,
    Scatter,
    SubsetScored,
)
from glasu.report import Seconds, SubsetScores, Traffic
from glasu.timing import Clock, Stopwatch
from glasu.wire.message_key import SERVER, TO_ONE

PARTS = ("sampling", "compute", "communication", "evaluation")  # activities that a simulation or a party measures
SERVER_PARTS = ("waiting", "communication")  # activities that the server of a run between machines measures
log = logging.getLogger(__name__)
wire_log = logging.getLogger("glasu.wire")


class TrafficCounter:
    """Counts messages, bytes and exchanges."""

    def __init__(self) -> None:
        self.restore(Traffic())
        # The last message and its sizes. A broadcast is counted for every client, but measured only once.
        self._last: tuple[Message, list[tuple[str, int]]] | None = None

    def restore(self, traffic: Traffic) -> None:
        """Continue from earlier counts."""
        self.bytes_to_server, self.bytes_to_clients = traffic.bytes_to_server, traffic.bytes_to_clients
        self.headers_to_server = traffic.headers_to_server
        self.messages, self.exchanges = traffic.messages, traffic.exchanges
        self.by_kind, self.by_phase = Counter(traffic.by_kind), Counter(traffic.by_phase)
        self.exchanges_by_phase = Counter(traffic.exchanges_by_phase)

    def snapshot(self) -> Traffic:
        """Return the counts at this moment."""
        return Traffic(
            bytes_to_server=self.bytes_to_server,
            bytes_to_clients=self.bytes_to_clients,
            headers_to_server=self.headers_to_server,
            messages=self.messages,
            exchanges=self.exchanges,
            by_kind=dict(self.by_kind),
            by_phase=dict(self.by_phase),
            exchanges_by_phase=dict(self.exchanges_by_phase),
        )

    @property
    def total_bytes(self) -> int:
        return self.bytes_to_server + self.bytes_to_clients

    def count_to_server(self, message: Message) -> None:
        """Count a message from one client."""
        self.bytes_to_server += self._count(message, "server")
        assert self._last is not None
        self.headers_to_server += self._last[1][0][1]  # `Message.measure` returns the header first

    def count_to_clients(self, message: Message, num_clients: int = 1) -> None:
        """Count a message that `num_clients` clients receive."""
        self.bytes_to_clients += self._count(message, "client", num_clients)

    def exchange(self, answer: Receive | Broadcast | Scatter) -> None:
        """Count the exchange that an answer completes.

        An exchange consists of the messages that a client sends before it waits, and their answers. An answer to a
        later chunk belongs to the exchange of the first chunk. An answer that rides belongs to the exchange of the
        main script (`drive.interleave`). So neither of these answers counts as an exchange.
        """
        if answer.rides or answer.key.chunk:
            return
        phase = answer.key.phase.reported
        self.exchanges += 1
        self.exchanges_by_phase[phase] += 1
        wire_log.debug("exchange phase=%s", phase)

    def _count(self, message: Message, receiver: str, copies: int = 1) -> int:
        """Count `copies` copies of a message, and return the bytes of all copies together."""
        if self._last is None or message is not self._last[0]:
            self._last = message, message.measure()
        total = 0
        for kind, size in self._last[1]:
            self.by_kind[kind] += copies * size
            total += size
        self.by_phase[message.key.phase.reported] += copies * total
        self.messages += copies
        if wire_log.isEnabledFor(logging.DEBUG):
            key, name = message.key, type(message).__name__
            client = "all" if key.client == SERVER else key.client % TO_ONE
            about = f"phase={key.phase.name.lower()} round={key.round} layer={key.layer} chunk={key.chunk}"
            for _ in range(copies):
                wire_log.debug("to=%s kind=%s %s client=%s bytes=%d", receiver, name, about, client, total)
        return copies * total


@dataclass(frozen=True)
class Evaluation:
    """One evaluation, and the cost of the run up to this evaluation."""

    event: Evaluated
    bytes: int
    exchanges: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """Traffic and seconds. If a round is repeated, both executions of the round are counted."""

    traffic: Traffic = field(default_factory=Traffic)
    seconds: Seconds = field(default_factory=Seconds)


@dataclass(frozen=True)
class RaceCost:
    """The cost of a run until the preset chose a candidate."""

    bytes: int
    exchanges: int


@dataclass(frozen=True)
class TelemetryState:
    """The state of `Telemetry` in a checkpoint."""

    cost: Cost = field(default_factory=Cost)
    evaluations: tuple[Evaluation, ...] = ()
    race: RaceCost | None = None


class Telemetry:
    """Traffic, evaluations and seconds of a run, including the processes before a restart."""

    def __init__(
        self,
        clock: Clock,
        traffic: TrafficCounter | None = None,
        parts: Sequence[str] = PARTS,
        compiling: Clock | None = None,
    ) -> None:
        """Start the clock.

        Args:
            clock: returns seconds.
            traffic: a counter that the caller reads during the run.
            parts: the activities that the stopwatches measure.
            compiling: returns the seconds that this process has spent compiling; None omits them from the report.
        """
        self.traffic = TrafficCounter() if traffic is None else traffic
        self.watch = Stopwatch(clock)
        self.evaluations: list[Evaluation] = []
        self.race: RaceCost | None = None  # None until the preset has chosen a candidate
        # The next three attributes are computed after the last checkpoint, so they are never saved.
        self.warnings: list[str] = []
        self.propagated: dict[str, Propagated] = {}  # by party
        self.subsets: dict[tuple[str, ...], SubsetScores] = {}  # by parties
        self._watches = [self.watch]
        self._before = Seconds()  # seconds of earlier processes
        self._parts = tuple(parts)
        # The clocks may have started earlier, so `_start` stores their readings at this time.
        self._clocks = {"total": clock} if compiling is None else {"total": clock, "compiling": compiling}
        self._start = {name: read() for name, read in self._clocks.items()}

    def add_watch(self, watch: Stopwatch) -> None:
        """Include the stopwatch of a client that runs in this process."""
        self._watches.append(watch)

    def observe(self, event: Event) -> None:
        """Record what an event reports. Parties that train alone may report from several threads."""
        if isinstance(event, Evaluated):
            self.evaluations.append(Evaluation(event, self.traffic.total_bytes, self.traffic.exchanges, self.elapsed()))
        elif isinstance(event, CandidateStarted):
            log.info("%s", self.record_candidate(event))
        elif isinstance(event, CandidateDiverged):
            log.info("%s.", event)
        elif isinstance(event, Collapsed) and f"{event}." not in self.warnings:  # all parties with labels report this
            self.warnings.append(f"{event}.")
            log.warning("%s.", event)
        elif isinstance(event, Propagated):
            self.propagated[event.party] = event
        elif isinstance(event, SubsetScored):
            self.subsets[event.parties] = SubsetScores(event.parties, event.metrics)

    def record_candidate(self, event: CandidateStarted) -> str:
        """Record that a candidate started or was chosen, and return the log line with the cost so far."""
        traffic = self.traffic
        if event.chosen:
            self.race = RaceCost(traffic.total_bytes, traffic.exchanges)
        if event.restarts:
            self.evaluations.clear()  # these evaluations belong to another candidate
        releases = "" if event.releases is None else f" and {event.releases} releases"
        return f"{event}; {traffic.total_bytes / 1e6:.1f} MB{releases} so far."

    def elapsed(self) -> float:
        """Return the seconds spent on this run so far, including the processes before a restart."""
        return self._before.total + self._clocks["total"]() - self._start["total"]

    def seconds(self) -> Seconds:
        """Return the seconds so far, summed over all stopwatches."""
        parts = {name: sum(watch.seconds[name] for watch in self._watches) for name in self._parts}
        if "compiling" in self._clocks:
            parts["compiling"] = self._clocks["compiling"]() - self._start["compiling"]
        return Seconds(self.elapsed(), {name: self._before.parts.get(name, 0.0) + own for name, own in parts.items()})

    def cost(self) -> Cost:
        """Return traffic and seconds so far."""
        return Cost(self.traffic.snapshot(), self.seconds())

    def state(self) -> TelemetryState:
        """Return everything that was recorded so far."""
        return TelemetryState(self.cost(), tuple(self.evaluations), self.race)

    def restore(self, state: TelemetryState) -> None:
        """Continue from a state."""
        self.restore_cost(state.cost)
        self.rewind(state)

    def restore_cost(self, cost: Cost) -> None:
        """Continue from the cost of an earlier process."""
        self.traffic.restore(cost.traffic)
        self._before = cost.seconds

    def rewind(self, state: TelemetryState) -> None:
        """Restore the evaluations of a state, because the later rounds run again. Keep the cost of their first run."""
        self.evaluations, self.race = list(state.evaluations), state.race
