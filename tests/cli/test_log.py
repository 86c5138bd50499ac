"""A role's log: lines for people, or one JSON object per line for programs."""

from __future__ import annotations

import argparse
import json
import math
from datetime import UTC, datetime

import pytest

from glasu.cli.interrupts import Terminated
from glasu.cli.log import Log
from glasu.cli.main import main
from glasu.cli.progress import show_progress
from glasu.model.task import ACCURACY
from glasu.network.options import Status
from glasu.protocol.requests import Evaluated, Evaluating, Event, RoundDone
from support.commands import glasu, replace_run

STATUS = Status(
    round=2, num_rounds=9, attempt=1, loss=0.5, bytes_to_server=1_000_000, bytes_to_clients=2_500_000, seconds=3.25
)
EVALUATED = Evaluated(2, "validation", {"accuracy": 0.75, "macro_f1": math.nan}, ACCURACY, 0.5, True)


def log(role="a", *, log_format="text", quiet=False, **more):
    args = argparse.Namespace(command="join", log_format=log_format, quiet=quiet)
    return Log(args, role, now=lambda: datetime(2026, 1, 2, 3, 4, 5, 678900, UTC), **more)


def test_people_read_lines(capsys):
    writer = log()
    writer.write_notice("connected to the server.")
    writer.observe(STATUS)
    writer.observe(EVALUATED)
    writer.observe(RoundDone(1))  # has a status line
    assert capsys.readouterr().err.splitlines() == [
        "glasu join: connected to the server.",
        "glasu join: a: round 2/9 done, loss 0.500, 1.00 MB to the server, 2.50 MB back, 3.2 s",
        "glasu join: round 2: loss 0.500, validation accuracy 75.0 %",
    ]


def test_programs_read_one_object_per_line(capsys):
    writer = log(log_format="json")
    writer.write_notice('say "hello"\nto all')
    writer.observe(STATUS)
    writer.observe(EVALUATED)
    notice, status, evaluated = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    common = {"time": "2026-01-02T03:04:05.678Z", "command": "join", "role": "a"}
    assert notice == {**common, "event": "notice", "message": 'say "hello"\nto all'}
    assert status == {
        **common,
        "event": "round",
        "round": 2,
        "num_rounds": 9,
        "attempt": 1,
        "loss": 0.5,
        "bytes_to_server": 1_000_000,
        "bytes_to_clients": 2_500_000,
        "seconds": 3.25,
    }
    assert evaluated["metrics"] == {"accuracy": 0.75, "macro_f1": None}  # JSON knows no NaN


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_quiet_role_shows_no_progress_but_what_happens(log_format, capsys):
    writer = log(log_format=log_format, quiet=True)
    writer.observe(STATUS)
    writer.observe(EVALUATED)
    assert capsys.readouterr().err == ""
    writer.write_notice("b: the connection ended.")
    assert "b: the connection ended." in capsys.readouterr().err


def test_a_long_evaluation_is_reported_from_time_to_time(capsys):
    now = [0.0]
    writer = log(clock=lambda: now[0])
    writer.observe(Evaluating(2, 0.25, "a"))
    assert capsys.readouterr().err == ""
    now[0] = 31.0
    writer.observe(Evaluating(2, 0.5, "a"))
    assert "a: evaluating, 50 % done" in capsys.readouterr().err


def test_programs_read_at_the_end_where_the_results_are(capsys, tmp_path):
    (tmp_path / "report.json").write_text('{"weights_sha256": ["00"], "test": {}}')
    (tmp_path / "prediction.json").write_text("{}")
    log().write_finished(tmp_path / "report.json")
    assert capsys.readouterr().err == ""  # the summary is printed for people only
    log(log_format="json").write_finished(tmp_path / "report.json")
    log(log_format="json").write_finished(tmp_path / "prediction.json", predictions=None)
    training, prediction = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (training["event"], training["report"]) == ("finished", str(tmp_path / "report.json"))
    assert training["weights_sha256"] == ["00"]
    assert prediction["predictions"] is None


@pytest.mark.parametrize(("kind", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_an_intentional_stop_is_no_error_to_programs(kind, code, tmp_path):
    def stop(args):
        raise kind

    words = ["serve", "run.toml", "--listen", "x:1", "--kit", "k", "--out", str(tmp_path), "--log-format", "json"]
    result = glasu(*words, commands=replace_run("serve", stop))
    assert result.returncode == code
    told = json.loads(result.stderr)
    assert (told["event"], told["exit_code"]) == ("interrupted", code)


def test_the_reason_of_an_end_is_json_too_where_the_log_is(tmp_path, capsys):
    words = ["serve", str(tmp_path / "none.toml"), "--listen", "x:1", "--kit", "k", "--out", str(tmp_path / "out")]
    assert main([*words, "--log-format", "json"]) == 2
    told = json.loads(capsys.readouterr().err)
    assert (told["event"], told["exit_code"], told["command"]) == ("error", 2, "serve")
    assert "none.toml" in told["message"]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("glasu serve: ")


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_the_progress_of_a_run_ignores_events_of_other_kinds(terminal, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)  # rich then takes the stream for a terminal, or not
    with show_progress("glasu", 9) as observe:
        for event in (Event(), EVALUATED, Event()):
            observe(event)
    assert "validation accuracy 75.0 %" in capsys.readouterr().err
