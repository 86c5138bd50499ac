"""Measure a run (messages, bytes, evaluations, seconds), and build the reports of all roles.

`TrafficCounter` counts encoded messages, both in one process and over the network. `Telemetry` also stores evaluations
and seconds, and builds the report. A resumed run continues with the counts in its checkpoint. Torch is not loaded.

The logger `glasu.wire` writes one line per message and per exchange at level DEBUG, as soon as it is counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from glasu.config import Override, RunConfig, list_candidates
from glasu.data.methods import evaluates_once, keeps_scores
from glasu.data.presets import count_race_rounds, list_chosen
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
from glasu.protocol.server import Server
from glasu.protocol.state import DIVERGED, Identity
from glasu.report import (
    CandidateSummary,
    CostFields,
    HistoryEntry,
    PartyReport,
    PartySummary,
    PredictionReport,
    PreparedColumns,
    PrivacySummary,
    RaceSummary,
    RunReport,
    Seconds,
    SplitScores,
    SubsetScores,
    Traffic,
    TrainingFields,
    WarmStart,
    find_subset,
    list_versions,
)
from glasu.timing import Clock, Stopwatch
from glasu.wire.message_key import SERVER, TO_ONE

if TYPE_CHECKING:  # this import would load torch, which a server does not have
    from glasu.protocol.client import Client

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

    def collect_cost(self, config: RunConfig | None = None) -> CostFields:
        """Return the fields that all reports share. If `config` is given, also list the versions of its extensions."""
        cost = self.cost()
        return {"traffic": cost.traffic, "seconds": cost.seconds, "versions": list_versions(config)}

    def _collect_training(
        self, config: RunConfig, weights_sha256: Iterable[str], privacy: PrivacySummary
    ) -> TrainingFields:
        digests = tuple(weights_sha256)
        return {**self.collect_cost(config), "config": config, "weights_sha256": digests, "privacy": privacy}

    def build_report(
        self,
        config: RunConfig,
        *,
        losses: Sequence[Sequence[float]],
        parties: Iterable[PartySummary],
        weights_sha256: Iterable[str],
        overridden: Mapping[str, Override],
        privacy: PrivacySummary,
        race: RaceSummary | None = None,
        alone: Sequence[str] | None = None,
        per_client: bool = False,
        notes: Iterable[str] = (),
    ) -> RunReport:
        """Build the report of a simulation or of a server.

        Args:
            config: the settings with which the run trained.
            losses: the loss of every round, as one sequence for the server, or as one sequence per party.
            parties: the data of each party.
            weights_sha256: the digest of the selected weights of each party.
            overridden: the settings that the method, the sampler or the data replaced.
            privacy: the protection of the released tensors.
            race: the candidates of the preset and its choice; None if there was only one candidate.
            alone: the parties that were evaluated alone; None if they were evaluated together.
            per_client: whether to report the first metric of every party.
            notes: lines about the data.
        """
        names: Sequence[str | None] = [None] if alone is None else alone
        by_party = [[entry for entry in self.evaluations if entry.event.party == name] for name in names]
        longest = max(map(len, losses), default=0)
        test, validation = (_score(by_party, split, per_client=per_client) for split in ("test", "validation"))
        if per_client and self.propagated:
            test, validation = self._add_propagation(names, test, validation)
        warm = self._find_warm_start(config)
        if warm is not None and warm.selected == "ensemble":
            log.warning(
                "joint training did not help: on validation, no joint model is better than the ensemble of the models "
                "that the parties trained alone (the warm start). The ensemble is the selected model."
            )
        return RunReport(
            **self._collect_training(config, weights_sha256, privacy),
            test=test,
            validation=validation,
            history=_list_history(by_party),
            losses=tuple(_average([own[index] for own in losses if index < len(own)]) for index in range(longest)),
            parties=tuple(parties),
            overridden=overridden,
            race=race,
            notes=(*notes, *sorted(self.warnings)),  # parties that train alone report in any order
            subsets=tuple(self.subsets.values()) or None,
            warm_start=warm,
        )

    def _add_propagation(
        self, names: Sequence[str | None], test: SplitScores, validation: SplitScores
    ) -> tuple[SplitScores, SplitScores]:
        """Add each party's scores of label propagation.

        Also add, for each party, whether propagation or the model has the better score on the validation nodes.
        """
        found = [self.propagated.get(name or "") for name in names]
        test, validation = (
            replace(scores, per_client_propagation=tuple(_find_first_metric(each, split) for each in found))
            for scores, split in ((test, "test"), (validation, "validation"))
        )
        better = tuple(
            None if score is None else "propagation" if each is not None and each.is_better else "model"
            for each, score in zip(found, validation.per_client or (), strict=True)
        )
        return test, replace(validation, per_client_better=better)

    def _find_warm_start(self, config: RunConfig) -> WarmStart | None:
        """Return the result of the warm start; None if there was none."""
        events = [entry.event for entry in self.evaluations if entry.event.split == "validation"]
        ensemble = next((event.metrics for event in events if event.ensemble), None)
        if ensemble is None:
            return None
        selected = [event for event in events if event.improved][-1]
        return WarmStart(config.train.warm_start, "ensemble" if selected.ensemble else "joint", ensemble)

    def build_party_report(
        self,
        config: RunConfig,
        identity: Identity,
        metrics: Mapping[str, float],
        weights_sha256: str,
        privacy: PrivacySummary,
        prepared: PreparedColumns,
        losses: Sequence[float] = (),
        race: RaceSummary | None = None,
    ) -> PartyReport:
        """Build the report of one party in a run between machines.

        Args:
            config: the settings with which the run trained.
            identity: the identity of the party.
            metrics: the metrics on the test split; empty at a party without labels.
            weights_sha256: the digest of the party's selected weights.
            privacy: the protection of the party's releases.
            prepared: the preparation of the party's features.
            losses: the losses of this party, one per round.
            race: the candidates of the preset and its choice; None if there was only one candidate.
        """
        party = identity.names[identity.index]
        own = party if evaluates_once(config) else None
        evaluations = [entry for entry in self.evaluations if entry.event.party == own]
        reports = keeps_scores(config) and bool(evaluations)
        return PartyReport(
            **self._collect_training(config, [weights_sha256], privacy),
            party=party,
            parties=identity.names,
            run=identity.run.hex(),
            test=SplitScores(metrics) if metrics else None,
            prepared=prepared,
            validation=_score([evaluations], "validation", per_client=False) if reports else None,
            history=_list_history([evaluations]) if reports else None,
            losses=tuple(losses) if reports else None,
            race=race,
        )

    def build_prediction_report(
        self, parties: Sequence[str], present: Sequence[str], subsets: Iterable[SubsetScores]
    ) -> PredictionReport:
        """Build the part of prediction.json that is the same at the server and at the parties.

        Args:
            parties: the parties of the training.
            present: the parties that made this prediction.
            subsets: the validation scores of subsets of the parties.
        """
        missing = tuple(name for name in parties if name not in present)
        scores = find_subset(subsets, present) if missing else None
        return PredictionReport(
            **self.collect_cost(),
            parties=tuple(parties),
            missing=missing,
            validation=None if scores is None else scores.metrics,
        )


def summarize_race(
    role: Client | Server, cost: RaceCost | None, releases: Mapping[str, int] | None = None
) -> RaceSummary | None:
    """Return the candidates of a race, the choice and its cost; None if there was only one candidate.

    Args:
        role: the server, which knows the scores, or a client.
        cost: the role's own count of bytes and exchanges before the choice.
        releases: the number of releases before the choice, by party; None if the role does not know it.
    """
    race = role.progress.race
    if race is None:
        return None
    assert cost is not None
    known = race.scores if isinstance(role, Server) else ()
    scores: dict[int, float | None] = dict(zip(reversed(race.order), known, strict=False))
    diverged = {each for each, score in scores.items() if score == DIVERGED}
    candidates = list_candidates(role.requested)
    entries = tuple(
        CandidateSummary(
            list_chosen(candidates, each),
            None if each in diverged else scores.get(each),
            chosen=each == race.chosen,
            diverged=each in diverged or None,
        )
        for each in race.order
    )
    rounds = count_race_rounds(role.config.train) if len(entries) > 1 else 0
    return RaceSummary(role.config.train.preset, rounds, entries, cost.bytes, cost.exchanges, releases)


def _score(by_party: Sequence[Sequence[Evaluation]], split: str, *, per_client: bool) -> SplitScores:
    """Return the scores of the selected model. If every party selects its own model, return the mean.

    A party without labels has no evaluation. Its score is None, and the mean leaves it out.
    """
    selected: list[Evaluated | None] = []
    for evaluations in by_party:
        events = [entry.event for entry in evaluations if entry.event.split == split]
        selected.append(next((each for each in reversed(events) if each.is_of_selected_model), None))
    found = [event for event in selected if event is not None]
    if not found:  # the server has no evaluations if the parties keep their scores
        return SplitScores({})
    combined = found[0].per_client  # not None if predictions are combined; then every party selected its own round
    own = combined
    if per_client:
        scores = [None if event is None else event.per_client or event.metrics.values() for event in selected]
        own = tuple(None if each is None else next(iter(each)) for each in scores)
    rounds = {event.round for event in found}
    chosen = rounds.pop() if len(rounds) == 1 and combined is None else None
    return SplitScores(_average_metrics(found), round=chosen, per_client=own)


def _find_first_metric(event: Propagated | None, split: str) -> float | None:
    """Return the first metric of label propagation; None at a party without edges."""
    return None if event is None else next(iter(event.metrics[split].values()))


def _list_history(by_party: Sequence[Sequence[Evaluation]]) -> tuple[HistoryEntry, ...]:
    """Return one entry per evaluated round.

    If parties train alone, an entry is the mean over the parties. A party that has stopped contributes its last values.
    """
    each = ([entry for entry in own if entry.event.split == "validation"] for own in by_party)
    validated = [own for own in each if own]  # a party without labels has no evaluation
    entries = []
    for round_index in sorted({entry.event.round for own in validated for entry in own}):
        found = [next(entry for entry in reversed(own) if entry.event.round <= round_index) for own in validated]
        events = [entry.event for entry in found]
        losses = [event.loss for event in events if event.loss is not None]
        entries.append(
            HistoryEntry(
                round=round_index,
                loss=_average(losses) if losses else None,
                metrics=_average_metrics(events),
                bytes=max(entry.bytes for entry in found),
                exchanges=max(entry.exchanges for entry in found),
                seconds=max(entry.seconds for entry in found),
            )
        )
    return tuple(entries)


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _average_metrics(events: Sequence[Evaluated]) -> dict[str, float]:
    return {name: _average([event.metrics[name] for event in events]) for name in events[0].metrics}
