"""The doctor sees a server and three parties over real streams: one verdict for all, and nothing private in it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from glasu.cli.main import build_parser, main
from glasu.config import RunConfig
from glasu.data.folders import write_party
from glasu.data.sources.catalog import load_parties
from glasu.errors import ConfigError
from glasu.network.doctor import examination
from glasu.network.doctor import visit as visiting
from glasu.network.doctor.examination import examine
from glasu.network.doctor.findings import Finding
from glasu.network.doctor.visit import visit
from glasu.network.frames import control
from glasu.network.join import join
from glasu.network.transport import Line
from glasu.pki.kit import open_kit
from network.test_processes import GLASU, SMALL_RUN
from network.test_runs import tiny
from support.cluster import Cluster, Role


class Practice:
    """The doctor's roles, in threads."""

    def __init__(self, kits, folder):
        self.config, self.parties = tiny()
        self.kits, self.folder, self.port, self.lines = kits, folder, 0, {}

    def examine(self, **options):
        ready = threading.Event()

        def listened(port):
            self.port = port
            ready.set()

        options = {"wait": 60.0, "own": [], "tell": self.lines.setdefault("server", []).append, **options}
        kit = open_kit(self.kits / "server", "server")
        role = Role(
            lambda: examine(self.config, kit, "127.0.0.1:0", self.folder, listened=listened, **options), "server"
        )
        while not ready.wait(0.02) and role.is_alive():
            pass
        return role

    def visit(self, name, **options):
        party = options.pop("party", next(party for party in self.parties if party.name == name))
        options = {"wait": 60.0, "own": [], "tell": self.lines.setdefault(name, []).append, **options}
        kit, address = open_kit(self.kits / name, "party"), f"localhost:{self.port}"
        return Role(lambda: visit(party, kit, address, self.folder, **options), name)

    def all(self, **changed):
        """Return the verdict, which must be the same at every role."""
        server = self.examine()
        roles = [server, *(self.visit(name, **changed.get(name, {})) for name in "abc")]
        verdicts = [role.outcome() for role in roles]
        assert len({tuple(verdict.lines()) for verdict in verdicts}) == 1
        assert len({verdict.in_words() for verdict in verdicts}) == 1
        return verdicts[0]


@pytest.fixture
def practice(kits, tmp_path):
    return Practice(kits, tmp_path)


def bad(verdict):
    return {
        (role, finding.check) for role, found in verdict.findings.items() for finding in found if finding.level == "bad"
    }


def test_where_all_is_well_everybody_hears_that_they_are_ready(practice):
    verdict = practice.all()
    assert verdict.in_words() == "ready: the server and a, b, c can train together."
    checks = {finding.check for found in verdict.findings.values() for finding in found}
    assert checks == {"disk", "dimensions", "edges", "server", "clock", "settings", "labels", "versions", "ids"}


def test_roles_of_which_a_hostile_server_tells_are_printable(practice, monkeypatch):
    plain = examination.to_plain
    monkeypatch.setattr(examination, "to_plain", lambda found: {**plain(found), "\x1b[2J\nready": []})
    practice.examine()
    verdicts = [role.outcome() for role in [practice.visit(name) for name in "abc"]]
    for verdict in verdicts:
        assert verdict.in_words().isprintable()


def test_a_wrong_clock_is_named_at_everybody(practice):
    verdict = practice.all(b={"now": lambda: time.time() + 1000})
    assert bad(verdict) == {("b", "clock")}
    assert "1000.0 s ahead of the server's" in verdict.in_words()


def test_ids_in_another_order_are_named_at_everybody(practice):
    other = replace(practice.parties[2], ids=practice.parties[2].ids[::-1].copy())
    assert bad(practice.all(c={"party": other})) == {("server/parties", "ids")}


def test_data_that_cannot_be_read_is_named_without_a_reason(practice):
    own = [Finding("data", "bad", "its files cannot be used; it says there why", "row 7: secret")]
    verdict = practice.all(a={"party": None, "own": own})
    assert bad(verdict) == {("a", "data")}
    assert "secret" not in "".join(verdict.lines())


def test_neither_ids_nor_values_leave_a_party(practice, monkeypatch):
    ids = np.array([f"canary-{index}" for index in range(24)])
    practice.parties = [replace(party, ids=ids, features=party.features + 123456.0) for party in practice.parties]
    sent = []
    send = Line.send
    monkeypatch.setattr(Line, "send", lambda line, frame: (sent.append(frame), send(line, frame))[1])
    practice.all()
    everything = b"".join(sent)
    assert b"24 nodes" in everything
    assert b"canary" not in everything
    assert b"12345" not in everything


