"""Telemetry of a run: messages and bytes, evaluations and losses, seconds. Torch is not loaded here.

`TrafficCounter` counts encoded messages, in process and over the network alike. `Telemetry`
adds evaluations and seconds. A resumed run restores the state of its checkpoint and adds to it.

The logger `glasu.wire` writes one line per message and per exchange at level DEBUG, in the order of counting.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from glasu.protocol.message_bytes import measure
from glasu.protocol.messages import Message
from glasu.protocol.requests import Evaluated, Event, RoundDone
from glasu.report import HistoryEntry, Measurements, Seconds, SplitScores, Traffic
from glasu.timing import Clock, Stopwatch
from glasu.wire.message_key import SERVER, TO_ONE, Key

PARTS = ("sampling", "compute", "communication", "evaluation")  # activities that a simulation or a party times
SERVER_PARTS = ("waiting", "communication")  # a server between machines does nothing else
wire_log = logging.getLogger("glasu.wire")


class TrafficCounter:
    """Counts messages, bytes and exchanges."""

    def __init__(self) -> None:
        self.restore(Traffic())
        # A broadcast is counted once per client. Its size is computed once.
        self._last: tuple[Message, list[tuple[str, int]]] | None = None

    def restore(self, traffic: Traffic) -> None:
        """Continue from earlier figures."""
        self.bytes_to_server, self.bytes_to_clients = traffic.bytes_to_server, traffic.bytes_to_clients
        self.messages, self.exchanges = traffic.messages, traffic.exchanges
        self.by_kind, self.by_phase = Counter(traffic.by_kind), Counter(traffic.by_phase)
        self.exchanges_by_phase = Counter(traffic.exchanges_by_phase)

    def snapshot(self) -> Traffic:
        """Return the figures at this moment."""
        return Traffic(
            bytes_to_server=self.bytes_to_server,
            bytes_to_clients=self.bytes_to_clients,
            messages=self.messages,
            exchanges=self.exchanges,
            by_kind=dict(self.by_kind),
            by_phase=dict(self.by_phase),
            exchanges_by_phase=dict(self.exchanges_by_phase),
        )

    @property
    def total_bytes(self) -> int:
        return self.bytes_to_server + self.bytes_to_clients

    def sent_to_server(self, message: Message) -> None:
        """Count a message from one client."""
        self.bytes_to_server += self._count(message, "server")

    def sent_to_clients(self, message: Message, num_clients: int = 1) -> None:
        """Count a message that `num_clients` clients receive."""
        for _ in range(num_clients):
            self.bytes_to_clients += self._count(message, "client")

    def exchange(self, key: Key) -> None:
        """Count one exchange: everything that a client sends before it waits, and the answers.

        Args:
            key: of the first answer.
        """
        phase = key.phase.reported
        self.exchanges += 1
        self.exchanges_by_phase[phase] += 1
        wire_log.debug("exchange phase=%s", phase)

    def _count(self, message: Message, receiver: str) -> int:
        if self._last is None or message is not self._last[0]:
            self._last = message, measure(message)
        total = 0
        for kind, size in self._last[1]:
            self.by_kind[kind] += size
            total += size
        self.by_phase[message.key.phase.reported] += total
        self.messages += 1
        if wire_log.isEnabledFor(logging.DEBUG):
            key, name = message.key, type(message).__name__
            client = "all" if key.client == SERVER else key.client % TO_ONE
            about = f"phase={key.phase.name.lower()} round={key.round} layer={key.layer} chunk={key.chunk}"
            wire_log.debug("to=%s kind=%s %s client=%s bytes=%d", receiver, name, about, client, total)
        return total


@dataclass(frozen=True)
class Evaluation:
    """One evaluation, and the cost of the run until then."""

    round: int
    split: str
    metrics: Mapping[str, float]
    loss: float | None
    improved: bool
    party: str | None  # set where parties train alone
    bytes: int
    exchanges: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """Traffic and seconds. They are kept when the rounds that caused them are repeated."""

    traffic: Traffic = field(default_factory=Traffic)
    seconds: Seconds = field(default_factory=Seconds)


@dataclass(frozen=True)
class PartyLosses:
    """The training losses of one party, or of all together, by round."""

    party: str | None
    losses: tuple[float, ...]


@dataclass(frozen=True)
class TelemetryState:
    """The state of `Telemetry` in a checkpoint."""

    cost: Cost = field(default_factory=Cost)
    evaluations: tuple[Evaluation, ...] = ()
    losses: tuple[PartyLosses, ...] = ()


class Telemetry:
    """Traffic, evaluations and seconds of a run, over all processes that ran it."""

    def __init__(
        self,
        clock: Clock,
        parties: Sequence[str | None] = (None,),
        traffic: TrafficCounter | None = None,
        parts: Sequence[str] = PARTS,
        compiling: Clock | None = None,
    ) -> None:
        """Start the clock.

        Args:
            clock: returns seconds.
            parties: the parties that are evaluated alone; [None] if they are evaluated together.
            traffic: a counter that the caller reads during the run.
            parts: the activities that the stopwatches time.
            compiling: returns the seconds that this process has spent compiling; None leaves them out of the report.
        """
        self.traffic = TrafficCounter() if traffic is None else traffic
        self.watch = Stopwatch(clock)
        self.parts = tuple(parts)
        self._clock, self._start, self._before = clock, clock(), Seconds()
        self._compiling, self._compiled_before = compiling, 0.0 if compiling is None else compiling()
        self._watches = [self.watch]
        self._evaluations: dict[str | None, list[Evaluation]] = {party: [] for party in parties}
        self._losses: dict[str | None, list[float]] = {party: [] for party in parties}

    def add_watch(self, watch: Stopwatch) -> None:
        """Add the seconds of a client that runs in this process."""
        self._watches.append(watch)

    def sent_to_server(self, message: Message) -> None:
        """Count a message from one client."""
        self.traffic.sent_to_server(message)

    def sent_to_clients(self, message: Message, num_clients: int = 1) -> None:
        """Count a message that `num_clients` clients receive."""
        self.traffic.sent_to_clients(message, num_clients)

    def exchange(self, key: Key) -> None:
        """Count one exchange."""
        self.traffic.exchange(key)

    def observe(self, event: Event) -> None:
        """Record an event. Parties that train alone may report from several threads."""
        if isinstance(event, Evaluated):
            self._evaluations[event.party].append(
                Evaluation(
                    round=event.round,
                    split=event.split,
                    metrics=event.metrics,
                    loss=event.loss,
                    improved=event.improved,
                    party=event.party,
                    bytes=self.traffic.total_bytes,
                    exchanges=self.traffic.exchanges,
                    seconds=self.elapsed(),
                )
            )
        elif isinstance(event, RoundDone) and event.loss is not None:
            self._losses[event.party].append(event.loss)

    def elapsed(self) -> float:
        """Return the seconds that processes have spent on this run."""
        return self._before.total + self._clock() - self._start

    def seconds(self) -> Seconds:
        """Return the seconds so far, of all stopwatches together."""
        parts = {
            name: self._before.parts.get(name, 0.0) + sum(watch.seconds[name] for watch in self._watches)
            for name in self.parts
        }
        if self._compiling is not None:
            compiled = self._compiling() - self._compiled_before
            parts["compiling"] = self._before.parts.get("compiling", 0.0) + compiled
        return Seconds(self.elapsed(), parts)

    def cost(self) -> Cost:
        """Return traffic and seconds so far."""
        return Cost(self.traffic.snapshot(), self.seconds())

    def state(self) -> TelemetryState:
        """Return everything that was recorded so far."""
        return TelemetryState(
            cost=self.cost(),
            evaluations=tuple(entry for entries in self._evaluations.values() for entry in entries),
            losses=tuple(PartyLosses(party, tuple(losses)) for party, losses in self._losses.items()),
        )

    def restore(self, state: TelemetryState) -> None:
        """Continue from a state."""
        self.restore_cost(state.cost)
        self.rewind(state)

    def restore_cost(self, cost: Cost) -> None:
        """Continue from the cost of an earlier process."""
        self.traffic.restore(cost.traffic)
        self._before = cost.seconds

    def rewind(self, state: TelemetryState) -> None:
        """Return to the evaluations and losses of a state, because later rounds are repeated. Keep their cost."""
        for evaluations in self._evaluations.values():
            evaluations.clear()
        for evaluation in state.evaluations:
            self._evaluations[evaluation.party].append(evaluation)
        saved = {entry.party: entry.losses for entry in state.losses}
        self._losses = {party: list(saved.get(party, ())) for party in self._losses}

    def mean_losses(self) -> tuple[float, ...]:
        """Return the mean loss of every round, over the parties that trained in it."""
        rounds = range(max(map(len, self._losses.values()), default=0))
        found = [[losses[index] for losses in self._losses.values() if index < len(losses)] for index in rounds]
        return tuple(sum(losses) / len(losses) for losses in found)

    def scores(self, split: str, *, per_client: bool = False) -> SplitScores:
        """Return the scores of the selected model; where every party selects its own, the mean.

        Args:
            split: "validation" or "test".
            per_client: also return the first metric of every party.
        """
        found = []
        for evaluations in self._evaluations.values():
            chosen = [entry for entry in evaluations if entry.split == split and (split == "test" or entry.improved)]
            found.append(chosen[-1])
        mean = {name: sum(entry.metrics[name] for entry in found) / len(found) for name in found[0].metrics}
        rounds = {entry.round for entry in found}
        return SplitScores(
            mean,
            round=rounds.pop() if len(rounds) == 1 else None,
            per_client=tuple(next(iter(entry.metrics.values())) for entry in found) if per_client else None,
        )

    def history(self) -> tuple[HistoryEntry, ...]:
        """Return one entry per evaluated round.

        Where parties train alone, an entry is the mean. A party that has stopped keeps its last figures.
        """
        by_party = [
            [entry for entry in evaluations if entry.split == "validation"]
            for evaluations in self._evaluations.values()
        ]
        entries = []
        for round_index in sorted({entry.round for evaluations in by_party for entry in evaluations}):
            found = [next(entry for entry in reversed(own) if entry.round <= round_index) for own in by_party]
            entries.append(
                HistoryEntry(
                    round=round_index,
                    loss=sum(entry.loss or 0.0 for entry in found) / len(found),
                    metrics={
                        name: sum(entry.metrics[name] for entry in found) / len(found) for name in found[0].metrics
                    },
                    bytes=max(entry.bytes for entry in found),
                    exchanges=max(entry.exchanges for entry in found),
                    seconds=max(entry.seconds for entry in found),
                )
            )
        return tuple(entries)

    def measurements(self, losses: Sequence[float] | None = None, *, per_client: bool = False) -> Measurements:
        """Return the parts of a report.

        Args:
            losses: the mean loss of every round, if a server knows it; otherwise it is computed from the events.
            per_client: the parties were selected and tested alone.
        """
        return Measurements(
            test=self.scores("test", per_client=per_client),
            validation=self.scores("validation", per_client=per_client),
            history=self.history(),
            losses=self.mean_losses() if losses is None else tuple(losses),
            traffic=self.traffic.snapshot(),
            seconds=self.seconds(),
        )
