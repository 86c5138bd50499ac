"""Train the baselines (cheap alternatives to joint training), choose their settings, and compare them with a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from glasu import registry
from glasu.config import RunConfig, list_candidates
from glasu.data.methods import override_settings
from glasu.data.party import PartyData
from glasu.data.presets import list_chosen
from glasu.errors import ConfigError, GlasuError
from glasu.model.task import make_task
from glasu.protocol.client import Client
from glasu.report import Baseline, RaceSummary, RunReport, find_best_party
from glasu.runtime.simulation import SimulationOptions, simulate

log = logging.getLogger(__name__)


def list_settings(config: RunConfig, race: RaceSummary | None) -> list[RunConfig]:
    """Return the settings that the baselines of a run try: one without a preset, and one for every candidate.

    For the run, the preset chooses among candidates, which are sets of settings. For a fair comparison, each baseline
    also chooses among them: it uses the settings with its best score on the validation nodes.

    Args:
        config: the requested settings of the run.
        race: the candidates that fitted the data; None if there was only one candidate.
    """
    candidates = list_candidates(config)
    fitting = None if race is None else [each.settings for each in race.candidates]
    found = [
        each for index, each in enumerate(candidates) if fitting is None or list_chosen(candidates, index) in fitting
    ]
    return [each.replace(train={"preset": "none"}) for each in (config, *found)]


def train_baselines(
    settings: Sequence[RunConfig], load: Callable[[RunConfig], Sequence[PartyData]]
) -> dict[str, Baseline]:
    """Return the results of every baseline, by method. A baseline uses its best settings on the validation nodes.

    Args:
        settings: the settings to try. If several of them have the same effect on parties that train alone, only the
            first is tried.
        load: takes settings and returns the parties.
    """
    methods = list(registry.select("method", is_baseline=True))
    tried: dict[RunConfig, RunConfig] = {}  # settings that parties use when they train alone -> given settings
    for config in settings:
        tried.setdefault(_find_own_settings(config, methods[0]), config)
    found: dict[str, Baseline] = {}
    for index, config in enumerate(tried.values()):
        chosen = list_chosen(list(tried), index) or None
        for method, baseline in _train_with(config, methods, load).items():
            if method not in found or _find_score(config, baseline) > _find_score(config, found[method]):
                found[method] = replace(baseline, settings=chosen if baseline.test is not None else None)
    return found


def _find_own_settings(config: RunConfig, method: str) -> RunConfig:
    """Return the settings that a method uses, or `config` unchanged if the method refuses it."""
    try:
        return override_settings(config.replace(train={"method": method}))[0]
    except ConfigError:
        return config


def _train_with(
    config: RunConfig, methods: Sequence[str], load: Callable[[RunConfig], Sequence[PartyData]]
) -> dict[str, Baseline]:
    """Return the results of the baselines with `config`. The parties train once; all baselines use the same weights."""
    found: dict[str, Baseline] = {}
    trained: tuple[Client, ...] = ()
    for method in methods:
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


def _find_score(config: RunConfig, baseline: Baseline) -> float:
    """Return the validation score by which the settings of a baseline are chosen."""
    if baseline.validation is None:
        return -math.inf
    return make_task(config.train).selection_score(baseline.validation.metrics)


def compare_baselines(report: RunReport, baselines: Mapping[str, Baseline]) -> str:
    """Return one line with the scores and bytes of the run and of each baseline, and the differences in score.

    If several settings were tried, the line names the settings of each baseline.
    """
    metric, method = make_task(report.config.train).selected_by, report.config.train.method
    own = report.test.metrics[metric.name]
    possible = {name: each for name, each in baselines.items() if each.test is not None}
    parts, scores = [], {name: _find_score(report.config, each) for name, each in possible.items()}
    for name, each in baselines.items():
        if each.test is None:
            parts.append(f"{name} not possible")
            continue
        score = each.test.metrics[metric.name]
        notes = [f"{method} {metric.format_difference(own, score)}"]
        notes += [f"{each.bytes / 1e6:.2f} MB"] if each.bytes else []
        if name == next(iter(possible)) and (party := find_best_party(report, each)) is not None:
            first = make_task(report.config.train).metrics[0]
            who = f"party {party.party}" if party.by == "model" else f"party {party.party} by {party.by}"
            notes.append(f"{who}, the best on validation: {first.title} {first.format(party.test)}")
            if first.name == metric.name:  # otherwise the scores cannot be compared
                scores[who] = party.validation
        parts.append(f"{name} {metric.format(score)} ({'; '.join(notes)})")
    line = f"{method} {metric.format(own)} ({report.traffic.total_bytes / 1e6:.1f} MB)"
    line += f"; baselines: {', '.join(parts)}"
    if not possible:
        return line

    best = max(scores, key=lambda name: scores[name])
    return f"{line}; {best} is the best of them on validation{_describe_settings(possible)}"


def _describe_settings(baselines: Mapping[str, Baseline]) -> str:
    """Describe the settings that were chosen for each baseline; return an empty string if there was no choice."""
    names: dict[str, list[str]] = {}  # settings -> methods
    for name, each in baselines.items():
        if each.settings is not None:
            names.setdefault(", ".join(f"{key}={value}" for key, value in each.settings.items()), []).append(name)
    if not names:
        return ""
    return "; settings, chosen on validation: " + "; ".join(f"{', '.join(own)}: {text}" for text, own in names.items())
