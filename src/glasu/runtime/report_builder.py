"""Build the reports of all roles from their telemetry: in a simulation, at a server and at a party.

Torch is not loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from glasu.config import Override, RunConfig, list_candidates
from glasu.data.methods import evaluates_once, find_method, has_server, keeps_scores
from glasu.data.presets import count_race_rounds, list_chosen
from glasu.protocol.requests import Evaluated, Propagated
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
    SplitScores,
    SubsetScores,
    WarmStart,
    find_subset,
    list_versions,
)
from glasu.runtime.telemetry import Evaluation, RaceCost, Telemetry

if TYPE_CHECKING:  # this import would load torch, which a server does not have
    from glasu.protocol.client import Client

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a role knows at the end of a training run, in addition to its telemetry."""

    config: RunConfig  # the settings with which the run trained
    losses: Sequence[Sequence[float]]  # of every round: one sequence at a server, or one sequence per party
    weights_sha256: tuple[str, ...]  # digests of the selected weights, in client order
    privacy: PrivacySummary
    race: RaceSummary | None = None  # None if there was only one candidate


def collect_cost(telemetry: Telemetry, config: RunConfig | None = None) -> CostFields:
    """Return the fields that all reports share. If `config` is given, also list the versions of its extensions."""
    cost = telemetry.cost()
    return {"traffic": cost.traffic, "seconds": cost.seconds, "versions": list_versions(config)}


def build_run_report(
    telemetry: Telemetry,
    result: TrainingResult,
    parties: Sequence[PartySummary],
    overridden: Mapping[str, Override],
    notes: Iterable[str] = (),
) -> RunReport:
    """Build the report of a simulation or of a server.

    Args:
        telemetry: the traffic, evaluations and seconds of the run.
        result: what the role knows at the end of the run.
        parties: the data of each party.
        overridden: the settings that the method, the sampler or the data replaced.
        notes: lines about the data.
    """
    config = result.config
    each_alone = not has_server(config) or evaluates_once(config)  # every party reports its own evaluations
    names: list[str | None] = [party.name for party in parties] if each_alone else [None]
    by_party = [[entry for entry in telemetry.evaluations if entry.event.party == name] for name in names]
    per_client = each_alone and not find_method(config).one_party
    test, validation = (_score(by_party, split, per_client=per_client) for split in ("test", "validation"))
    if per_client and telemetry.propagated:
        found = [telemetry.propagated.get(party.name) for party in parties]
        test, validation = _add_propagation(found, test, validation)
    warm_start = _find_warm_start(config, telemetry.evaluations)
    if warm_start is not None and warm_start.selected == "ensemble":
        log.warning(
            "joint training did not help: on validation, no joint model is better than the ensemble of the models "
            "that the parties trained alone (the warm start). The ensemble is the selected model."
        )
    return RunReport(
        **collect_cost(telemetry, result.config),
        config=result.config,
        weights_sha256=result.weights_sha256,
        privacy=result.privacy,
        race=result.race,
        test=test,
        validation=validation,
        history=_list_history(by_party),
        losses=_average_losses(result.losses),
        parties=tuple(parties),
        overridden=overridden,
        notes=(*notes, *sorted(telemetry.warnings)),  # parties that train alone report in any order
        subsets=tuple(telemetry.subsets.values()) or None,
        warm_start=warm_start,
    )


def build_party_report(
    telemetry: Telemetry,
    result: TrainingResult,
    identity: Identity,
    metrics: Mapping[str, float],
    prepared: PreparedColumns,
) -> PartyReport:
    """Build the report of one party in a run between machines.

    Args:
        telemetry: the traffic, evaluations and seconds of the party.
        result: what the party knows at the end of the run.
        identity: the identity of the party.
        metrics: the metrics on the test split; empty at a party without labels.
        prepared: the preparation of the party's features.
    """
    party = identity.names[identity.index]
    own = party if evaluates_once(result.config) else None
    evaluations = [entry for entry in telemetry.evaluations if entry.event.party == own]
    reports = keeps_scores(result.config) and bool(evaluations)
    return PartyReport(
        **collect_cost(telemetry, result.config),
        config=result.config,
        weights_sha256=result.weights_sha256,
        privacy=result.privacy,
        race=result.race,
        party=party,
        parties=identity.names,
        run=identity.run.hex(),
        test=SplitScores(metrics) if metrics else None,
        prepared=prepared,
        validation=_score([evaluations], "validation", per_client=False) if reports else None,
        history=_list_history([evaluations]) if reports else None,
        losses=_average_losses(result.losses) if reports else None,
    )


def build_prediction_report(
    telemetry: Telemetry, parties: Sequence[str], present: Sequence[str], subsets: Iterable[SubsetScores]
) -> PredictionReport:
    """Build the part of prediction.json that is the same at the server and at the parties.

    Args:
        telemetry: the traffic and seconds of the role.
        parties: the parties of the training.
        present: the parties that made this prediction.
        subsets: the validation scores of subsets of the parties.
    """
    missing = tuple(name for name in parties if name not in present)
    scores = find_subset(subsets, present) if missing else None
    return PredictionReport(
        **collect_cost(telemetry),
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


def _find_warm_start(config: RunConfig, evaluations: Sequence[Evaluation]) -> WarmStart | None:
    """Return the result of the warm start; None if there was none."""
    events = [entry.event for entry in evaluations if entry.event.split == "validation"]
    ensemble = next((event.metrics for event in events if event.ensemble), None)
    if ensemble is None:
        return None
    selected = [event for event in events if event.improved][-1]
    return WarmStart(config.train.warm_start, "ensemble" if selected.ensemble else "joint", ensemble)


def _add_propagation(
    found: Sequence[Propagated | None], test: SplitScores, validation: SplitScores
) -> tuple[SplitScores, SplitScores]:
    """Add each party's scores of label propagation. `found` is None for a party without edges.

    For each party, also add whether propagation or the model has the better score on the validation nodes.
    """
    test, validation = (
        replace(scores, per_client_propagation=tuple(_find_first_metric(each, split) for each in found))
        for scores, split in ((test, "test"), (validation, "validation"))
    )
    better = tuple(
        None if score is None else "propagation" if each is not None and each.is_better else "model"
        for each, score in zip(found, validation.per_client or (), strict=True)
    )
    return test, replace(validation, per_client_better=better)


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


def _average_losses(losses: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean loss of every round. A party that has stopped no longer contributes."""
    longest = max(map(len, losses), default=0)
    return tuple(_average([own[index] for own in losses if index < len(own)]) for index in range(longest))


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _average_metrics(events: Sequence[Evaluated]) -> dict[str, float]:
    return {name: _average([event.metrics[name] for event in events]) for name in events[0].metrics}
