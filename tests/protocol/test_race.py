"""A race ends with the weights that the winner's settings give without a race, wherever it runs or is interrupted."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import numpy as np
import pytest

from glasu.config import list_candidates
from glasu.errors import ProtocolError, TrainingError
from glasu.protocol.messages import Candidates, PartySituation
from glasu.protocol.requests import CandidateStarted, RoundDone
from glasu.protocol.state import Race
from glasu.runtime.simulation import make_clients, prepare_run
from glasu.wire.message_key import SERVER, TO_ONE
from support.kits import simulate_with_secrets
from support.races import CASES, GOOD, TOO_LARGE, USELESS, WINNERS, find_candidate, race
from support.tiny import assert_same_end, simulate


class CrashError(Exception):
    pass


@pytest.mark.parametrize("name", CASES)
def test_a_race_ends_with_the_weights_of_a_run_with_the_winners_settings(name):
    config, parties = race(name)
    raced, best = simulate(parties, config).report, WINNERS[name]
    direct = simulate(parties, find_candidate(config, best)).report
    assert_same_end(raced, direct)
    assert raced.config.train.learning_rate == best
    assert [each.chosen for each in raced.race.candidates].count(True) == 1
    assert raced.traffic.total_bytes > direct.traffic.total_bytes
    assert raced.traffic.by_phase["control"] > 0


@pytest.mark.parametrize("keys", [{"warm_start": 6}, {"num_local_steps": 3}, {"optimizer": "sgd"}], ids=str)
def test_a_key_that_no_candidate_fixes_applies_to_all_candidates_of_a_race(keys):
    config, parties = race("another one wins", **keys)
    report = simulate(parties, config).report
    assert len(report.race.candidates) == 2
    assert {key: getattr(report.config.train, key) for key in keys} == keys
    assert_same_end(report, simulate(parties, find_candidate(config, report.config.train.learning_rate)).report)


def test_with_error_feedback_the_rules_choose_and_one_line_says_so(caplog):
    config, parties = race("another one wins", feedback=True)
    with caplog.at_level(logging.INFO, "glasu.runtime.telemetry"):
        report = simulate(parties, config).report
    (line,) = [line for line in caplog.messages if "the preset chose" in line]
    assert "by rules, without a race: with wire.feedback = true" in line
    assert (report.race.rounds, [each.chosen for each in report.race.candidates]) == (0, [True])
    assert_same_end(report, simulate(parties, find_candidate(config, USELESS)).report)


@pytest.mark.parametrize("name", ["the preferred one starts warm and wins", "both start warm"])
def test_a_warm_winner_of_parties_with_secrets_has_the_weights_of_a_run_without_a_race(name):
    config, parties = race(name)
    raced = simulate_with_secrets(parties, config).report
    assert raced.config.train.warm_start
    assert_same_end(raced, simulate_with_secrets(parties, find_candidate(config, WINNERS[name])).report)


def test_the_scores_of_all_candidates_are_in_the_report():
    config, parties = race("another one wins")
    summary = simulate(parties, config).report.race
    assert [each.settings["train.learning_rate"] for each in summary.candidates] == [USELESS, GOOD]
    assert [each.chosen for each in summary.candidates] == [False, True]
    assert summary.candidates[1].score > summary.candidates[0].score
    assert summary.rounds == 4


def test_the_cost_of_a_race_ends_with_the_choice():
    config, parties = race("another one wins", num_rounds=10)
    seen: list = []

    def observe(event):
        if isinstance(event, RoundDone):
            seen.append(event.bytes)
        elif isinstance(event, CandidateStarted):
            seen.append(event.chosen)

    report = simulate(parties, config, observer=observe).report
    (choice,) = [place for place, each in enumerate(seen) if each is True]
    assert seen[choice - 1] < report.race.bytes < seen[choice + 1] < report.traffic.total_bytes
    assert 0 < report.race.exchanges < report.traffic.exchanges


@pytest.mark.parametrize("keys", [{}, {"feedback": True}, {"labels": "b"}], ids=str)
def test_the_choice_is_printed_with_the_bytes_and_the_releases_of_the_race(keys, caplog):
    config, parties = race("another one wins", **keys)
    with caplog.at_level(logging.INFO, "glasu.runtime.telemetry"):
        summary = simulate(parties, config).report.race
    (line,) = [line for line in caplog.messages if "the preset chose" in line]
    total = sum(summary.releases.values())
    assert line.endswith(f"; {summary.bytes / 1e6:.1f} MB and {total} releases so far.")
    assert summary.releases.keys() == {"a", "b", "c"}
    if "feedback" in keys:  # the rules choose after the parties have described their data
        assert summary.releases == {"a": 1, "b": 1, "c": 1}


def test_every_release_until_the_choice_counts_for_the_race():
    config, parties = race("another one wins", num_rounds=9, evaluate_every=3)  # a race of two times three rounds
    summary = simulate(parties, config).report.race
    # A round releases one representation per aggregation layer, and the losses. An evaluation releases these
    # representations, the class probabilities and the metrics. One candidate has one aggregation layer, the other two.
    situation, by_candidate = 1, [3 * (layers + 1) + layers + 2 for layers in (1, 2)]
    assert summary.rounds == 3
    assert summary.releases == dict.fromkeys("abc", situation + sum(by_candidate))


ELSEWHERE = [
    {},
    {"precision": "int8", "evaluate_every": 1},
    {"backward": "joint", "num_local_steps": 1, "optimizer": "sgd"},
    {"labels": "b", "sampler": "neighbor", "fanout": 2, "batch_size": 6, "prefetch": 3},
    {"labels": "b", "backward": "joint", "precision": "bf16"},
]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *(("the preferred one diverges", keys) for keys in ELSEWHERE),
        *(("another one diverges", keys) for keys in ELSEWHERE[::3]),
    ],
    ids=str,
)
def test_a_candidate_that_diverges_loses_the_race(name, keys):
    config, parties = race(name, **keys)
    report = simulate(parties, config).report
    assert report.config.train.learning_rate == GOOD
    by_rate = {each.settings["train.learning_rate"]: each for each in report.race.candidates}
    assert (by_rate[TOO_LARGE].diverged, by_rate[TOO_LARGE].score) == (True, None)
    assert by_rate[GOOD].diverged is None
    assert by_rate[GOOD].score is not None
    if config.wire.precision != "int8":  # rounding is drawn from the number of the message
        assert_same_end(report, simulate(parties, find_candidate(config, GOOD)).report)


@pytest.mark.parametrize("keys", ELSEWHERE[:3], ids=str)
def test_a_race_in_which_all_candidates_diverge_fails_and_names_the_keys_to_set(keys):
    config, parties = race("all diverge", **keys)
    with pytest.raises(TrainingError, match=r'all candidates.*train\.learning_rate yourself.*preset = "none"'):
        simulate(parties, config)


def test_a_training_that_diverges_after_the_race_fails():
    config, parties = race("another one diverges")
    with pytest.raises(TrainingError, match="diverged"):
        simulate(parties, find_candidate(config, TOO_LARGE))


STOPPING = {"patience": 1, "evaluate_every": 1, "num_rounds": 12}  # candidates stop within the race


@pytest.mark.parametrize("step", [97, pytest.param(7, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("another one wins", {}),
        ("the second of three wins", {}),
        ("another one wins", {"warm_start": 3}),
        ("another one wins", {"feedback": True}),
        ("another one wins", STOPPING),
        ("the preferred one diverges", {}),
        ("another one diverges", STOPPING),
        ("the preferred one starts warm and wins", {}),
        ("the preferred one starts warm and loses", {}),
    ],
)
def test_a_race_that_is_interrupted_at_some_message_ends_with_the_same_result(name, keys, step, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda handle: None)  # no test here cuts the power of the machine
    config, parties = race(name, **keys)
    carried: list = []

    def count(message):
        carried.append(message)
        return message

    whole = simulate_with_secrets(parties, config, carry=count).report
    for number in range(3, len(carried), step):
        left = [number]

        def crash(message, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise CrashError
            return message

        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(CrashError):
            simulate_with_secrets(parties, config, carry=crash, checkpoints=folder)
        resumed = simulate_with_secrets(parties, config, checkpoints=folder).report
        assert_same_end(resumed, whole)
        free = {"bytes": 0, "exchanges": 0, "releases": None}  # repeated rounds count
        assert replace(resumed.race, **free) == replace(whole.race, **free)
        assert resumed.race.bytes >= whole.race.bytes


@pytest.mark.parametrize("name", [name for name in CASES if "warm" in name])
def test_no_two_messages_of_a_race_with_a_warm_start_have_the_same_key(name):
    config, parties = race(name, evaluate_every=1)
    keys: list = []

    def remember(message):
        if message.key.client < TO_ONE:  # answers are carried once for each client
            keys.append((type(message).__name__, message.key))
        return message

    simulate(parties, config, carry=remember)
    assert len(set(keys)) == len(keys)


def test_a_resumed_race_names_the_candidate_and_its_rounds(tmp_path, caplog):
    config, parties = race("another one wins")
    seen: list = []

    def crash(event):
        seen.append(isinstance(event, CandidateStarted))
        if sum(seen) == 2 and isinstance(event, RoundDone) and event.round == 2:
            raise CrashError

    with pytest.raises(CrashError):
        simulate(parties, config, checkpoints=tmp_path, observer=crash)
    with caplog.at_level(logging.INFO, "glasu.runtime.simulation_checkpoints"):
        simulate(parties, config, checkpoints=tmp_path)
    (line,) = [line for line in caplog.messages if line.startswith("resuming")]
    assert re.fullmatch(r"resuming after round [23] of 4 of candidate 2 of 2 in the race\.", line)


def test_a_client_that_returns_to_the_start_has_the_settings_and_weights_of_the_start():
    config, parties = race("another one wins")
    (client, *_) = make_clients(prepare_run(config, parties).config, parties)
    first = client.state()
    preferred, other = list_candidates(client.requested)
    client.progress.race = Race((0, 1))
    client.adopt_candidate()
    assert client.config == other
    client.restore(first)
    assert (client.config, client.progress.race) == (preferred, None)
    assert client.learner.config == preferred


@pytest.mark.parametrize("winners", [[0.0, 1.0], [2.0], []])
def test_a_winner_that_was_not_in_the_race_is_refused(winners):
    config, parties = race("the second of three wins")
    seen: list = []

    def carry(message):
        if isinstance(message, Candidates) and message.key.client == SERVER:
            seen.append(message)
            if len(seen) <= len(parties):
                return Candidates(message.key, np.array([0.0, 1.0]))
            return Candidates(message.key, np.array(winners))
        return message

    with pytest.raises(ProtocolError):
        simulate(parties, config, carry=carry)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [2.0], [-1.0], [0.5], [float("nan")]])
def test_positions_that_no_candidate_has_are_refused(values):
    config, parties = race("another one wins")

    def carry(message):
        return Candidates(message.key, np.array(values)) if isinstance(message, Candidates) else message

    with pytest.raises(ProtocolError, match="positions of candidates"):
        simulate(parties, config, carry=carry)


def test_a_description_that_is_none_is_refused_and_names_the_party():
    config, parties = race("another one wins")

    def carry(message):
        if isinstance(message, PartySituation) and message.key.client == 1:
            return PartySituation(message.key, np.array([1.0, 1.0, 9.0]))
        return message

    with pytest.raises(ProtocolError, match=r"party 'b'.*description of its data"):
        simulate(parties, config, carry=carry)
