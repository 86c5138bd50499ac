"""Searches: the selection, the stored trials, and equal results after a kill and with several processes."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import multiprocessing
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy

import glasu
from glasu.cli.interrupts import handle_interrupts
from glasu.cli.main import main
from glasu.cli.search import parse_bytes
from glasu.config import RunConfig
from glasu.data.sources.catalog import load_parties
from glasu.errors import ConfigError, DataError, TrainingError
from glasu.experiments import search as searches
from glasu.experiments.space import apply_point
from glasu.experiments.trial import MARKS, Terms, run_trial
from glasu.experiments.workers import block_interrupts
from support.commands import assert_group_ends, start_in_group
from support.log_lines import on_log
from support.small import SMALL
from support.warm_process import WarmProcess

RUN = (
    SMALL
    + """\
aggregation_layers = [1]
[train]
patience = 0
num_rounds = 4
evaluate_every = 2
learning_rate = 0.02
"""
)
GRID = "[model]\nhidden = [4, 8]\naggregation_layers = [[1], [0, 1]]\n"
RANGES = """
[model]
dropout = {low = 0.0, high = 0.8, step = 0.1}
[train]
learning_rate = {low = 0.001, high = 0.1, log = true}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "grid.toml").write_text(GRID)
    (tmp_path / "ranges.toml").write_text(RANGES)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    def forget(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", forget)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", forget)


def search(run_file: Path, out: Path, **options: Any) -> searches.SearchResult:
    return searches.search(searches.SearchOptions(run_file=run_file, out=out, **options))


