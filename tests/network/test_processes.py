"""Three parties and the server as separate processes; any of them is killed with SIGKILL and started again."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from glasu.runtime.audit import audit_folder
from glasu.runtime.trained_model import TrainedModel
from support.commands import GLASU, glasu
from support.kits import simulate_with_secrets
from support.processes import SMALL_RUN, Processes, assert_same_report
from support.small import SMALL

CORA = """
[data]
name = "cora"
[model]
hidden = 32
[train]
num_rounds = 60
"""
FORTY_ROUNDS = "[train]\nnum_rounds = 40\nevaluate_every = 10\n"
LONG_RUN = SMALL + "aggregation_layers = [0, 1]\n" + FORTY_ROUNDS
KILLED = {
    "joint, two steps": LONG_RUN + 'backward = "joint"\nnum_local_steps = 2\nsampler = "neighbor"\n',
    "changes": LONG_RUN + '[wire]\nfeedback = true\nprecision = "int8"\n',
    "party dropout": LONG_RUN + "party_dropout = 0.4\n",
    "warm start": LONG_RUN + "warm_start = 20\n",
    "race": SMALL.replace('backbone = "gcn"\nnum_layers = 2\n', "") + FORTY_ROUNDS,  # the preset has two candidates
}
WITH_DROPOUT = SMALL_RUN.format(rounds=3) + "party_dropout = 0.4\n"


@pytest.fixture
def processes(tmp_path, kits):
    made = []

    def make(settings: str) -> Processes:
        made.append(Processes(tmp_path, kits, settings))
        return made[0]

    yield make
    made[0].stop()


@pytest.fixture(scope="module")
def finished_folder(kits, tmp_path_factory) -> Path:
    """Return the folder of a finished training with party dropout; not to be changed."""
    roles = Processes(tmp_path_factory.mktemp("finished"), kits, WITH_DROPOUT)
    try:
        roles.listen()
        for name in "abc":
            roles.start(name)
        roles.finish()
    finally:
        roles.stop()
    return roles.folder


@pytest.fixture
def finished_processes(finished_folder, processes, tmp_path) -> Processes:
    """Return the processes of a finished training with party dropout."""
    written = shutil.ignore_patterns("parties", "run.toml")  # by `Processes`
    shutil.copytree(finished_folder, tmp_path, ignore=written, dirs_exist_ok=True)
    return processes(WITH_DROPOUT)


def test_a_party_and_the_server_are_killed_and_started_again(processes):
    roles = processes(SMALL_RUN.format(rounds=60))
    report = roles.run_with_kills("b")
    assert_same_report(report, roles)
    assert roles.started == {"server": 2, "a": 1, "b": 2, "c": 1}
    for name in "abc":  # entries of the killed process stay, and the chain is valid
        others = [roles.folder / other for other in ("a", "b", "c", "server") if other != name]
        assert audit_folder(roles.folder / name, others).failures == []
    assert "Traceback" not in "".join(roles.log(name) for name in roles.started)


@pytest.mark.slow  # the law of test_a_party_and_the_server_are_killed_and_started_again
@pytest.mark.parametrize("name", KILLED)
def test_a_run_with_other_settings_ends_the_same_after_two_kills(name, processes):
    roles = processes(KILLED[name])
    report = roles.run_with_kills("a")
    assert_same_report(report, roles)
    assert (name == "race") == bool(report["race"] and report["race"]["rounds"])
    assert roles.started == {"server": 2, "a": 2, "b": 1, "c": 1}
    assert "Traceback" not in "".join(roles.log(name) for name in roles.started)


@pytest.mark.slow
def test_the_first_party_is_killed_in_its_warm_start_and_draws_the_same_run_key(processes):
    roles = processes(LONG_RUN + "warm_start = 600\n")
    roles.listen()
    for name in "abc":
        roles.start(name)
    roles.wait(lambda: any((roles.folder / "a").rglob("warm-*.checkpoint")))
    roles.kill("a", alone=True)
    assert_same_report(roles.finish(), roles)
    assert "continuing after warm step" in roles.log("a")
    assert "Traceback" not in "".join(roles.log(name) for name in roles.started)


def test_parties_that_train_alone_are_killed_and_the_combined_prediction_is_the_same(processes):
    roles = processes(SMALL_RUN.format(rounds=30) + 'method = "smooth"\n')
    roles.listen()
    for name in "abc":
        roles.start(name)
    roles.wait(lambda: roles.rounds("b") >= 5)
    roles.kill("b", alone=True)
    roles.wait(lambda: roles.rounds("b") >= 12)
    roles.kill("server", alone=True)
    assert_same_report(roles.finish(), roles)
    assert "continuing after round" in roles.log("b")
    assert "Traceback" not in "".join(roles.log(name) for name in roles.started)


def test_of_two_processes_with_one_kit_exactly_one_takes_part(processes):
    roles = processes(SMALL_RUN.format(rounds=10))
    roles.listen()
    pair = {"a", "clone"}
    for called in pair:  # at the same time: their order is random
        roles.start("a", called=called)
    deadline = time.monotonic() + 240
    while not (ended := [called for called in pair if roles.running[called].poll() is not None]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (loser,) = ended
    (winner,) = pair - {loser}
    assert roles.running.pop(loser).returncode == 2
    assert "another process of party 'a'" in roles.log(loser)
    for name in "bc":
        roles.start(name)
    report = roles.finish()
    own = {called: json.loads((roles.folder / called / "report.json").read_text()) for called in (winner, "b", "c")}
    simulated = simulate_with_secrets(roles.parties, roles.config).report
    assert report["weights_sha256"] == list(simulated.weights_sha256)
    assert [found["weights_sha256"][0] for found in own.values()] == report["weights_sha256"]
    assert not (roles.folder / loser / "report.json").exists()
    assert len(roles.attempts()) == 1
    assert roles.log("server").count("a: connected") == 1


def test_logs_are_json_and_prometheus_reads_the_server_while_it_trains(processes):
    roles = processes(SMALL_RUN.format(rounds=40))
    roles.words = ["--log-format", "json"]
    roles.start("server", "--metrics", "0")
    roles.wait(lambda: "listening on" in roles.log("server"))
    roles.port = int(roles.log("server").split("listening on 127.0.0.1:")[1].split(",")[0])
    address = re.search(r"http://127\.0\.0\.1:\d+/metrics", roles.log("server")).group()
    for name in "abc":
        roles.start(name)
    roles.wait(lambda: roles.rounds("server") >= 2)
    with urllib.request.urlopen(address, timeout=30) as answer:
        text = answer.read().decode()
    assert 2 <= float(re.search(r"^glasu_rounds_done (\S+)$", text, re.M).group(1)) <= 40
    assert 'glasu_party_connected{party="b"} 1.0' in text
    assert "process_resident_memory_bytes" in text
    roles.finish()
    for name in ("server", *"abc"):
        lines = [json.loads(line) for line in roles.log(name).splitlines() if line.startswith("{")]
        assert len(lines) == len(roles.log(name).splitlines()) - 1  # except the summary on standard output
        assert {line["role"] for line in lines} == {name}
        assert [line["round"] for line in lines if line["event"] == "round"] == list(range(1, 41))
        assert [line["event"] for line in lines].index("finished") == len(lines) - 1
        assert lines[-1]["report"] == str(roles.folder / name / "report.json")
        assert lines[-1]["weights_sha256"] == json.loads(Path(lines[-1]["report"]).read_text())["weights_sha256"]
    assert {"notice", "round", "evaluated"} <= {
        json.loads(line)["event"] for line in roles.log("server").splitlines()[:-1]
    }


def test_a_party_that_is_killed_before_the_prediction_is_missing_in_a_marked_answer_after_the_wait(finished_processes):
    roles, wait = finished_processes, 10.0
    ids = roles.folder / "ids.csv"
    ids.write_text("id\n" + "".join(f"{value}\n" for value in roles.parties[0].ids))
    roles.listen("--predict", "--wait", str(wait))
    roles.start("a", "--predict", str(ids))
    roles.start("b", "--predict")
    roles.wait(
        lambda: all(roles.log("server").count(f"{name}: prepared") == 2 for name in "ab")
    )  # and once in training
    killed = roles.running.pop("b")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    begun = time.monotonic()
    roles.start("c", "--predict")
    assert roles.running["a"].wait(300) == 0
    assert wait - 1 < time.monotonic() - begun < wait + 30  # on a busy machine
    roles.finish()
    for role in ("server", "a", "c"):
        found = json.loads((roles.folder / role / "prediction.json").read_text())
        assert found["missing"] == ["b"]
        assert found["validation"].keys() >= {"accuracy"}
        assert "predicted without b; validation scores of the parties present: accuracy" in roles.log(role)
    assert "nodes, predicted without b" in roles.log("a")
    TrainedModel.of(simulate_with_secrets(roles.parties, roles.config).clients).save(
        roles.folder / "simulated" / "model"
    )
    expected = roles.folder / "expected.csv"
    words = ["predict", roles.folder / "simulated", "--parties", "a,c", "--out", expected]
    done = glasu(*words)
    assert done.returncode == 0, done.stderr
    assert (roles.folder / "a" / "predictions.csv").read_bytes() == expected.read_bytes()
    said = next(line for line in roles.log("a").splitlines() if "validation scores of" in line)
    assert said.removeprefix("glasu join: ") in done.stdout
    assert not list(roles.folder.glob("[bc]/predictions.*"))
    assert "Traceback" not in "".join(roles.log(name) for name in roles.started)


def test_after_the_training_the_same_commands_predict_for_who_asks(finished_processes):
    roles = finished_processes
    ids = roles.parties[1].ids[[7, 50, 3]]
    (roles.folder / "ids.csv").write_text("id\n" + "".join(f"{value}\n" for value in ids))
    roles.listen("--predict")
    for name in "abc":
        roles.start(name, "--predict", *([str(roles.folder / "ids.csv")] if name == "b" else []))
    roles.finish()
    with (roles.folder / "b" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [str(value) for value in ids]
    model = TrainedModel.of(simulate_with_secrets(roles.parties, roles.config).clients)
    expected = model.predict_proba(roles.parties, np.array([3, 7, 50]))[[1, 2, 0]]
    found = [[float(row[f"p_{name}"]) for name in model.classes] for row in rows]
    assert np.array_equal(np.array(found, np.float32), expected)
    assert [row["prediction"] for row in rows] == [model.classes[index] for index in expected.argmax(axis=1)]
    assert not list(roles.folder.glob("[ac]/predictions.*"))
    assert "3 nodes" in roles.log("b")
    assert "received no predictions" in roles.log("a")
    before = len(roles.log("server"))
    roles.listen()  # again, although the training is finished
    roles.finish()
    finished, listening = roles.log("server")[before:].splitlines()
    assert "this run is finished" in finished
    assert "that still need the result of the finished run" in listening


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_signals_end_a_role_within_ten_seconds_and_the_same_command_resumes(processes, sent, code):
    roles = processes(SMALL_RUN.format(rounds=60))
    roles.listen()
    for name in "abc":
        roles.start(name)
    for name, round_index in (("a", 4), ("server", 12), ("c", 20), ("b", 28)):
        roles.wait(lambda round_index=round_index: roles.rounds("server") >= round_index)
        process, said = roles.running.pop(name), len(roles.log(name))
        process.send_signal(sent)
        assert process.wait(10) == code, roles.log(name)
        assert "Traceback" not in roles.log(name)
        assert name != "server" or "the connection ended" not in roles.log(name)[said:]
        roles.start(name)
    assert_same_report(roles.finish(), roles)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(18))
def test_random_kills_of_a_run_on_cora(processes, seed, data_root):
    """Five kills, at least one per role, in random order at random moments; a role is restarted after two seconds."""
    rng = random.Random(seed)
    roles = processes(CORA + f"seed = {seed}\n")
    roles.listen()
    for name in "abc":
        roles.start(name)
    victims = ["server", "a", "b", "c", rng.choice(["server", "a", "b", "c"])]
    rng.shuffle(victims)
    for victim in victims:
        before = roles.rounds("server")
        wanted = min(before + rng.randint(1, 10), 55)
        roles.wait(lambda wanted=wanted: roles.rounds("server") >= wanted)
        time.sleep(rng.random() / 5)
        roles.kill(victim, after=2.0)
    assert_same_report(roles.finish(), roles)
    assert roles.started == {name: 1 + victims.count(name) for name in ("server", "a", "b", "c")}


@pytest.mark.slow
def test_of_two_processes_with_one_kit_one_takes_part_whatever_is_started_again(processes):
    roles = processes(SMALL_RUN.format(rounds=10))
    roles.listen()
    roles.start("a")
    roles.wait(lambda: "a: prepared" in roles.log("server"))

    def clone() -> None:
        words = ["join", roles.folder / "parties" / "a", "--server", f"localhost:{roles.port}"]
        words += ["--kit", roles.kits / "a", "--out", roles.folder / "clone"]
        ended = subprocess.run([*GLASU, *map(str, words)], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 2
        assert "another process of party 'a'" in ended.stderr

    def again(name: str, words: str) -> None:
        process = roles.running.pop(name)
        process.kill()
        process.wait()
        clone() if name == "a" else None
        before = roles.log("server").count(words)
        roles.start(name)
        roles.wait(lambda: roles.log("server").count(words) > before)

    clone()
    clone()
    again("a", "a: connected.")
    clone()
    again("server", "a: connected")
    clone()
    for name in "bc":
        roles.start(name)
    assert_same_report(roles.finish(), roles)
    assert roles.started == {"server": 2, "a": 2, "b": 1, "c": 1}


@pytest.mark.slow
def test_a_stopped_party_is_named_and_the_run_continues_with_it(processes):
    roles = processes(SMALL_RUN.format(rounds=60))
    roles.listen()
    for name in "abc":
        roles.start(name)
    roles.wait(lambda: roles.rounds("server") >= 5)
    roles.running["b"].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    roles.wait(lambda: "waiting for b" in roles.log("server") and "waiting for b" in roles.log("a"), 60)
    assert time.monotonic() - stopped <= 15
    roles.running["b"].send_signal(signal.SIGCONT)
    assert_same_report(roles.finish(), roles)
    assert roles.started == {"server": 1, "a": 1, "b": 1, "c": 1}


@pytest.mark.slow
@pytest.mark.parametrize("parties", ["ab", "abc"], ids=["waiting for another party", "training"])
def test_every_party_reports_a_frozen_server_within_15_s_and_the_run_continues(parties, processes):
    roles = processes(SMALL_RUN.format(rounds=60))
    roles.listen()
    for name in parties:
        roles.start(name)
    if parties == "abc":
        roles.wait(lambda: roles.rounds("server") >= 5)
    else:
        roles.wait(lambda: all(f"{name}: prepared" in roles.log("server") for name in parties))
    roles.running["server"].send_signal(signal.SIGSTOP)
    stopped, words = time.monotonic(), f"the server at localhost:{roles.port} has been silent for"
    roles.wait(lambda: all(words in roles.log(name) for name in parties), 100)
    assert time.monotonic() - stopped <= 15
    roles.running["server"].send_signal(signal.SIGCONT)
    for name in set("abc") - set(parties):
        roles.start(name)
    assert_same_report(roles.finish(), roles)
    assert roles.started == {"server": 1, "a": 1, "b": 1, "c": 1}
