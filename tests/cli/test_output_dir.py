"""An --out folder that holds something else is refused in one line, before anything is written to it."""

from __future__ import annotations

import json
import shutil

import pytest

from glasu.files import hold_folder
from glasu.pki.provision import provision
from support.commands import SMALL_RUN, assert_refused, glasu


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a folder with settings, data, kits, and one of every kind of result."""
    here = tmp_path_factory.mktemp("world")
    (here / "run.toml").write_text(SMALL_RUN)
    provision(here / "kits", ["a", "b", "c"], ["localhost"])
    assert glasu("split", here / "run.toml", "--out", here / "parties").returncode == 0
    assert glasu("train", here / "run.toml", "--out", here / "trained", "--quiet").returncode == 0
    for name, file, content in (
        ("server", "serving.json", {"run": "00", "closed": True}),
        ("joined", "joining.json", {"run": "00", "party": "b"}),
        ("unfinished", "checkpoints/run.json", {}),
        ("request", "key.pem", {}),
    ):
        (here / name / file).parent.mkdir(parents=True)
        (here / name / file).write_text(json.dumps(content))
    (here / "joined" / "report.json").write_text('{"party": "b"}')
    (here / "server" / "report.json").write_text("{}")
    return here


HOLDS = {
    "trained": "results of glasu train",
    "unfinished": "results of glasu train",
    "server": "results of a server",
    "joined": "results of party 'b'",
    "kits/a": "a kit",
    "request": "a private key",
    "kits/ca": "the CA and the kits",
    "kits": "the CA and the kits",
    "parties/a": "a party's data",
}
OWN = {"train": ("trained", "unfinished"), "serve": ("server",), "doctor --listen": ("server",)}


def words(world, command, out):
    at_party = ["--server", "localhost:1", "--kit", world / "kits" / "a", "--out", out, "--wait", "0"]
    at_server = ["--listen", "127.0.0.1:0", "--kit", world / "kits" / "server", "--out", out, "--wait", "0"]
    return {
        "train": ["train", world / "run.toml", "--out", out],
        "serve": ["serve", world / "run.toml", *at_server],
        "serve --predict": ["serve", world / "run.toml", *at_server, "--predict"],
        "join": ["join", world / "parties" / "a", *at_party],
        "join --fresh": ["join", world / "parties" / "a", *at_party, "--fresh"],
        "join --predict": ["join", world / "parties" / "a", *at_party, "--predict"],
        "doctor --server": ["doctor", world / "parties" / "a", *at_party],
        "search": ["search", world / "run.toml", "--out", out, "--trials", "1"],
        "demo": ["demo", "--out", out, "--rounds", "1"],
        "split": ["split", world / "run.toml", "--out", out],
        "doctor --listen": ["doctor", world / "run.toml", *at_server],
    }[command]


COMMANDS = (
    "train",
    "serve",
    "serve --predict",
    "join",
    "join --fresh",
    "join --predict",
    "doctor --server",
    "doctor --listen",
    "search",
    "demo",
    "split",
)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("out", HOLDS)
def test_a_folder_of_another_role_or_kind_is_refused_and_left_as_it_is(world, command, out):
    if out in OWN.get(command.removesuffix(" --predict"), ()):
        pytest.skip("the command may continue in this folder")
    before = files(world)
    assert_refused(
        glasu(*words(world, command, world / out)), f"--out {world / out}: holds {HOLDS[out]}", "choose another"
    )
    assert files(world) == before


@pytest.mark.parametrize("quiet", [[], ["--quiet"]], ids=["", "quiet"])
def test_a_finished_run_is_not_trained_again_and_the_command_reports_it(quiet, world):
    before = files(world / "trained")
    again = glasu("train", world / "run.toml", "--out", world / "trained", *quiet)
    assert again.returncode == 0
    assert (
        f"{world / 'trained'}: this run is finished, see report.json there; to train again, give --fresh"
        in again.stdout
    )
    assert again.stderr == ""
    assert files(world / "trained") == before


@pytest.mark.parametrize("change", [["--fresh"], ["--baselines"], []], ids=["fresh", "baselines", "no model"])
def test_a_finished_run_is_trained_again_where_something_is_missing_or_on_request(change, world, finished_run):
    before = json.loads((finished_run / "report.json").read_bytes())
    if not change:
        shutil.rmtree(finished_run / "model")
    assert glasu("train", world / "run.toml", "--out", finished_run, "--quiet", *change).returncode == 0
    after = json.loads((finished_run / "report.json").read_bytes())
    assert after["weights_sha256"] == before["weights_sha256"]
    assert after["seconds"] != before["seconds"]
    assert (finished_run / "model" / "model.toml").is_file()
    assert bool(after["baselines"]) == ("--baselines" in change)


@pytest.fixture
def finished_run(world, tmp_path):
    """Return the folder of a finished run that only this test uses."""
    return shutil.copytree(world / "trained", tmp_path / "finished")


@pytest.mark.parametrize(
    ("setting", "difference"),
    [
        ("train.seed=1", "train.seed = 0 there, 1 here"),
        ("model.aggregation_layers=[1]", "model.aggregation_layers = [0, 1] there, [1] here"),
        ("train.method=centralized", "train.method = 'glasu' there, 'centralized' here"),
        ("train.sampler=shared", "train.sampler = 'full' there, 'shared' here"),  # it was "auto"
    ],
)
def test_a_finished_run_with_other_settings_is_replaced_only_with_fresh(setting, difference, world, finished_run):
    before = files(finished_run)
    command = ["train", world / "run.toml", "--set", setting, "--out", finished_run, "--quiet"]
    assert_refused(
        glasu(*command),
        f"--out {finished_run}: holds a finished run with other",
        difference,
        "another --out",
        "--fresh",
    )
    assert files(finished_run) == before
    assert glasu(*command, "--fresh").returncode == 0
    assert files(finished_run) != before
    assert glasu(*command).returncode == 0  # it is this run's folder now


def test_faults_of_the_input_are_reported_before_a_finished_run_that_differs(world, finished_run, tmp_path):
    before, other = files(finished_run), ["--out", finished_run, "--set", "train.seed=1"]
    (tmp_path / "empty.toml").write_text("")
    assert_refused(glasu("train", world / "run.toml", *other, "--policy", tmp_path / "none.toml"), "cannot be read")
    assert_refused(glasu("train", tmp_path / "empty.toml", *other), "data.name")
    assert_refused(glasu("train", world / "run.toml", *other, "--set", "train.labels=z"), "'z'")
    assert files(finished_run) == before


def test_join_reports_the_kit_of_another_party_before_the_results_of_another_party(world):
    command = ["join", world / "parties" / "b", "--server", "localhost:1", "--wait", "0", "--out", world / "joined"]
    before = files(world)
    refused = glasu(*command, "--kit", world / "kits" / "a")
    assert_refused(refused, "the data belongs to party 'b' and the kit to party 'a'; use the kit of 'b'.")
    assert files(world) == before


@pytest.mark.parametrize("setting", ["train.sampler=full", "train.batch_size=0", "data.root=elsewhere"])
def test_settings_that_mean_the_same_run_are_no_difference(setting, world, finished_run):
    assert glasu("train", world / "run.toml", "--set", setting, "--out", finished_run, "--quiet").returncode == 0


def test_a_method_that_replaces_settings_can_run_again(world, tmp_path):
    command = ["train", world / "run.toml", "--set", "train.method=centralized", "--out", tmp_path / "out", "--quiet"]
    assert [glasu(*command).returncode for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"config": 3}', "[" * 5000, '{"config": {}, "overridden": {}, "parties": []}'],
    ids=["cut", "list", "empty", "type", "deep", "no party"],
)
def test_a_report_that_cannot_be_read_is_not_overwritten(content, world, tmp_path):
    (tmp_path / "report.json").write_text(content)
    assert_refused(glasu("train", world / "run.toml", "--out", tmp_path), f"{tmp_path / 'report.json'}: ", "--fresh")
    assert (tmp_path / "report.json").read_text() == content


def test_an_interrupted_run_that_replaces_another_can_resume(world, finished_run):
    """The old report is removed when the new run starts. Without --fresh the command would be refused."""
    command = ["train", world / "run.toml", "--set", "train.learning_rate=1e30", "--out", finished_run, "--quiet"]
    assert glasu(*command, "--fresh").returncode == 1  # it diverges
    assert not (finished_run / "report.json").exists()
    assert not (finished_run / "model" / "model.toml").exists()
    assert glasu(*command).returncode == 1


@pytest.mark.parametrize("out", HOLDS)
@pytest.mark.parametrize(("command", "name"), [("predict", "nodes.csv"), ("audit", "page.html")])
def test_a_page_or_a_table_is_not_written_among_what_belongs_to_others(world, command, name, out):
    if out == "trained":
        pytest.skip("the command reads this folder, and may write to it")
    before, file = files(world), world / out / name
    refused = glasu(command, world / "trained", "--out", file)
    assert_refused(refused, f"--out {file}: its folder holds {HOLDS[out]}", "choose another folder")
    assert files(world) == before


@pytest.mark.parametrize(("command", "name"), [("predict", "p.csv"), ("audit", "page.html")])
def test_a_page_or_a_table_is_written_to_the_folder_that_the_command_reads(world, finished_run, command, name):
    assert glasu(command, finished_run, "--out", finished_run / name).returncode == 0


@pytest.mark.parametrize(("command", "name"), [("predict", "p.csv"), ("audit", "page.html")])
def test_the_folder_of_a_page_or_a_table_must_exist(world, tmp_path, command, name):
    missing = tmp_path / "none" / "deep"
    refused = glasu(command, world / "trained", "--out", missing / name)
    assert_refused(refused, f"--out {missing / name}: {missing} is not an existing folder; create it")
    assert not missing.parent.exists()


def test_an_audit_page_cannot_replace_a_report(world, finished_run):
    before = files(finished_run)
    assert_refused(glasu("audit", finished_run, "--out", finished_run / "report.json"), "must end with .html")
    assert files(finished_run) == before


def test_split_writes_no_party_into_the_kit_of_that_party(world, tmp_path):
    shutil.copytree(world / "kits" / "a", tmp_path / "a")
    before = files(tmp_path)
    assert_refused(glasu("split", world / "run.toml", "--out", tmp_path), f"--out {tmp_path / 'a'}: holds a kit")
    assert files(tmp_path) == before


@pytest.mark.parametrize("command", ["train", "split", "search", "demo"])
def test_a_file_in_the_place_of_an_output_folder_is_named_as_a_file(world, tmp_path, command):
    (tmp_path / "out").write_text("")
    assert_refused(
        glasu(*words(world, command, tmp_path / "out")), f"--out {tmp_path / 'out'}: is a file, not a folder"
    )


def test_a_party_whose_folder_is_in_use_is_not_sent_to_another_folder(world):
    with hold_folder(world / "busy"):
        ended = glasu(*words(world, "join", world / "busy"))
    assert_refused(ended, "another command is using this folder; wait until it ends, or end it")


@pytest.mark.parametrize("out", ["parties/a", "server", "joined", "trained", "kits/a", "kits/ca"])
def test_kits_are_not_made_among_what_belongs_to_others(world, out):
    before = files(world)
    assert_refused(
        glasu("provision", "--parties", "x", "--host", "h", "--out", world / out), f"--out {world / out}: holds "
    )
    assert files(world) == before