def test_who_does_not_come_is_named_at_those_who_did(practice, monkeypatch):
    monkeypatch.setattr("glasu.network.doctor.examination.NAMED_AFTER", 0.3)
    server = practice.examine(wait=8.0)
    a = practice.visit("a")
    verdicts = [role.outcome() for role in (server, a)]
    for verdict in verdicts:
        assert {("b", "presence"), ("c", "presence")} <= bad(verdict)
        assert "b: presence: did not come" in verdict.in_words()
    assert any("waiting for a, b, c" in line or "waiting for b, c" in line for line in practice.lines["server"])


def test_without_a_server_a_party_says_what_it_knows(practice):
    with_nobody = practice.visit("a", wait=0.1)
    verdict = with_nobody.outcome()
    assert bad(verdict) == {("a", "server")}
    assert ("a", "dimensions") in {
        (role, finding.check) for role, found in verdict.findings.items() for finding in found
    }


def test_a_server_that_comes_later_is_awaited(practice):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        practice.port = unused.getsockname()[1]
    a = practice.visit("a")
    while not any("the server is awaited" in line for line in practice.lines["a"]):
        time.sleep(0.02)
    kit, address = open_kit(practice.kits / "server", "server"), f"127.0.0.1:{practice.port}"
    server = Role(lambda: examine(practice.config, kit, address, practice.folder, own=[], wait=30.0), "server")
    others = [practice.visit(name) for name in "bc"]
    assert all(role.outcome().is_ready for role in (server, a, *others))


def test_a_server_that_trains_already_is_not_disturbed_by_the_doctor(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    practice = Practice(kits, tmp_path)
    practice.port = cluster.port
    verdict = practice.visit("a").outcome()
    assert bad(verdict) == {("a", "server")}
    assert verdict.in_words().endswith(
        "server: a training is under way there; start glasu doctor at the server instead of glasu serve."
    )
    assert cluster.lines["server"] == []
    for role in [cluster.join(name) for name in "abc"]:
        role.outcome()
    server.outcome()


def test_settings_that_were_not_agreed_on_are_named_at_everybody(practice):
    other = practice.config.replace(train={"seed": 5})
    verdict = practice.all(a={"expect": practice.config}, b={"expect": other})
    assert bad(verdict) == {("b", "agreed settings")}
    assert "train.seed: expected 5, the server has 0" in verdict.in_words()


def test_a_party_that_trains_already_is_sent_away(practice, tmp_path):
    server = practice.examine()
    address, kit = f"localhost:{practice.port}", open_kit(practice.kits / "a", "party")
    error = Role(lambda: join(practice.parties[0], kit, address, tmp_path / "a", wait=20.0), "a").error()
    assert isinstance(error, ConfigError)
    assert "runs glasu doctor" in str(error)
    assert all(role.outcome().is_ready for role in (*(practice.visit(name) for name in "abc"), server))


def test_what_cannot_be_read_is_refused_and_may_come_again(practice, monkeypatch):
    server = practice.examine()
    with monkeypatch.context() as patch:
        patch.setattr(visiting, "control", lambda kind, **fields: control(kind, **{**fields, "findings": 7}))
        verdict = practice.visit("a").outcome()
    assert "its findings cannot be read" in verdict.in_words()
    assert all(role.outcome().is_ready for role in (*(practice.visit(name) for name in "abc"), server))


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "run.toml").write_text(SMALL_RUN.format(rounds=2))
    for party in load_parties(RunConfig.from_toml(tmp_path / "run.toml")):
        write_party(party, tmp_path / "parties" / party.name)
    return tmp_path


def words(folder, kits, name, where):
    subject = folder / "run.toml" if name == "server" else folder / "parties" / name
    option = "--listen" if name == "server" else "--server"
    arguments = [subject, option, where, "--kit", kits / name, "--out", folder / "runs" / name]
    return ["doctor", *map(str, arguments)]


def test_four_commands_end_with_one_verdict(folders, kits):
    def started(name, where):
        with (folders / f"{name}.log").open("w") as log:
            command = [*GLASU, *words(folders, kits, name, where)]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    processes = [started("server", "127.0.0.1:0")]
    while "waiting for" not in (said := (folders / "server.log").read_text()):
        assert processes[0].poll() is None, said
        time.sleep(0.05)
    port = said.split("127.0.0.1:")[1].split(",")[0]
    processes += [started(name, f"localhost:{port}") for name in "abc"]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], printed
    assert len(set(printed)) == 1
    assert printed[0].endswith("ready: the server and a, b, c can train together.\n")


def test_the_doctor_takes_what_serve_and_join_take_but_for_predict():
    commands = build_parser()._subparsers._group_actions[0].choices
    known = {name: set(commands[name]._option_string_actions) for name in ("serve", "join", "doctor")}
    assert (known["serve"] | known["join"]) - known["doctor"] == {"--predict"}


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("a", ["--metrics", "9464"], "--metrics: is for the server"),
        ("a", ["--on-nonsense", "stop"], "--on-nonsense: is for the server"),
        ("server", ["--expect", "run.toml"], "--expect: is for the parties"),
        ("server", ["--run", "00"], "--run: is for the parties"),
        ("server", ["--max-memory", "4"], "--max-memory: is for the parties"),
        ("server", ["--metrics", "x"], "must be a port"),
    ],
)
def test_what_is_for_the_other_role_is_refused(name, more, said, folders, kits, capsys):
    assert main([*words(folders, kits, name, "localhost:1"), *more]) == 2
    assert said in capsys.readouterr().err


