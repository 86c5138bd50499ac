"""`glasu train --baselines`: the alternatives are trained with the settings of the run and compared in one line."""

from __future__ import annotations

import json
import re

import pytest

from glasu.cli.main import main
from glasu.config import TrainConfig
from glasu.model.task import ACCURACY, Metric
from glasu.report import Baseline, SplitScores
from glasu.runtime.baselines import compare_baselines, list_settings, train_baselines
from support.races import CASES, GOOD, race
from support.small import SMALL
from support.tiny import settings, simulate, tiny_parties

BASELINES = ["standalone", "ensemble", "smooth"]
KEYS = {"num_rounds": 4, "evaluate_every": 2, "optimizer": "adam", "learning_rate": 0.05}


def test_the_baselines_are_the_runs_of_their_methods():
    parties = tiny_parties()
    found = train_baselines([settings(**KEYS, aggregation_layers=(1, 3))], lambda config: parties)
    assert list(found) == BASELINES
    for method, baseline in found.items():
        report = simulate(parties, settings(**KEYS, method=method)).report
        assert (baseline.test, baseline.validation) == (report.test, report.validation)
        assert (baseline.bytes, baseline.exchanges) == (report.traffic.total_bytes, report.traffic.exchanges)


def test_with_labels_at_one_party_only_the_ensemble_is_impossible():
    parties = tiny_parties(owner="b")
    config = settings(**KEYS, labels="b")
    found = train_baselines([config], lambda config: parties)
    assert [name for name, baseline in found.items() if baseline.test is not None] == ["standalone", "smooth"]
    assert "needs labels at every party" in found["ensemble"].refused
    line = compare_baselines(simulate(parties, config).report, found)
    assert re.search(
        r"standalone [\d.]+ % .*party b.*, the best on validation: accuracy .*, ensemble not possible, smooth", line
    )


def test_the_line_compares_with_every_baseline_and_names_the_best_on_validation():
    report = simulate(tiny_parties(), settings(**KEYS)).report

    def scores(accuracy: float, **alone) -> SplitScores:
        return SplitScores({"accuracy": accuracy}, **alone)

    own = (0.4, 0.6, 0.5)
    found = {
        "standalone": Baseline(
            test=scores(0.5, per_client=own, per_client_propagation=(0.7, None, 0.1)),
            validation=scores(0.5, per_client=own, per_client_propagation=(0.8, None, 0.1)),
        ),
        "ensemble": Baseline(test=scores(0.9), validation=scores(0.7), bytes=300_000),
        "smooth": Baseline(test=scores(0.6), validation=scores(0.8), bytes=700_000),
    }
    line = compare_baselines(report, found)
    shown = round(100 * report.test.accuracy, 1)
    gains = [f"glasu {shown - score:+.1f} points" for score in (50.0, 90.0, 60.0)]
    assert line.endswith(
        f"; baselines: standalone 50.0 % ({gains[0]}; party a by label propagation, the best on validation: accuracy "
        f"70.0 %), ensemble 90.0 % ({gains[1]}; 0.30 MB), smooth 60.0 % ({gains[2]}; 0.70 MB); "
        "smooth is the best of them on validation"
    )


def test_the_best_of_the_baselines_can_be_one_party_by_label_propagation():
    report = simulate(tiny_parties(), settings(**KEYS)).report

    def scores(accuracy: float, **alone) -> SplitScores:
        return SplitScores({"accuracy": accuracy}, per_client=(0.5, None, None), **alone)

    alone = scores(0.5, per_client_propagation=(0.9, None, None))
    found = {
        "standalone": Baseline(test=alone, validation=alone),
        "smooth": Baseline(test=alone, validation=scores(0.8)),
    }
    assert compare_baselines(report, found).endswith("; party a by label propagation is the best of them on validation")


def test_a_difference_is_that_of_the_shown_numbers():
    assert ACCURACY.format_difference(0.28649, 0.27651) == "+0.9 points"  # 28.6 and 27.7; without rounding 0.998
    assert ACCURACY.format_difference(0.5, float("nan")) == "-"
    assert Metric("r2", "R2", is_share=False).format_difference(0.71, 0.65) == "+0.06"


