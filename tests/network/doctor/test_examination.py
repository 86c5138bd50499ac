"""A dry run with a server and three parties over real streams: one diagnosis for all, and nothing private in it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glasu.cli.main import build_parser, main
from glasu.config import RunConfig
from glasu.data.folders import write_party
from glasu.data.sources.catalog import load_parties
from glasu.network.admission import Admission
from glasu.network.admission_policy import Collect, ServedRun
from glasu.network.client_session import ClientSession
from glasu.network.connection import ConnectOptions
from glasu.network.doctor.party import DryRunParty, join_dry_run
from glasu.network.doctor.server import DryRunServer
from glasu.network.facts import collect_server_facts
from glasu.network.findings import Diagnosis, Finding
from glasu.network.handshake import Code, RefusalError
from glasu.network.join import join
from glasu.network.options import JoinOptions, Listening, ServeOptions
from glasu.network.purposes import DRY_RUN
from glasu.network.roster import Attempt
from glasu.network.serve import serve
from glasu.pki.kit import open_kit
from glasu.privacy.policy import Policy
from glasu.runtime.checkpointing import START
from glasu.runtime.policy_file import PolicyFile
from support.cluster import Cluster
from support.log_lines import on_log
from support.processes import SMALL_RUN
from support.roles import Role
from support.tiny import tiny
from support.warm_process import WarmProcess


class Practice:
    """The roles of a dry run, in threads."""

    def __init__(self, kits, folder):
        self.config, self.parties = tiny()
        self.kits, self.folder, self.port, self.lines = kits, folder, 0, {}

    def examine(self, *, wait=60.0, own=(), port=0, kind=DryRunServer):
        ready = threading.Event()

        def observe(event):
            if isinstance(event, Listening):
                self.port = event.port
                ready.set()

        options = ServeOptions(
            config=self.config,
            kit=open_kit(self.kits / "server", "server"),
            listen=f"127.0.0.1:{port}",
            out=self.folder / "server",
            wait=wait,
            observer=observe,
        )

        def work():
            with on_log(self.lines.setdefault("server", []).append, "glasu.server"):
                return serve(kind(options, own))

        role = Role("server", work)
        while not ready.wait(0.02) and role.is_alive():
            pass
        return role

    def make_work(self, name, kind=DryRunParty, **changes):
        own = next(party for party in self.parties if party.name == name)
        more = {key: changes.pop(key) for key in ("own", "now") if key in changes}
        party = changes.pop("party", own)
        values = {
            "server": f"localhost:{self.port}",
            "out": self.folder / name,
            "wait": 60.0,
            **changes,
        }
        return kind(JoinOptions(kit=open_kit(self.kits / name, "party"), **values), party, **more)

    def visit(self, name, **changes):
        def work():
            with on_log(self.lines.setdefault(name, []).append, f"glasu.party.{name}"):
                return join_dry_run(self.make_work(name, **changes))

        return Role(name, work)

    def all(self, **changed):
        """Return the diagnosis, which must be the same at every role."""
        server = self.examine()
        roles = [server, *(self.visit(name, **changed.get(name, {})) for name in "abc")]
        diagnoses = [role.outcome() for role in roles]
        assert len({tuple(diagnosis.lines()) for diagnosis in diagnoses}) == 1
        assert len({diagnosis.summary() for diagnosis in diagnoses}) == 1
        return diagnoses[0]


@pytest.fixture
def practice(kits, tmp_path):
    return Practice(kits, tmp_path)


def bad(diagnosis):
    return {
        (role, finding.check)
        for role, found in diagnosis.findings.items()
        for finding in found
        if finding.level == "bad"
    }


def test_a_policy_that_forbids_the_settings_is_found(practice):
    allowing = PolicyFile(Path("policy.toml"), Policy(max_evaluations=100), "digest")
    forbidding = PolicyFile(Path("policy.toml"), Policy(forbid=("representation",)), "digest")
    diagnosis = practice.all(a={"policy": allowing}, b={"policy": forbidding})
    assert bad(diagnosis) == {("b", "policy")}
    said = {finding.check: finding.text for finding in diagnosis.findings["b"]}
    assert "forbid = ['representation']" in said["policy"]
    assert {finding.check: finding.level for finding in diagnosis.findings["a"]}["policy"] == "good"


def test_every_role_learns_that_all_are_ready(practice):
    diagnosis = practice.all()
    assert diagnosis.summary() == "ready: the server and a, b, c can train together."
    checks = {finding.check for found in diagnosis.findings.values() for finding in found}
    assert checks == {"disk", "dimensions", "edges", "server", "clock", "settings", "labels", "versions", "ids"}


def test_a_dry_run_takes_no_incarnation_and_writes_nothing(practice, tmp_path):
    practice.all()
    assert not list(tmp_path.iterdir())


def test_a_wrong_clock_is_named_at_every_role(practice):
    diagnosis = practice.all(b={"now": lambda: time.time() + 1000})
    assert bad(diagnosis) == {("b", "clock")}
    assert "s ahead of the server's" in diagnosis.summary()


def test_ids_in_another_order_are_named_at_every_role(practice):
    other = replace(practice.parties[2], ids=practice.parties[2].ids[::-1].copy())
    assert bad(practice.all(c={"party": other})) == {("server/parties", "ids")}


def test_several_problems_are_all_collected(practice):
    other = replace(practice.parties[2], ids=practice.parties[2].ids[::-1].copy())
    changes = {"c": {"party": other}, "b": {"now": lambda: time.time() + 1000}, "a": {"max_memory": 1000}}
    assert bad(practice.all(**changes)) == {("server/parties", "ids"), ("b", "clock"), ("a", "settings")}


def test_unreadable_data_is_named_without_its_reason(practice):
    own = [Finding("data", "bad", "its files cannot be used; see that party's log")]
    diagnosis = practice.all(a={"party": None, "own": own})
    assert bad(diagnosis) == {("a", "data")}


def test_neither_ids_nor_values_leave_a_party(practice):
    ids = np.array([f"canary-{index}" for index in range(24)])
    party = replace(practice.parties[0], ids=ids, features=practice.parties[0].features + 123456.0)
    role = practice.make_work("a", party=party)
    sent = [role.hello()]
    admission = Admission(
        ServedRun(DRY_RUN, collect_server_facts(DRY_RUN), practice.config, ("a", "b", "c"), "dry-run", dict), Collect()
    )
    role.welcome(admission.admit("a", sent[0]))
    sent.append(role.statement())
    everything = json.dumps(sent)
    assert "24" in everything
    assert "canary" not in everything
    assert "12345" not in everything


def test_an_absent_party_is_named_at_those_that_came(practice):
    server = practice.examine(wait=4.0)
    diagnoses = [role.outcome() for role in (server, practice.visit("a"))]
    for diagnosis in diagnoses:
        assert {("b", "presence"), ("c", "presence")} <= bad(diagnosis)
        assert "b: presence: no report" in diagnosis.summary()


def test_without_a_server_a_party_reports_its_own_findings(practice):
    practice.port = 1
    diagnosis = practice.visit("a", own=[Finding("disk", "good", "room enough")], wait=0.1).outcome()
    assert bad(diagnosis) == {("a", "server")}
    assert "is the server running, and do all firewalls open the port?" in diagnosis.summary()
    assert ("a", "disk") in {(role, finding.check) for role, found in diagnosis.findings.items() for finding in found}


def test_a_server_that_is_not_started_yet_is_awaited(practice):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        practice.port = unused.getsockname()[1]
    a = practice.visit("a")
    while not any("waiting for the server" in line for line in practice.lines.get("a", [])):
        time.sleep(0.02)
    server = practice.examine(wait=30.0, port=practice.port)
    others = [practice.visit(name) for name in "bc"]
    assert all(role.outcome().is_ready for role in (server, a, *others))


def test_a_server_that_trains_refuses_a_dry_run_and_continues(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    practice = Practice(kits, tmp_path)
    practice.port = cluster.port
    diagnosis = practice.visit("a").outcome()
    assert bad(diagnosis) == {("a", "server")}
    assert "purpose: the server training, a dry run; start commands with the same purpose" in diagnosis.summary()
    for role in [cluster.join(name) for name in "abc"]:
        role.outcome()
    server.outcome()


def test_a_party_that_trains_is_refused_by_the_server_of_a_dry_run(practice, tmp_path):
    server = practice.examine()
    cluster = Cluster(practice.config, practice.parties, practice.kits, tmp_path / "run", practice.port)
    error = cluster.join("a").error()
    assert isinstance(error, RefusalError)
    assert error.code == Code.OTHER_PURPOSE
    assert "purpose: the server dry run, a training; start commands with the same purpose" in str(error)
    assert all(role.outcome().is_ready for role in (*(practice.visit(name) for name in "abc"), server))


def test_settings_that_were_not_agreed_on_are_named_at_every_role(practice):
    other = practice.config.replace(train={"seed": 5})
    diagnosis = practice.all(a={"expect": practice.config}, b={"expect": other})
    assert bad(diagnosis) == {("b", "agreed settings")}
    assert "train.seed: b expects 5, the server 0" in diagnosis.summary()


class BeginsAnAttempt(DryRunServer):
    """A server that starts a run although the parties examine themselves."""

    def run_session(self, session, perform):
        session.begin_attempt(Attempt(1, 0, dict.fromkeys(session.gather(), START), lambda head, size: None))


def test_a_party_of_a_dry_run_refuses_to_take_part_in_a_run(practice):
    server = practice.examine(kind=BeginsAnAttempt)
    roles = [Role(name, lambda name=name: join(practice.make_work(name))) for name in "abc"]
    for role in (server, *roles):
        assert "the server proposed an attempt, but this session runs no attempts" in str(role.error())


def test_a_malformed_report_is_refused_and_may_come_again(practice):
    server = practice.examine()

    class Malformed(DryRunParty):
        def statement(self):
            return {**super().statement(), "findings": 7}

    role = practice.make_work("a", Malformed)
    options = role.options
    session = ClientSession(ConnectOptions(options.kit, options.server, 20.0, options.log), role)
    session.open()
    session.prepare(lambda kind, key: 0)
    with pytest.raises(RefusalError, match=r"findings=.*: must be a list") as refused:
        session.await_attempt()
    session.close()
    assert refused.value.code == Code.INVALID_PAYLOAD
    assert all(role.outcome().is_ready for role in (*(practice.visit(name) for name in "abc"), server))


def test_the_text_of_another_role_cannot_steer_a_terminal(practice):
    hostile = Finding("\x1b[2J\n", "good", "x\x1b" * 2000)
    diagnosis = practice.all(a={"own": [hostile]})
    assert all(line.isprintable() and len(line) < 1500 for line in diagnosis.lines())


def test_a_verdict_is_ready_unless_a_finding_is_bad():
    good, warning, bad_one = (Finding("disk", level, "words") for level in ("good", "warning", "bad"))
    ready = Diagnosis({"server": (good,), "a": (warning,), "b": (good,), "server/parties": (good,)})
    assert ready.is_ready
    assert ready.summary() == "ready: the server and a, b can train together. 1 warning, see above."
    not_ready = Diagnosis({"server": (good,), "a": (bad_one,), "server/parties": (bad_one,)})
    assert not not_ready.is_ready
    assert not_ready.summary() == "not ready, 2 problems: a: disk: words; server/parties: disk: words."
    assert not_ready.lines()[1].split() == ["a", "bad", "disk:", "words"]
    asked = Diagnosis({"server": (Finding("presence", "bad", "no report; is it started?"),)})
    assert asked.summary() == "not ready, 1 problem: server: presence: no report; is it started?"


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
    def start(name, where):
        log, out = folders / f"{name}.log", folders / f"{name}.out"
        log.touch()
        return WarmProcess(words(folders, kits, name, where), log, out)

    processes = [start("server", "127.0.0.1:0")]
    while "waiting for" not in (said := (folders / "server.log").read_text()):
        assert processes[0].poll() is None, said
        time.sleep(0.05)
    port = said.split("127.0.0.1:")[1].split(",")[0]
    processes += [start(name, f"localhost:{port}") for name in "abc"]
    codes = [process.wait(300) for process in processes]
    printed = [(folders / f"{name}.out").read_text() for name in ("server", *"abc")]
    assert codes == [0, 0, 0, 0], printed
    assert len(set(printed)) == 1
    assert printed[0].endswith("ready: the server and a, b, c can train together.\n")


def test_the_doctor_takes_what_serve_and_join_take_but_for_predict():
    commands = build_parser()._subparsers._group_actions[0].choices
    known = {name: set(commands[name]._option_string_actions) for name in ("serve", "join", "doctor")}
    assert (known["serve"] | known["join"]) - known["doctor"] == {"--predict"}


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("a", ["--metrics", "9464"], "--metrics is an option of the server"),
        ("a", ["--on-invalid-message", "abort"], "--on-invalid-message is an option of the server"),
        ("server", ["--expect", "run.toml"], "--expect is an option of the parties"),
        ("server", ["--run", "00"], "--run is an option of the parties"),
        ("server", ["--max-memory", "4"], "--max-memory is an option of the parties"),
        ("server", ["--metrics", "x"], "must be PORT or HOST:PORT"),
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
        ("a", {"party": "a", "run": "00"}, [], "bad      folder: holds a run that started with other data"),
        ("a", {"party": "a", "run": "00"}, ["--run", "11"], "bad      folder: holds a part of another run than --run"),
        ("server", {}, [], "bad      folder: holds checkpoints of an unknown run"),
        ("a", {"party": "a"}, [], "bad      folder: holds checkpoints of an unknown run"),
        ("a", {"party": "a", "run": "00"}, ["--fresh"], "warning  folder: holds 1 checkpoints, which --fresh"),
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
    assert "not ready, 3 problems: a: presence: no report" in capsys.readouterr().out


def test_a_broken_folder_is_a_finding_and_not_bad_input(folders, kits, capsys):
    (folders / "parties" / "a" / "nodes.parquet").write_text("broken")
    assert main([*words(folders, kits, "a", "localhost:1"), "--wait", "0"]) == 1
    printed = capsys.readouterr()
    assert "data: its files cannot be used" in printed.out
    assert "data (only in this log): " in printed.err


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
        (3, "localhost:999999", "port 999999 is above 65535"),
        (1, "nowhere", "no such folder"),
        (0, "doctor --set train.seed=1", "only the server has settings"),
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
        "import sys; import glasu.cli.doctor, glasu.network.doctor.server, glasu.network.doctor.machine;"
        "found = {'torch', 'torch_geometric', 'pyarrow'} & set(sys.modules); assert not found, found"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
