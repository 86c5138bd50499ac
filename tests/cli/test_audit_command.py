"""glasu audit, --policy and the ledgers of glasu train and glasu align, as commands."""

from __future__ import annotations

import json
import shutil

import pytest

from glasu.files import hold_folder
from support.commands import SMALL_RUN, assert_refused, glasu

POLICY = "max_evaluations = 100\nmax_releases_per_row = 1000\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a folder with settings, party folders, and a training with its ledgers."""
    here = tmp_path_factory.mktemp("audit")
    (here / "run.toml").write_text(SMALL_RUN)
    (here / "policy.toml").write_text(POLICY)
    assert glasu("split", here / "run.toml", "--out", here / "parties").returncode == 0
    done = glasu("train", here / "run.toml", "--out", here / "run", "--quiet", "--policy", here / "policy.toml")
    assert done.returncode == 0, done.stderr
    return here


def test_two_commands_never_write_to_the_same_ledger_at_once(world):
    run, parties = world / "run", [world / "parties" / name for name in "abc"]
    before = [path.read_bytes() for path in sorted((run / "ledger").glob("*.jsonl"))]
    report = (run / "report.json").read_bytes()
    with hold_folder(run):
        predicted = glasu("predict", run, "--out", world / "late.csv")
        trained = glasu("train", world / "run.toml", "--out", run, "--fresh")
    for done in (predicted, trained):
        assert_refused(done, f"{run}: another command is using this folder; wait ")
    with hold_folder(run / "ledger"):  # locked by a Python program
        done = glasu("predict", run, "--out", world / "late.csv")
    assert_refused(done, f"{run / 'ledger'}: another command is using this folder; wait until it ends, or end it.")
    assert not (world / "late.csv").exists()
    assert (run / "report.json").read_bytes() == report
    assert [path.read_bytes() for path in sorted((run / "ledger").glob("*.jsonl"))] == before
    with hold_folder(parties[1]):
        done = glasu("align", *parties, "--quiet")
    assert_refused(done, f"{parties[1]}: another command is using this folder; wait until it ends, or end it.")
    assert not any((party / "ledger.jsonl").exists() for party in parties)


def test_an_audit_prints_totals_and_writes_a_page(world):
    predicted = glasu("predict", world / "run", "--out", world / "predictions.csv")
    assert predicted.returncode == 0, predicted.stderr
    done = glasu("audit", world / "run")
    assert done.returncode == 0, done.stderr
    assert "representation" in done.stdout
    assert "prediction, run" in done.stdout
    assert "policy SHA-256" in done.stdout
    assert "FAILED" not in done.stdout
    assert "<h1>Data that left the parties a, b, c</h1>" in (world / "run" / "audit.html").read_text()
    found = json.loads(glasu("audit", world / "run", "--json", "--out", world / "page.html").stdout)
    assert [ledger["party"] for ledger in found["ledgers"]] == ["a", "b", "c"]
    assert {check["level"] for check in found["checks"]} == {"good"}
    assert (world / "page.html").is_file()


def test_a_broken_chain_is_one_line_and_exit_code_1(world, tmp_path):
    (tmp_path / "ledger").mkdir()
    lines = (world / "run" / "ledger" / "b.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "ledger" / "b.jsonl").write_bytes(b"".join(lines[:3] + lines[4:]))
    done = glasu("audit", tmp_path)
    assert_refused(done, "b.jsonl, line 4: does not follow from the records before it", code=1)
    assert ".;" not in done.stderr
    assert ".." not in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not valid JSON"),
        ("[1]", "is not a JSON object"),
        ("{}", "traffic: is missing"),
        ({"privacy": [1]}, "privacy=[1]: must be an object"),
        ({"privacy": {"ledger": 5}}, "privacy.ledger=5: must be a list"),
        ({"privacy": {"ledger": {"a": 1}}}, "privacy.ledger={'a': 1}: must be a list"),
        ({"privacy": {"ledger": [5]}}, "privacy.ledger[0]=5: must be an object"),
        ({"privacy": {"ledger": [{"party": "a"}]}}, "privacy.ledger[0].length: is missing"),
        (
            {"privacy": {"ledger": [{"party": "a\n", "head": "", "length": 1}]}},
            "privacy.ledger[0]: party 'a\\n': the name is used in file names",
        ),
        (
            {"privacy": {"ledger": [{"party": "a", "head": "", "length": -1}]}},
            "privacy.ledger[0].length=-1: must be at least 0",
        ),
        ({"traffic": None}, "traffic=None: must be an object"),
        ({"traffic": [1]}, "traffic=[1]: must be an object"),
        ({"traffic": {"bytes_to_server": 1}}, "traffic.headers_to_server: is missing"),
        (
            {"traffic": {"bytes_to_server": "many", "headers_to_server": 1.5}},
            "traffic.bytes_to_server='many': must be an integer; traffic.headers_to_server=1.5: must be an integer",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("file", ["report.json", "prediction.json"])
def test_a_damaged_report_is_one_line_with_the_file_the_fault_and_the_remedy(world, tmp_path, file, content, words):
    shutil.copytree(world / "run" / "ledger", tmp_path / "ledger")
    report = json.loads((world / "run" / "report.json").read_text())
    (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps({**report, **content}))
    done = glasu("audit", tmp_path)
    assert_refused(done, f"{tmp_path / file}: ", words, "Restore the file, or move it out of the folder")
    assert "report this" not in done.stderr
    (tmp_path / file).unlink()
    assert glasu("audit", tmp_path).returncode == 0  # the remedy helps


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"ledgers": [1]}, "ledgers=[1]: must be an object"),
        ({"ledgers": {"a": 5}}, "ledgers.a=5: must be an object"),
        ({"ledgers": {"a": {}}}, "ledgers.a.length: is missing"),
    ],
    ids=str,
)
def test_damaged_heads_of_a_server_are_one_line_with_the_file_the_fault_and_the_remedy(world, tmp_path, content, words):
    (tmp_path / "serving.json").write_text(json.dumps(content))
    done = glasu("audit", world / "run", "--peers", tmp_path)
    assert_refused(done, f"{tmp_path / 'serving.json'}: ", words, "Restore the file, or move it out of the folder")