@pytest.mark.parametrize("asked", [False, True])
def test_the_command_stores_the_baselines_and_ends_with_the_line(asked, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(SMALL + "aggregation_layers = [0, 1]\n[train]\nnum_rounds = 3\n")
    words = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*words, *(["--baselines"] if asked else [])]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    last = capsys.readouterr().out.splitlines()[-1]
    if not asked:
        assert report["baselines"] == {}
        assert last.startswith("glasu: test accuracy")
        return
    assert list(report["baselines"]) == BASELINES
    assert report["baselines"]["ensemble"]["bytes"] > 0 == report["baselines"]["standalone"]["bytes"]
    assert re.match(r"glasu .*; baselines: standalone [\d.]+ % .*, ensemble .*, smooth .* on validation$", last)


@pytest.mark.parametrize(("preset", "rounds"), [("one-candidate", 20), ("the-preferred-one-wins", 3)])
def test_the_baselines_choose_between_the_only_candidate_of_a_preset_and_the_settings_without_it(
    preset, rounds, tmp_path
):
    """A preset with one candidate, and a run that is too short for a race, so that the rules decide."""

    def train(name: str, keys: str, *options: str) -> dict:
        settings = f"aggregation_layers = [0, 1]\n[train]\nnum_rounds = {rounds}\n{keys}\n"
        (tmp_path / f"{name}.toml").write_text(SMALL + settings)
        words = ["train", str(tmp_path / f"{name}.toml"), "--out", str(tmp_path / name), "--quiet", *options]
        assert main(words) == 0
        return json.loads((tmp_path / name / "report.json").read_text())

    found = train("preset", f'preset = "{preset}"', "--baselines")
    assert found["config"]["train"]["learning_rate"] == GOOD
    alone = [
        train(f"alone at {rate}", f'preset = "none"\nlearning_rate = {rate}\nmethod = "standalone"')
        for rate in (TrainConfig.learning_rate, GOOD)
    ]
    best = max(alone, key=lambda each: each["validation"]["accuracy"])
    assert found["baselines"]["standalone"]["test"] == best["test"]
    rate = best["config"]["train"]["learning_rate"]
    assert found["baselines"]["standalone"]["settings"] == {"train.learning_rate": rate}


@pytest.mark.parametrize("name", ["another one wins", "the preferred one wins"])
def test_after_a_race_each_baseline_has_the_best_of_all_settings_on_validation(name):
    config, parties = race(name, labels="b")
    report = simulate(parties, config).report
    tried = list_settings(config, report.race)
    rates = [each.train.learning_rate for each in tried]
    assert sorted(rates[1:]) == sorted(CASES[name])
    assert rates[0] == TrainConfig.learning_rate
    found = train_baselines(tried, lambda config: parties)
    for method in ("standalone", "smooth"):
        own = [simulate(parties, each.replace(train={"method": method})).report for each in tried]
        best = max(own, key=lambda each: each.validation.accuracy)
        assert (found[method].test, found[method].validation) == (best.test, best.validation)
        assert found[method].settings == {"train.learning_rate": best.config.train.learning_rate}
    assert "needs labels at every party" in found["ensemble"].refused
    line = compare_baselines(report, found)
    chosen = [found[method].settings["train.learning_rate"] for method in ("standalone", "smooth")]
    assert line.partition("; settings, chosen on validation: ")[2] == (
        f"standalone, smooth: train.learning_rate={chosen[0]}"
        if chosen[0] == chosen[1]
        else f"standalone: train.learning_rate={chosen[0]}; smooth: train.learning_rate={chosen[1]}"
    )


def test_settings_that_differ_only_for_joint_training_are_tried_once():
    parties = tiny_parties()
    exact, local = (settings(**KEYS, backward=kind, aggregation_layers=(1, 3)) for kind in ("joint", "local"))
    found = train_baselines([exact, local], lambda config: parties)
    assert [each.settings for each in found.values()] == [None, None, None]
