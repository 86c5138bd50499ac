"""A simulation that is interrupted at any message and restarted ends with the same result."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glasu.config import RunConfig
from glasu.errors import CheckpointError, ConfigError, TrainingError
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Scores
from glasu.protocol.requests import WarmStepDone
from glasu.runtime.simulation import train
from support.kits import simulate_with_secrets
from support.tiny import settings, simulate, tiny_parties

ROUNDS = 3
CASES = {
    "full": {"sampler": "full"},
    "neighbor": {"sampler": "neighbor", "fanout": 1, "batch_size": 4, "prefetch": 3},
    "labels at one party": {"sampler": "neighbor", "fanout": 1, "batch_size": 4, "labels": "b"},
    "shared, labels at one party": {"sampler": "shared", "fanout": 1, "labels": "b", "aggregation": "concat"},
    "joint": {"backward": "joint", "num_local_steps": 1, "momentum": 0.9},
    "joint, several steps": {"backward": "joint", "labels": "b", "backbone": "gcnii"},
    "gcnii, every second round": {"backbone": "gcnii", "checkpoint_every": 2, "optimizer": "adam"},
    "changes of three bits": {"feedback": True, "feedback_bits": 3, "num_rounds": 5, "precision": "int8"},
    "one release": {"release": "once", "aggregation_layers": (1,), "backbone": "gcnii"},
    "one noisy release": {
        "release": "once",
        "aggregation_layers": (0,),
        "aggregation": "concat",
        "sampler": "neighbor",
        "dp_noise_multiplier": 1.0,
    },
    "noise in rounds": {"aggregation_layers": (3,), "dp_noise_multiplier": 0.5},
    "joint, two steps": {"backward": "joint", "num_local_steps": 2, "optimizer": "adam", "sampler": "neighbor"},
    "party dropout": {"party_dropout": 0.4, "optimizer": "adam", "num_rounds": 5},
    "stops early": {"stop_at": 0.01, "evaluate_every": 2},
    "warm start": {"warm_start": 3, "sampler": "neighbor", "fanout": 1, "batch_size": 4, "backbone": "gcnii"},
}


class CrashError(Exception):
    pass


@pytest.fixture(autouse=True)
def info(caplog):
    caplog.set_level("INFO", "glasu.runtime")


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Skip fsync: no test here cuts the power of the machine."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


def case(name) -> tuple[RunConfig, list]:
    keys = {
        "aggregation_layers": (1, 3),
        "num_local_steps": 2,
        "dropout": 0.5,
        "num_rounds": ROUNDS,
        "evaluate_every": 2,
        "prefetch": 2,
        "precision": "fp32",
        **CASES[name],
    }
    return settings(**keys), tiny_parties(owner=keys.get("labels"))


def crash_at(number: int):
    """Return a carrier that raises at its `number`-th message, and the list of carried messages."""
    carried: list = []

    def carry(message):
        if len(carried) == number:
            raise CrashError
        carried.append(message)
        return message

    return carry, carried


def outcome(report):
    """Return the results that must not depend on interruptions."""
    counted = ("bytes", "exchanges", "seconds")
    history = [{key: value for key, value in entry.to_dict().items() if key not in counted} for entry in report.history]
    return report.weights_sha256, report.test, report.validation, report.losses, history


@pytest.mark.parametrize("name", CASES)
def test_a_run_interrupted_at_any_message_ends_with_the_same_result(name, tmp_path, caplog):
    check_interruptions(name, tmp_path, caplog, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_interrupted_at_every_message_ends_with_the_same_result(name, tmp_path, caplog):
    check_interruptions(name, tmp_path, caplog, None)


def check_interruptions(name, tmp_path, caplog, places):
    """Interrupt a run at some or all of its messages, and compare its end with an uninterrupted run."""
    config, parties = case(name)
    carry, carried = crash_at(-1)
    unbroken = outcome(simulate(parties, config, carry=carry, workers=1).report)
    numbers = range(len(carried)) if places is None else np.linspace(0, len(carried) - 1, places).astype(int)
    for number in numbers:
        folder = tmp_path / str(number)
        with pytest.raises(CrashError):
            simulate(parties, config, carry=crash_at(number)[0], checkpoints=folder, workers=1)
        caplog.clear()
        again = simulate(parties, config, checkpoints=folder, workers=1).report
        assert outcome(again) == unbroken, f"broken at message {number}"
        assert len(caplog.messages) <= 1
    assert caplog.messages[0].startswith("resuming after round")


def test_a_run_may_be_broken_again_and_again(tmp_path):
    config, parties = case("neighbor")
    unbroken = outcome(simulate(parties, config).report)
    for attempt in itertools.count():  # noqa: B007
        try:
            report = simulate(parties, config, carry=crash_at(62)[0], checkpoints=tmp_path).report
        except CrashError:
            continue
        break
    assert attempt == 2
    assert outcome(report) == unbroken


def test_no_round_is_done_twice_but_the_one_that_broke(tmp_path):
    config, parties = case("full")
    carry, carried = crash_at(-1)
    simulate(parties, config, carry=carry)
    for number in range(0, len(carried), len(carried) // 4):
        first, second = crash_at(number), crash_at(-1)
        folder = tmp_path / str(number)
        with pytest.raises(CrashError):
            simulate(parties, config, carry=first[0], checkpoints=folder)
        simulate(parties, config, carry=second[0], checkpoints=folder)
        redone = {message.key.pack() for message in first[1]} & {message.key.pack() for message in second[1]}
        rounds = {message.key.round for message in first[1] if message.key.pack() in redone}
        assert len({round_index for round_index in rounds if round_index < ROUNDS}) <= 2  # and its evaluation
        assert len(second[1]) < len(carried) or number < len(carried) / ROUNDS


def test_traffic_counts_what_both_processes_sent(tmp_path):
    config, parties = case("full")
    carry, carried = crash_at(-1)
    simulate(parties, config, carry=carry)
    firsts = [index for index, message in enumerate(carried) if message.key.client == 0]  # nothing is under way then
    for number in firsts[:: len(firsts) // 4]:
        (carry, before), (going_on, after) = crash_at(number), crash_at(-1)
        folder = tmp_path / str(number)
        with pytest.raises(CrashError):
            simulate(parties, config, carry=carry, checkpoints=folder)
        traffic = simulate(parties, config, carry=going_on, checkpoints=folder).report.traffic
        sizes = sum(len(encode(message)) for message in [*before, *after])
        assert traffic["bytes_to_server"] + traffic["bytes_to_clients"] == sizes
        assert traffic["messages"] == len(before) + len(after)
        assert sum(traffic["by_phase"].values()) == sum(traffic["by_kind"].values()) == sizes


@pytest.mark.parametrize(("method", "labels"), [("standalone", "all"), ("standalone", "b"), ("centralized", "all")])
def test_parties_that_train_alone_go_on_too(method, labels, tmp_path):
    config = settings(num_rounds=6, evaluate_every=1, dropout=0.5, precision="fp32", patience=2, learning_rate=0.5)
    config = config.replace(train={"method": method, "labels": labels, "num_local_steps": 1})
    parties = tiny_parties()
    events = []
    unbroken = outcome(simulate(parties, config, observer=events.append, workers=1).report)
    for number in range(0, len(events), len(events) // 4):
        seen = itertools.count()

        def observe(event, seen=seen, number=number):
            if next(seen) == number:
                raise CrashError

        folder = tmp_path / str(number)
        with pytest.raises(CrashError):
            simulate(parties, config, observer=observe, checkpoints=folder, workers=1)
        assert outcome(simulate(parties, config, checkpoints=folder, workers=1).report) == unbroken


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_run_killed_in_its_warm_start_resumes_from_its_last_warm_step(optimizer, tmp_path, caplog):
    config, parties = case("warm start")
    config = config.replace(train={"warm_start": 7, "optimizer": optimizer})
    unbroken = outcome(simulate_with_secrets(parties, config).report)
    for killed, saved in ((1, 0), (2, 0), (4, 2), (5, 4), (7, 6)):
        folder, steps = tmp_path / str(killed), []

        def die(event, killed=killed):
            if isinstance(event, WarmStepDone) and event.step == killed:
                raise CrashError

        with pytest.raises(CrashError):
            simulate_with_secrets(parties, config, observer=die, checkpoints=folder, workers=1)
        caplog.clear()
        again = simulate_with_secrets(parties, config, observer=steps.append, checkpoints=folder, workers=1).report
        assert outcome(again) == unbroken
        lines = [line for line in caplog.messages if line.startswith("resuming")]
        assert lines == ([f"resuming after warm step {saved} of 7."] if saved else [])
        repeated = [event.step for event in steps if isinstance(event, WarmStepDone) and event.party == "a"]
        assert repeated == list(range(saved + 1, 8))


def test_a_damaged_checkpoint_of_the_warm_start_is_not_used(tmp_path, caplog):
    config, parties = case("warm start")
    config = config.replace(train={"warm_start": 6})

    def crash(message):
        if isinstance(message, Scores):  # of the evaluation after the warm start
            raise CrashError
        return message

    with pytest.raises(CrashError):
        simulate(parties, config, carry=crash, checkpoints=tmp_path)
    older, newer = sorted(tmp_path.glob("*.checkpoint"))
    assert (older.name, newer.name) == ("warm-00000004.checkpoint", "warm-00000006.checkpoint")
    newer.write_bytes(newer.read_bytes()[:-5])
    caplog.clear()
    report = simulate(parties, config, checkpoints=tmp_path).report
    assert newer.name in caplog.messages[0]
    assert caplog.messages[1] == "resuming after warm step 4 of 6."
    assert outcome(report) == outcome(simulate(parties, config).report)


def test_a_checkpoint_is_written_as_often_as_asked_and_never_with_zero(tmp_path):
    config, parties = case("full")
    for every, rounds in ((1, {1, 2, 3}), (2, {2, 3}), (9, {3}), (0, set())):
        folder, saved = tmp_path / str(every), set()

        def note(message=None, folder=folder, saved=saved):
            saved |= {int(path.stem[-8:]) for path in folder.glob("*.checkpoint")}
            return message

        simulate(parties, config.replace(train={"checkpoint_every": every}), checkpoints=folder, carry=note)
        note()
        assert saved == rounds
    assert not (tmp_path / "0").exists()


def test_a_finished_run_has_nothing_left_to_train(tmp_path):
    config, parties = case("full")
    first = train(parties, config, checkpoints=tmp_path)
    carry, carried = crash_at(-1)
    again = simulate(parties, config, checkpoints=tmp_path, carry=carry).report
    assert outcome(again) == outcome(first)
    assert {message.key.round for message in carried} == {ROUNDS + 1}  # the test of the selected model


def interrupt_run(tmp_path, number=60):
    config, parties = case("full")
    with pytest.raises(CrashError):
        simulate(parties, config, carry=crash_at(number)[0], checkpoints=tmp_path)
    older, newer = sorted(tmp_path.glob("*.checkpoint"))
    return config, parties, older, newer


def flip(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


DAMAGE = {
    "a bit": lambda newer, older: flip(newer, len(newer) // 2),
    "the last bit": lambda newer, older: flip(newer, len(newer) - 1),
    "the schema": lambda newer, older: flip(newer, 4),
    "the digest": lambda newer, older: flip(newer, 20),
    "cut short": lambda newer, older: newer[:-1],
    "a head alone": lambda newer, older: newer[:40],
    "empty": lambda newer, older: b"",
    "longer": lambda newer, older: newer + b"\0",
    "another file": lambda newer, older: b"PK\3\4" * 100,
    "the older one in its place": lambda newer, older: older,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_noticed_and_the_older_one_used(kind, tmp_path, caplog):
    config, parties, older, newer = interrupt_run(tmp_path)
    newer.write_bytes(DAMAGE[kind](newer.read_bytes(), older.read_bytes()))
    report = simulate(parties, config, checkpoints=tmp_path).report
    lines = caplog.messages
    assert newer.name in lines[0]
    assert "not used" in lines[0]
    assert lines[1] == f"resuming after round {int(older.stem[-3:])} of {ROUNDS}."
    assert outcome(report) == outcome(simulate(parties, config).report)


def only_checkpoint(tmp_path, number):
    """Interrupt a run, keep only its newest checkpoint, and damage it."""
    config, parties = case("full")
    with pytest.raises(CrashError):
        simulate(parties, config, carry=crash_at(number)[0], checkpoints=tmp_path)
    *older, newest = sorted(tmp_path.glob("*.checkpoint"))
    for path in older:
        path.unlink()
    newest.write_bytes(newest.read_bytes()[:-5])
    return config, parties, newest


def test_before_the_first_checkpoint_there_is_the_beginning_and_it_is_used(tmp_path, caplog):
    config, parties, newest = only_checkpoint(tmp_path, 30)
    assert newest.name == "round-00000001.checkpoint"
    report = simulate(parties, config, checkpoints=tmp_path).report
    lines = caplog.messages
    assert "not used" in lines[0]
    assert outcome(report) == outcome(simulate(parties, config).report)


def test_a_run_that_was_further_is_not_silently_started_over(tmp_path):
    config, parties, newest = only_checkpoint(tmp_path, 60)
    assert newest.name != "round-00000001.checkpoint"
    with pytest.raises(ConfigError, match=r"no checkpoint is intact.*--fresh"):
        simulate(parties, config, checkpoints=tmp_path)


def test_without_an_intact_checkpoint_a_run_is_not_silently_started_over(tmp_path, caplog):
    config, parties, older, newer = interrupt_run(tmp_path)
    for path in (older, newer):
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"no checkpoint is intact.*--fresh"):
        simulate(parties, config, checkpoints=tmp_path)
    assert older.exists()
    simulate(parties, config, checkpoints=tmp_path, fresh=True)
    lines = caplog.messages
    assert older.name in lines[0]
    assert newer.name in lines[0]


def test_a_run_that_diverged_says_which_checkpoints_it_removes_so_that_other_settings_can_take_its_place(
    tmp_path, caplog
):
    config, parties, older, newer = interrupt_run(tmp_path)

    def diverge(event):
        raise TrainingError("the loss is nan")

    with pytest.raises(TrainingError, match="the loss is nan"):
        simulate(parties, config, checkpoints=tmp_path, observer=diverge)
    assert not list(tmp_path.glob("*.checkpoint"))
    assert caplog.messages[-1].startswith(f"a resumed run would fail again: removed {older}, {newer}")
    simulate(parties, config.replace(train={"learning_rate": 0.001}), checkpoints=tmp_path)


def test_other_data_is_refused(tmp_path):
    config, parties, _, _ = interrupt_run(tmp_path)
    changed = parties[1].features.copy()
    changed[0, 0] += 1
    others = [parties[0], replace(parties[1], features=changed), parties[2]]
    with pytest.raises(ConfigError, match=r"other settings, data or secrets: data of b = "):
        simulate(others, config, checkpoints=tmp_path)


def test_a_disk_that_fails_stops_the_run_and_leaves_the_earlier_checkpoints(tmp_path, monkeypatch):
    config, parties = case("full")
    rename = Path.replace

    def fail(self, target):
        if "round-00000003" in str(target):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        error = r"round-00000003.*cannot be written.*No space left.*same command again"
        with pytest.raises(CheckpointError, match=error):
            simulate(parties, config, checkpoints=tmp_path)
    assert len(list(tmp_path.glob("*.checkpoint"))) == 2
    assert outcome(simulate(parties, config, checkpoints=tmp_path).report) == outcome(simulate(parties, config).report)
