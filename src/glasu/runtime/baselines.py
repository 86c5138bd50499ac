"""Train the cheap alternatives to joint training with the settings of a run, and compare them with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from glasu import registry
from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.errors import GlasuError
from glasu.model.task import make_task
from glasu.protocol.client import Client
from glasu.report import Baseline, RunReport, list_alone
from glasu.runtime.simulation import SimulationOptions, simulate

log = logging.getLogger(__name__)


def train_baselines(config: RunConfig, load: Callable[[RunConfig], Sequence[PartyData]]) -> dict[str, Baseline]:
    """Return the results of every baseline, by method. The parties train once; all baselines use the same weights.

    Args:
        config: the settings of the run, as requested.
        load: returns the parties, given settings.
    """
    found: dict[str, Baseline] = {}
    trained: tuple[Client, ...] = ()
    for method in registry.select("method", is_baseline=True):
        try:
            asked = config.replace(train={"method": method})
            done = simulate(load(asked), asked, SimulationOptions(trained=trained))
        except GlasuError as error:  # for example: labels at one party, or no edges
            found[method] = Baseline(refused=str(error))
            log.info("%s: not possible: %s", method, error)
            continue
        found[method], trained = Baseline.of(done.report), done.clients
        log.info("%s", done.report.summary())
    return found


def compare_baselines(report: RunReport, baselines: Mapping[str, Baseline]) -> str:
    """Return one line: scores and bytes of the run and of the baselines, and the difference to each baseline."""
    metric, method = make_task(report.config.train).selected_by, report.config.train.method
    own = report.test.metrics[metric.name]
    possible = {name: each for name, each in baselines.items() if each.test is not None}
    parts = []
    for name, each in baselines.items():
        if each.test is None:
            parts.append(f"{name} not possible")
            continue
        score = each.test.metrics[metric.name]
        notes = [f"{method} {metric.format_difference(own, score)}"]
        notes += [f"{each.bytes / 1e6:.2f} MB"] if each.bytes else []
        notes += _describe_best_party(report, each) if name == next(iter(possible)) else []
        parts.append(f"{name} {metric.format(score)} ({'; '.join(notes)})")
    line = f"{method} {metric.format(own)} ({report.traffic.total_bytes / 1e6:.1f} MB)"
    line += f"; baselines: {', '.join(parts)}"
    if not possible:
        return line

    def validation(name: str) -> float:
        scores = possible[name].validation
        return scores.metrics[metric.name] if scores is not None else 0.0

    return f"{line}; {max(possible, key=validation)} is the best of them on validation"


def _describe_best_party(report: RunReport, alone: Baseline) -> list[str]:
    """Return the test score of the best party on validation, by its model or by label propagation."""
    metrics = make_task(report.config.train).metrics
    if alone.test is None or alone.validation is None:
        return []
    candidates = list_alone([party.name for party in report.parties], alone.validation, alone.test)
    if not candidates:
        return []
    best = max(candidates, key=lambda each: each.validation)
    who = best.party if best.by == "model" else f"{best.party} by {best.by}"
    return [f"party {who}, the best on validation: {metrics[0].title} {metrics[0].format(best.test)}"]