def test_a_folder_without_ledgers_is_one_line_and_exit_code_2(world, tmp_path):
    assert_refused(glasu("audit", tmp_path), "holds no ledger")
    assert_refused(glasu("audit", tmp_path / "missing"), "is not a folder")
    assert_refused(glasu("audit", world / "run", "--peers", tmp_path), "holds neither a ledger")
    (tmp_path / "serving.json").write_text("{}")
    assert_refused(glasu("audit", tmp_path), "a server has no ledger")


def test_a_policy_that_forbids_a_training_is_one_line_and_nothing_is_written(world, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text('forbid = ["representation"]\n')
    words = ("train", world / "run.toml", "--out", tmp_path / "run", "--quiet", "--policy", policy)
    assert_refused(
        glasu(*words), "policy.toml: forbid = ['representation']", "change the settings of the run, or the policy"
    )
    assert not (tmp_path / "run").exists()
    policy.write_text('forbid = ["gradients"]\nmin_row = 3\n')
    assert_refused(glasu(*words), "forbid[0]='gradients'", "unknown key 'min_row'")


def test_the_policy_of_a_party_is_found_beside_its_data(world, tmp_path):
    run = (world / "run.toml").read_text()
    start = run.index("[data]")
    listed = json.dumps([str(world / "parties" / name) for name in "abc"])
    (tmp_path / "run.toml").write_text(f"[data]\nparties = {listed}\n" + run[run.index("[model]", start) :])
    (world / "parties" / "b" / "policy.toml").write_text('[require]\nrepresentation = ["masks"]\n')
    try:
        done = glasu("train", tmp_path / "run.toml", "--out", tmp_path / "run", "--quiet")
    finally:
        (world / "parties" / "b" / "policy.toml").unlink()
    assert_refused(done, "parties/b/policy.toml: require.representation = ['masks']: its protection is 'none'")


def test_an_alignment_writes_ledgers_and_obeys_the_policy(world, tmp_path):
    folders = []
    for name in "abc":
        folder = tmp_path / name
        folder.mkdir()
        for path in (world / "parties" / name).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        folders.append(folder)
    (folders[1] / "policy.toml").write_text("max_ids = 59\n")
    assert_refused(glasu("align", *folders, "--quiet"), "max_ids = 59: this party has 60 ids")
    assert not (folders[0] / "alignment.parquet").exists()
    (folders[1] / "policy.toml").write_text("max_ids = 60\n")
    done = glasu("align", *folders, "--quiet")
    assert done.returncode == 0, done.stderr
    found = json.loads(glasu("audit", folders[1], "--peers", folders[0], folders[2], "--json").stdout)
    (run,) = found["ledgers"][0]["runs"]
    assert {(each["kind"], each["protection"]): each["releases"] for each in run["totals"]} == {
        ("set size", "none"): 1,
        ("key share", "blinded"): 2,
        ("blinded ids", "blinded"): 3,
    }
    assert {each["kind"]: each["rows"] for each in run["totals"]}["blinded ids"] == 180
    assert {check["level"] for check in found["checks"]} == {"good"}


@pytest.mark.parametrize(
    "keys",
    [
        {"privacy.profile": "server"},
        {"privacy.profile": "server", "train.labels": "b"},
        {"privacy.profile": "server", "train.labels": "b", "train.backward": "joint"},
        {"privacy.profile": "server", "train.warm_start": "3", "train.preset": "none"},
        {"privacy.profile": "lean", "model.aggregation_layers": "[3]", "train.labels": "c"},
        {"privacy.profile": "dp"},
        {"train.release": "once"},
        {"train.method": "smooth"},
        {"wire.feedback": "true"},
    ],
    ids=str,
)
def test_the_ledgers_hold_every_byte_that_left(keys, tmp_path):
    (tmp_path / "run.toml").write_text('[data]\nname = "synthetic"\nnum_nodes = 60\n[train]\nnum_rounds = 4\n')
    changes = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    done = glasu("train", tmp_path / "run.toml", *changes, "--out", tmp_path / "run", "--quiet")
    assert done.returncode == 0, done.stderr
    audited = glasu("audit", tmp_path / "run")
    assert audited.returncode == 0, audited.stderr
    assert "FAILED" not in audited.stdout
    for text in (audited.stdout, (tmp_path / "run" / "audit.html").read_text()):
        assert ("epsilon 4.38 if a row becomes zero" in text) == ("dp" in keys.values())