def test_a_port_for_metrics_that_is_taken_is_a_finding(folders, kits, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        more = ["--wait", "0", "--metrics", str(taken.getsockname()[1])]
        assert main([*words(folders, kits, "server", "127.0.0.1:0"), *more]) == 1
    assert "server          bad      metrics: --metrics 127.0.0.1:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "remembered", "more", "said"),
    [
        (
            "server",
            {"run": "00", "closed": True, "digest": "x", "roster": ["a"]},
            [],
            "bad      folder: holds a run of",
        ),
        ("server", {"run": "00", "closed": True}, ["--fresh"], "warning  folder: holds 1 checkpoints, which --fresh"),
        ("a", {"run": "00"}, [], "bad      folder: holds a run that began with other data"),
        ("a", {"run": "00"}, ["--run", "11"], "bad      folder: holds a part of another run"),
        ("server", {}, [], "bad      folder: holds a run of other parties or settings, or of unknown ones"),
        ("a", {}, [], "bad      folder: holds checkpoints of another run"),
        ("a", {"run": "00"}, ["--fresh"], "warning  folder: holds 1 checkpoints, which --fresh"),
    ],
)
def test_a_folder_in_which_the_run_will_not_begin_is_a_finding(name, remembered, more, said, folders, kits, capsys):
    out = folders / "runs" / name
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "round-00000001.checkpoint").write_text("")
    (out / ("serving.json" if name == "server" else "joining.json")).write_text(json.dumps(remembered))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert (
        main([*words(folders, kits, name, "localhost:1" if name == "a" else "127.0.0.1:0"), "--wait", "0", *more]) == 1
    )
    assert said in capsys.readouterr().out
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_the_doctor_writes_json_where_it_is_asked_to(folders, kits, capfd):
    assert main([*words(folders, kits, "server", "127.0.0.1:0"), "--wait", "0", "--log-format", "json"]) == 1
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert {line["command"] for line in lines} == {"doctor"}


def test_a_bad_verdict_is_exit_code_1(folders, kits, capsys):
    assert main([*words(folders, kits, "server", "127.0.0.1:0"), "--wait", "0.2"]) == 1
    assert "not ready, 3 problems: a: presence: did not come" in capsys.readouterr().out


def test_a_broken_folder_is_a_finding_and_not_bad_input(folders, kits, capsys):
    (folders / "parties" / "a" / "nodes.parquet").write_text("broken")
    assert main([*words(folders, kits, "a", "localhost:1"), "--wait", "0"]) == 1
    printed = capsys.readouterr()
    assert "data: its files cannot be used" in printed.out
    assert "data, only here: " in printed.err


def test_a_kit_that_cannot_be_used_is_a_finding(folders, kits, capsys):
    arguments = words(folders, kits, "a", "localhost:1")
    arguments[arguments.index("--kit") + 1] = str(kits / "server")
    assert main([*arguments, "--wait", "0"]) == 1
    assert "certificate: its kit cannot be used" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "word", "said"),
    [
        (3, "localhost", "--server localhost: must be host:port"),
        (3, "https://localhost:1", "give host:port without https://"),
        (3, "localhost:999999", "the port 999999 is above 65535"),
        (1, "nowhere", "there is no such folder"),
        (0, "doctor --set train.seed=1", "the server has the settings"),
    ],
)
def test_bad_input_is_exit_code_2(place, word, said, folders, kits, capsys):
    arguments = words(folders, kits, "a", "localhost:1")
    arguments[place : place + 1] = word.split()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_settings_that_no_network_run_can_have_are_exit_code_2(folders, kits, capsys):
    arguments = [*words(folders, kits, "server", "127.0.0.1:0"), "--set", "train.method=standalone"]
    assert main(arguments) == 2
    assert "glasu train" in capsys.readouterr().err


def test_the_doctor_of_the_server_loads_no_torch():
    code = (
        "import sys; import glasu.cli.doctor, glasu.network.doctor.examination, glasu.network.doctor.machine;"
        "found = {'torch', 'torch_geometric', 'pyarrow'} & set(sys.modules); assert not found, found"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_a_party_that_waits_for_the_doctor_says_so_again_and_again(folders, kits, capsys, monkeypatch):
    monkeypatch.setattr("glasu.network.doctor.visit.TOLD_EVERY", 0.5)
    assert main([*words(folders, kits, "a", "localhost:1"), "--wait", "2"]) == 1
    assert capsys.readouterr().err.count("the server is awaited: ") > 1