def rows(folder: Path) -> list[dict[str, str]]:
    """Return trials.csv without the seconds, which differ between searches."""
    with (folder / "trials.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command through its entry point, in this process."""
    out, errors, before = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    arguments = [str(word) for word in words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    signal.signal(signal.SIGTERM, before)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def test_best_toml_trains_to_the_score_of_the_best_trial(run_file, tmp_path):
    out = tmp_path / "out"
    words = ["--space", tmp_path / "ranges.toml", "--trials", "3", "--seeds", "2", "--set", "train.seed=5"]
    result = command("search", run_file, *words, "--out", out)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("compiling ")]  # once per machine
    assert [line.split(":")[0] for line in lines] == [
        f"trial {index} ({index + 1} of 3) complete" for index in range(3)
    ]
    assert str(out / "best.toml") in result.stdout
    best = max(float(row["validation"]) for row in rows(out))
    config = RunConfig.from_toml(out / "best.toml")
    reports = [
        glasu.train(load_parties(seeded), seeded)
        for seeded in (config.replace(train={"seed": seed}) for seed in (config.train.seed, config.train.seed + 1))
    ]
    assert sum(report.validation.accuracy for report in reports) / 2 == best
    written = tomllib.loads((out / "best.toml").read_text())
    assert written["train"]["seed"] == 5
    assert set(written["train"]) == {"preset", "patience", "num_rounds", "evaluate_every", "learning_rate", "seed"}
    assert "root" not in written["data"]
    header = (out / "best.toml").read_text().splitlines()[:3]
    for word in ("glasu search run.toml", "ranges.toml", "--trials 3", "--seeds 2", str(best), glasu.__version__):
        assert word in " ".join(header)
    assert result.stdout.count("\n") == 1


def test_the_first_trial_is_the_run_file_where_the_space_contains_it(run_file, tmp_path):
    found = search(run_file, tmp_path / "out", space=tmp_path / "ranges.toml", trials=1)
    assert found.point == {"model.dropout": 0.5, "train.learning_rate": 0.02}
    assert found.config == RunConfig.from_toml(run_file).replace(train={"preset": "none"})


def test_a_search_in_one_process_finds_the_same_again_even_if_it_was_killed_in_between(run_file, tmp_path):
    out, space = tmp_path / "out", tmp_path / "ranges.toml"
    log = tmp_path / "log"
    log.touch()
    words = ["search", run_file, "--space", space, "--trials", "1000", "--out", out]
    process = WarmProcess([str(word) for word in words], log)
    while log.read_text().count("complete: ") < 3:
        assert process.poll() is None, log.read_text()
        time.sleep(0.001)
    process.kill()
    process.wait()
    done, enough = len(rows(out)), 12  # ten random trials, then TPE's
    assert 3 <= done < enough
    seen = []
    with on_log(seen.append):
        found = search(run_file, out, space=space, trials=enough)
    assert [int(re.search(r"\((\d+) of 12\)", line)[1]) for line in seen] == list(range(done + 1, enough + 1))
    assert [trial.number for trial in found.trials] == list(range(enough))
    search(run_file, tmp_path / "unbroken", space=space, trials=enough)
    assert rows(out) == rows(tmp_path / "unbroken")
    assert (out / "best.toml").read_text() == (tmp_path / "unbroken" / "best.toml").read_text()
    with on_log(lambda line: pytest.fail("there are enough trials")):
        search(run_file, out, space=space, trials=2)


@pytest.mark.slow  # starts four processes
def test_a_grid_is_tried_once_at_every_point_though_one_of_two_processes_dies(run_file, tmp_path):
    out, space = tmp_path / "out", tmp_path / "space.toml"
    space.write_text(GRID.replace("4, 8", "4, 5, 6, 7, 8"))

    def kill_one(line: str) -> None:
        if "(2 of 10)" in line:  # early: each process has more trials
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    with (
        on_log(kill_one),
        pytest.raises(TrainingError, match=r"a process died; trial \d \(model.hidden=.* use fewer --jobs"),
    ):
        search(run_file, out, space=space, sampler="grid", jobs=2)
    assert multiprocessing.active_children() == []
    assert 2 <= len(rows(out)) < 10
    found = search(run_file, out, space=space, sampler="grid")
    points = Counter((row["model.hidden"], row["model.aggregation_layers"]) for row in rows(out))
    assert points == Counter({(width, layers): 1 for width in "45678" for layers in ("[1]", "[0, 1]")})
    assert [trial.number for trial in found.trials] == list(range(10))


def test_a_party_folder_that_cannot_be_read_is_named_by_a_search_in_processes(run_file, tmp_path):
    assert command("split", run_file, "--out", tmp_path / "parties", "--format", "csv").returncode == 0
    (tmp_path / "parties" / "b" / "party.toml").write_text("id = 3\n")
    overrides = [f"data.parties={json.dumps([str(tmp_path / 'parties' / name) for name in 'abc'])}", "data.name="]
    with pytest.raises(DataError, match=r"party\.toml: id=3: must be a string"):
        search(run_file, tmp_path / "out", overrides=overrides, space=tmp_path / "grid.toml", jobs=2)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at the blocked signals in /proc")
def test_ctrl_c_is_kept_from_every_process_also_from_the_first():
    code = """
import multiprocessing, pathlib, re, time
from glasu.experiments.workers import block_interrupts
for _ in range(2):
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    with block_interrupts():
        process.start()
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    print(int(re.search("SigBlk:\\\\s*(\\\\w+)", status)[1], 16) >> 1 & 1)
    process.terminate()
    process.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_arrives_at_the_end_of_the_block(number):
    reached = []

    def interrupt():
        with handle_interrupts():
            with block_interrupts():
                signal.raise_signal(number)
                reached.append("end of the block")
            reached.append("after the block")

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert reached == ["end of the block"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_not_lost_if_the_block_fails(number):
    def interrupt():
        with handle_interrupts(), block_interrupts():
            signal.raise_signal(number)
            raise RuntimeError("a worker ended")

    with pytest.raises(KeyboardInterrupt):
        interrupt()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow  # test_an_error_of_a_process_is_the_error_of_the_search also ends the processes of a search
def test_an_interrupted_search_leaves_no_process_and_a_study_to_go_on_with(run_file, tmp_path, sent, code):
    out, space = tmp_path / "out", tmp_path / "space.toml"
    space.write_text("[train]\nnum_rounds = [1, 100_000_000]\nweight_decay = [0.0]")
    process = start_in_group("search", run_file, "--space", space, "--sampler", "grid", "--jobs", "2", "--out", out)
    assert process.stderr is not None
    assert "num_rounds=1," in process.stderr.readline()
    assert_group_ends(process, sent, code)
    kept = rows(out)
    assert len(search(run_file, out, space=space, sampler="grid", trials=1).trials) == 1
    assert rows(out) == kept


def test_an_error_of_a_process_is_the_error_of_the_search(run_file, tmp_path):
    overrides, before = ["data.name=none_such"], {*multiprocessing.active_children()}
    with pytest.raises((DataError, ConfigError), match="none_such"):
        search(run_file, tmp_path / "out", overrides=overrides, space=tmp_path / "grid.toml", jobs=2)
    assert {*multiprocessing.active_children()} <= before
    search(run_file, tmp_path / "out", space=tmp_path / "grid.toml", trials=1)  # the corrected settings are accepted


def test_only_evaluations_within_the_budget_count(run_file, tmp_path):
    out, budget, seeds = tmp_path / "out", 30_000, (0, 1)
    overrides = ["train.num_rounds=7", "train.sampler=neighbor", "train.batch_size=6"]
    space = tmp_path / "bytes.toml"
    space.write_text("[model]\nhidden = [2, 8]\n[train]\nevaluate_every = [1, 2]")
    found = search(run_file, out, overrides=overrides, space=space, sampler="grid", seeds=2, max_bytes=budget)

    def histories(config: RunConfig) -> list[tuple[dict, ...]]:
        seeded = [config.replace(train={"seed": seed}) for seed in seeds]
        return [glasu.train(load_parties(each), each).history for each in seeded]

    rounds = set()
    for trial in found.trials:
        runs = histories(apply_point(RunConfig.from_toml(run_file, overrides), trial.point))
        fit = min(max(entry["round"] for entry in run if entry["bytes"] <= budget) for run in runs)
        bests = [max(entry["val_accuracy"] for entry in run if entry["round"] <= fit) for run in runs]
        assert (trial.outcome.state, trial.outcome.num_rounds, trial.outcome.score) == ("complete", fit, sum(bests) / 2)
        assert trial.outcome.bytes <= budget
        rounds.add(fit)
    assert len(rounds) > 1
    assert min(rounds) < 7
    best = histories(found.config)
    assert sum(max(entry["val_accuracy"] for entry in run) for run in best) / 2 == found.score
    assert all(run[-1]["bytes"] <= budget for run in best)


def test_a_budget_that_no_evaluation_fits_fails_every_trial(run_file, tmp_path):
    words = ["--space", tmp_path / "grid.toml", "--max-bytes", "1kB", "--trials", "2", "--quiet"]
    result = command("search", run_file, *words, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert "2 failed" in result.stderr
    assert "no evaluation within 1000 bytes" in result.stderr
    assert [row["state"] for row in rows(tmp_path / "out")] == ["failed", "failed"]
    assert not (tmp_path / "out" / "best.toml").exists()


def test_a_schedule_counts_only_where_all_its_rounds_fit(run_file):
    for schedule, state in (("constant", "complete"), ("cosine", "failed")):
        config = RunConfig.from_toml(run_file, [f"train.schedule={schedule}", "train.num_rounds=50"])
        outcome = run_trial(Terms(config, max_bytes=60_000), {})
        assert outcome.state == state
    assert "schedule" in outcome.note


def test_a_bad_trial_is_pruned_and_the_search_continues_after_divergence(run_file, tmp_path):
    space = tmp_path / "hopeless.toml"
    good = [0.02, 0.021, 0.022, 0.023, 0.024, 0.025, 0.026]
    space.write_text(f"[train]\nlearning_rate = {[*good, 1e-9, 2e-9, 3e-9, 4e-9, 1e30]}\nevaluate_every = [1]")
    found = search(run_file, tmp_path / "out", space=space, sampler="grid")
    states = {trial.point["train.learning_rate"]: trial.outcome.state for trial in found.trials}
    assert len(states) == 12
    assert "pruned" in [states[rate] for rate in (1e-9, 2e-9, 3e-9, 4e-9)]
    assert states[1e30] == "failed"
    assert "diverged" in next(row["note"] for row in rows(tmp_path / "out") if row["state"] == "failed")
    assert found.point["train.learning_rate"] in good


def test_test_labels_change_nothing(run_file):
    def load_permuted(config: RunConfig) -> list[glasu.PartyData]:
        parties = load_parties(config)
        for index, party in enumerate(parties):
            labels = party.labels.copy()
            labels[party.splits.test] = np.roll(labels[party.splits.test], 1)
            parties[index] = dataclasses.replace(party, labels=labels)
        return parties

    terms = Terms(RunConfig.from_toml(run_file), seeds=2)
    for rate in (0.001, 0.02, 0.1):
        point = {"train.learning_rate": rate}
        plain, other = (run_trial(terms, point, load=load, clock=lambda: 0.0) for load in (load_parties, load_permuted))
        assert plain == other


@pytest.mark.parametrize("method", ["glasu", "standalone", "ensemble", "smooth", "centralized", "simulated"])
@pytest.mark.parametrize("patience", [0, 1])
def test_a_trial_is_worth_the_validation_score_of_its_run(run_file, method, patience):
    overrides = [f"train.method={method}", f"train.patience={patience}", "train.num_rounds=8", "train.evaluate_every=1"]
    config = RunConfig.from_toml(run_file, overrides)
    outcome = run_trial(Terms(config), {})
    report = glasu.train(load_parties(config), config)
    assert outcome.score == pytest.approx(report.validation.accuracy, rel=1e-12)  # a mean, in the order of completion
    assert outcome.bytes <= report.traffic["bytes_to_server"] + report.traffic["bytes_to_clients"]
    if report.validation.round is not None:
        assert outcome.best_round == report.validation.round
    assert len(outcome.marks) == MARKS
    assert outcome.marks[-1] == outcome.score


def test_a_trial_in_which_only_the_label_owner_trains_alone_ends_with_it(run_file):
    config = RunConfig.from_toml(run_file, ["train.method=standalone", "train.labels=a", "train.num_rounds=8"])
    outcome = run_trial(Terms(config), {})
    assert outcome.state == "complete"
    assert outcome.score == glasu.train(load_parties(config), config).validation.accuracy


@pytest.mark.parametrize("method", ["glasu", "standalone"])
def test_a_trial_below_the_goal_of_a_mark_ends_there(run_file, method):
    config = RunConfig.from_toml(run_file, [f"train.method={method}", "train.num_rounds=10", "train.evaluate_every=1"])
    whole = run_trial(Terms(config, seeds=2), {})
    assert (whole.state, len(whole.marks)) == ("complete", 2 * MARKS)
    for mark in (2, MARKS + 4):
        pruned = run_trial(Terms(config, seeds=2), {}, {mark - 1: 0.0, mark: 1.1})
        assert pruned.state == "pruned"
        # Parties that train alone report in any order, so the last bit of a mean may differ.
        assert pruned.marks == pytest.approx(whole.marks[: mark + 1], rel=1e-12)


def test_paths_in_best_toml_are_relative_to_it_unless_the_user_gave_them_absolute(run_file, tmp_path):
    assert command("split", run_file, "--out", tmp_path / "parties", "--format", "csv").returncode == 0
    settings = RUN[RUN.index("[model]") :]
    (tmp_path / "folders.toml").write_text('[data]\nparties = ["parties/a", "parties/b", "parties/c"]\n' + settings)
    out = tmp_path / "deep" / "out"
    found = search(tmp_path / "folders.toml", out, space=tmp_path / "grid.toml", trials=1)
    assert str(tmp_path) not in (out / "best.toml").read_text()
    assert found.config.data == RunConfig.from_toml(tmp_path / "folders.toml").data
    absolute = [f"data.parties={json.dumps([str(tmp_path / 'parties' / name) for name in 'abc'])}"]
    found = search(
        tmp_path / "folders.toml", tmp_path / "2", overrides=absolute, space=tmp_path / "grid.toml", trials=1
    )
    assert tomllib.loads((tmp_path / "2" / "best.toml").read_text())["data"]["parties"] == list(
        found.config.data.parties
    )


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


def test_a_folder_belongs_to_one_search(run_file, tmp_path):
    out, space = tmp_path / "out", tmp_path / "grid.toml"
    words = ["search", run_file, "--space", space, "--trials", "1", "--quiet", "--out", out]
    assert command(*words).returncode == 0
    assert command(*words, "--jobs", "2").returncode == 0
    assert_refused(command(*words, "--seeds", "2"), "study.db", "seeds=1, not 2", "--out")
    assert_refused(command(*words, "--max-bytes", "1GB"), "max_bytes=None, not 1000000000")
    assert_refused(command(*words, "--sampler", "grid"), "sampler='tpe', not 'grid'")
    assert_refused(command(*words, "--set", "train.num_rounds=5"), "train.num_rounds=4, not 5")
    space.write_text(GRID.replace("4, 8", "4, 8, 16"))
    assert_refused(command(*words), "space model.hidden=[4, 8], not [4, 8, 16]")


def test_two_simultaneous_searches_in_one_folder_are_refused(run_file, tmp_path):
    def again(line: str) -> None:
        with pytest.raises(ConfigError, match="another command is using this folder"):
            search(run_file, tmp_path / "out", space=tmp_path / "grid.toml", trials=1)

    with on_log(again):
        search(run_file, tmp_path / "out", space=tmp_path / "grid.toml", trials=1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--sampler", "grid", "--space", "default"], ["--sampler grid", "ranges"]),
        (["--sampler", "bayes"], ["--sampler bayes", "tpe, grid, random"]),
        (["--space", "papr"], ["papr", "paper"]),
        (["--space", "bytes"], ["space bytes", "aggregation_layers=[3]", "0..1"]),
        (["--trials", "0"], ["--trials 0", "at least 1"]),
        (["--jobs", "0"], ["--jobs 0", "at least 1"]),
        (["--seeds", "-1"], ["--seeds -1", "at least 1"]),
        (["--max-bytes", "many"], ["--max-bytes", "'many'", "79MB"]),
        (["--max-bytes", "0"], ["--max-bytes 0", "at least 1"]),
        (["--set", "train.num_rounds=0"], ["num_rounds=0"]),
    ],
    ids=lambda item: " ".join(item),
)
def test_bad_arguments_are_one_line_and_exit_code_2(run_file, tmp_path, more, words):
    assert_refused(command("search", run_file, *more, "--out", tmp_path / "out"), *words)
    assert not (tmp_path / "out" / "study.db").exists()


def test_a_file_that_is_no_study_is_refused(run_file, tmp_path):
    (tmp_path / "study.db").write_text("something else")
    assert_refused(command("search", run_file, "--out", tmp_path), "study.db", "choose another --out")
    assert (tmp_path / "study.db").read_text() == "something else"


def test_without_optuna_the_way_out_is_named(run_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert_refused(
        command("search", run_file, "--out", tmp_path / "out"), "needs optuna", "pip install 'glasu[search]'"
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [("79MB", 79_000_000), ("79e6", 79_000_000), ("79000000", 79_000_000), ("1.5 gb", 1_500_000_000), ("2KiB", 2048)],
)
def test_bytes_may_be_written_in_several_ways(text, count):
    assert parse_bytes(text) == count
