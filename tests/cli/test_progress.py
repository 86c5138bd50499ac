"""The live line in a terminal counts the rounds of the candidate that runs."""

from __future__ import annotations

import contextlib
import io
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from glasu.cli.progress import show_progress
from glasu.config import TrainConfig
from glasu.model.task import make_task
from glasu.protocol.requests import CandidateStarted, Evaluated, RoundDone

SETTINGS = {"model.backbone": "sage"}


def last_count(text: str) -> str:
    """Return the last "rounds done / rounds" that the live line showed."""
    return re.findall(r"(\d+)/(\d+)", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))[-1]


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # standard error counts as a terminal
    monkeypatch.setenv("COLUMNS", "120")


def show(events, capsys):
    with show_progress("glasu", 100) as observe:
        for event in events:
            observe(event)
    return last_count(capsys.readouterr().err)


RACE = [CandidateStarted(SETTINGS, 30), *(RoundDone(index, 1.0) for index in range(30))]


def test_the_bar_has_the_rounds_of_a_candidate_during_a_race(capsys):
    assert show(RACE[:11], capsys) == ("10", "30")


def test_the_bar_starts_again_with_the_next_candidate(capsys):
    events = [*RACE, CandidateStarted(SETTINGS, 30), RoundDone(0, 1.0), RoundDone(1, 1.0)]
    assert show(events, capsys) == ("2", "30")


def test_the_bar_continues_with_a_preferred_candidate_that_wins(capsys):
    events = [*RACE, CandidateStarted(SETTINGS, 200, chosen=True, restarts=False, score=0.5), RoundDone(30, 1.0)]
    assert show(events, capsys) == ("31", "200")


def test_the_bar_starts_again_with_a_winner_that_starts_again(capsys):
    events = [*RACE, CandidateStarted(SETTINGS, 200, chosen=True, score=0.5), RoundDone(0, 1.0)]
    assert show(events, capsys) == ("1", "200")


def test_without_a_race_the_bar_has_the_rounds_of_the_run(capsys):
    assert show([RoundDone(0, 1.0)], capsys) == ("1", "100")


class SlowStream(io.StringIO):
    """A stream whose writer is interrupted by other threads after every write."""

    def write(self, text: str) -> int:
        written = super().write(text)
        time.sleep(0.001)
        return written


def test_lines_of_parties_that_train_at_the_same_time_stay_whole(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "")
    metric = make_task(TrainConfig()).selected_by
    events = [Evaluated(2, "validation", {metric.name: 0.5}, metric, party=name) for name in "abcd" * 5]
    with (
        contextlib.redirect_stderr(SlowStream()) as written,
        show_progress("alone", 3, about=["data"]) as observe,
        ThreadPoolExecutor(4) as threads,
    ):
        list(threads.map(observe, events))
    first, *lines = written.getvalue().splitlines()
    assert first == "data"
    assert sorted(lines) == sorted(f"alone: round 2: {name}: validation accuracy 50.0 %" for name in "abcd" * 5)
