"""The commands as a user types them: good input, bad input, interruption."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glasu.cli.interrupts import Terminated
from glasu.cli.main import COMMANDS, main
from glasu.errors import ConfigError
from support.commands import GLASU, SMALL_RUN, Fake, assert_refused, glasu, replace_run
from support.warm_process import WarmProcess


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SMALL_RUN)
    return path


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_train_writes_a_report_with_the_fixed_fields_and_a_model(run_file, tmp_path):
    result = glasu("train", run_file, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "test accuracy" in result.stdout
    found = report(tmp_path / "run")
    for field in [
        "config",
        "test",
        "validation",
        "history",
        "traffic",
        "seconds",
        "weights_sha256",
        "privacy",
        "versions",
    ]:
        assert field in found
    assert set(found["history"][0]) >= {"round", "loss", "val_accuracy", "bytes", "seconds"}
    assert [entry["round"] for entry in found["history"]] == [2, 4]
    assert set(found["traffic"]) >= {
        "bytes_to_server", "bytes_to_clients", "messages", "exchanges", "by_kind", "by_phase",
    }  # fmt: skip
    assert set(found["seconds"]) == {"total", "sampling", "compute", "communication", "evaluation", "compiling"}
    assert len(found["weights_sha256"]) == 3
    assert (tmp_path / "run" / "model" / "model.toml").exists()


def test_quiet_shows_no_progress_and_set_overrides_the_file(run_file, tmp_path):
    out = tmp_path / "run"
    result = glasu("train", run_file, "--set", "train.seed=7", "--set", "model.hidden=4", "--out", out, "--quiet")
    assert result.returncode == 0
    assert result.stderr == ""
    assert report(out)["config"]["train"]["seed"] == 7
    assert report(out)["config"]["model"]["hidden"] == 4


@pytest.mark.parametrize(("file_format", "partition"), [("parquet", "features"), ("csv", "features"), ("csv", "apart")])
def test_training_from_split_folders_gives_the_weights_of_the_named_data_set(
    run_file, tmp_path, file_format, partition
):
    chosen = ("--set", f"data.partition={partition}")
    assert glasu("train", run_file, *chosen, "--out", tmp_path / "named", "--quiet").returncode == 0
    result = glasu("split", run_file, *chosen, "--out", tmp_path / "parties", "--format", file_format)
    assert result.returncode == 0, result.stderr
    assert sorted(folder.name for folder in (tmp_path / "parties").iterdir()) == ["a", "b", "c"]
    config = SMALL_RUN[SMALL_RUN.index("[model]") :]
    (tmp_path / "folders.toml").write_text('[data]\nparties = ["parties/a", "parties/b", "parties/c"]\n' + config)
    result = glasu("train", tmp_path / "folders.toml", "--out", tmp_path / "folders", "--quiet")
    assert result.returncode == 0, result.stderr
    assert report(tmp_path / "folders")["weights_sha256"] == report(tmp_path / "named")["weights_sha256"]


def test_split_never_overwrites_a_party(run_file, tmp_path):
    assert glasu("split", run_file, "--out", tmp_path).returncode == 0
    assert_refused(glasu("split", run_file, "--out", tmp_path), "party.toml", "not overwritten")


@pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
def test_predict_writes_one_row_per_node_with_a_probability_per_class(run_file, tmp_path, name):
    from pyarrow import csv, parquet

    assert glasu("train", run_file, "--out", tmp_path / "run", "--quiet").returncode == 0
    result = glasu("predict", tmp_path / "run", "--out", tmp_path / name)
    assert result.returncode == 0, result.stderr
    table = csv.read_csv(tmp_path / name) if name.endswith("csv") else parquet.read_table(tmp_path / name)
    assert table.column_names == ["id", "prediction", "p_0", "p_1", "p_2"]
    assert table.num_rows == 60
    for row in table.to_pylist():
        probabilities = [row["p_0"], row["p_1"], row["p_2"]]
        assert sum(probabilities) == pytest.approx(1, abs=1e-5)
        assert probabilities[int(row["prediction"])] == max(probabilities)


def test_predict_needs_no_labels_and_takes_the_data_from_elsewhere(run_file, tmp_path):
    from dataclasses import replace

    from glasu.data.folders import read_party, write_party

    assert glasu("split", run_file, "--out", tmp_path / "parties", "--format", "csv").returncode == 0
    folders = [tmp_path / "parties" / name for name in "abc"]
    listed = json.dumps([str(folder) for folder in folders])
    (tmp_path / "folders.toml").write_text(f"[data]\nparties = {listed}\n" + SMALL_RUN[SMALL_RUN.index("[model]") :])
    assert glasu("train", tmp_path / "folders.toml", "--out", tmp_path / "run", "--quiet").returncode == 0
    result = glasu("predict", tmp_path / "run", "--out", tmp_path / "known.csv")
    assert result.returncode == 0, result.stderr
    for folder in folders:
        blind = replace(read_party(folder), labels=None, classes=(), splits=None)
        write_party(blind, tmp_path / "blind" / folder.name)
        manifest = (tmp_path / "blind" / folder.name / "party.toml").read_text()
        assert "label" not in manifest
        assert "split" not in manifest
    elsewhere = "data.parties=" + json.dumps([str(tmp_path / "blind" / name) for name in "abc"])
    result = glasu("predict", tmp_path / "run", "--set", elsewhere, "--out", tmp_path / "blind.csv")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "blind.csv").read_bytes() == (tmp_path / "known.csv").read_bytes()
    assert_refused(
        glasu("train", tmp_path / "folders.toml", "--set", elsewhere, "--out", tmp_path / "no"), "has no labels"
    )


def test_predict_takes_settings_of_the_data_only(run_file, tmp_path):
    assert glasu("train", run_file, "--out", tmp_path / "run", "--quiet").returncode == 0
    for override in ("train.seed=1", "model.hidden=4", "trian.seed=1", "seed=1"):
        result = glasu("predict", tmp_path / "run", "--set", override, "--out", tmp_path / "p.csv")
        assert_refused(result, override, "only [data]")
    result = glasu("predict", tmp_path / "run", "--set", "data.sead=1", "--out", tmp_path / "p.csv")
    assert_refused(result, "data.sead", "did you mean 'seed'")
    assert not (tmp_path / "p.csv").exists()
    other = glasu("predict", tmp_path / "run", "--set", "data.num_nodes=70", "--out", tmp_path / "p.csv")
    assert other.returncode == 0, other.stderr
    assert "70 nodes" in other.stdout


def test_predict_with_a_standalone_model_needs_to_know_whose(run_file, tmp_path):
    run = tmp_path / "run"
    result = glasu("train", run_file, "--set", "train.method=standalone", "--out", run, "--quiet")
    assert result.returncode == 0, result.stderr
    unnamed = glasu("predict", run, "--out", tmp_path / "p.csv")
    assert_refused(unnamed, "--party NAME", "a, b, c")
    assert "None" not in unnamed.stderr
    assert_refused(glasu("predict", run, "--party", "z", "--out", tmp_path / "p.csv"), "'z'", "a, b, c")
    found = set()
    for name in "abc":
        result = glasu("predict", run, "--party", name, "--out", tmp_path / f"{name}.csv")
        assert result.returncode == 0, result.stderr
        found.add((tmp_path / f"{name}.csv").read_bytes())
    assert len(found) == 3


@pytest.mark.parametrize("run_dir", ["run", "run/model"])
def test_predict_takes_the_folder_of_the_run_or_of_the_model(run_file, tmp_path, run_dir):
    assert glasu("train", run_file, "--out", tmp_path / "run", "--quiet").returncode == 0
    assert glasu("predict", tmp_path / run_dir, "--out", tmp_path / "p.csv").returncode == 0


def test_split_writes_what_the_parties_hold_whatever_method_would_train_on_it(run_file, tmp_path):
    method = ["--set", "train.method=simulated", "--set", "train.backward=joint"]
    for name, overrides in (("plain", []), ("simulated", method), ("central", ["--set", "train.method=centralized"])):
        result = glasu("split", run_file, *overrides, "--out", tmp_path / name, "--format", "csv")
        assert result.returncode == 0, result.stderr
    for file in ("a/nodes.csv", "b/edges.csv", "c/edges.csv", "c/party.toml"):
        expected = (tmp_path / "plain" / file).read_bytes()
        assert (tmp_path / "simulated" / file).read_bytes() == expected
        assert (tmp_path / "central" / file).read_bytes() == expected


BAD_SETTINGS = [
    (["model.aggregation_layers=[0, 5]"], ["aggregation_layers=[0, 5]", "0..1"]),
    (["model.aggregation_layers=[0]"], ["aggregation_layers=[0]", "end with 1"]),
    (["model.aggregation_layers=[-1, 1]"], ["aggregation_layers=[-1, 1]"]),
    (["train.num_local_steps=0"], ["num_local_steps=0", "[1, 2^31-1]"]),
    (["model.backbone=gnc"], ["backbone='gnc'", '"gcn"']),
    (["train.backward=joint", "model.aggregation_layers=[]"], ["backward", "joint", "local"]),
    (["train.lerning_rate=1"], ["lerning_rate", "learning_rate"]),
    (["trian.seed=1"], ["[trian]", "train"]),
    (["train.seed"], ["section.key=value"]),
    (["model.hidden=wide"], ["hidden='wide'", "integer"]),
    (["model.backbone=gat", "model.heads=3"], ["heads=3", "hidden=8"]),
    (["data.name=corra"], ["corra", "cora"]),
    (["train.labels=z"], ["'z'", '"a", "b", "c"']),
    (["data.split=[0.0, 0.5, 0.5]"], ["split"]),
    (["data.num_clients=10"], ["10"]),
    (["data.name=demo", "data.num_clients=2"], ["data.num_clients=2", "in 'demo' is 3", "set it to 3"]),
    (["train.sampler=full", "train.blocks=induced"], ["train.blocks='induced'", 'sampler="full"', "remove it"]),
    (["privacy.dp_noise_multiplier=0.0001"], ["dp_noise_multiplier=0.0001", "must be at least"]),
    (["privacy.secure_aggregation=paillier"], ["secure_aggregation='paillier'", '"none"', '"masks"', '"ckks"']),
    (["privacy.secure_aggregation=ckks", "model.aggregation=concat"], ['model.aggregation="concat"', "ckks"]),
    (["privacy.secure_aggregation=masks", "model.aggregation=concat"], ['model.aggregation="concat"', "masks"]),
    (["wire.precision=int4"], ["precision='int4'", '"int8"']),
    (["train.method=ensemble", "train.labels=a"], ["labels='a'"]),
    (["train.task=multilabel"], ['train.task="multilabel"', 'train.task = "multiclass"']),
    (["train.task=binary"], ["one of two classes", "of 3 classes", 'train.task = "multiclass"']),
    (["train.task=regression"], ["one number per node", 'train.task = "multiclass"', 'label_type = "number"']),
    (["train.class_weights=[1, 2]"], ["class_weights=[1.0, 2.0]", "there are 3 classes", "one weight per class"]),
    (["train.class_weights=[1, 0, 2]"], ["class_weights", "above 0"]),
    (["train.class_weights=even"], ["class_weights='even'", '"balanced"']),
    (["train.task=multilabel", "train.class_weights=balanced"], ["class_weights='balanced'", "no class weights"]),
    (["privacy.target_epsilon=3.0"], ["target_epsilon=3.0", "no effect"]),
    (["train.checkpoint_every=-1"], ["checkpoint_every=-1", "0 means never"]),
    (["train.prefetch=2000"], ["prefetch=2000", "1024"]),
    (["data.seed=-1"], ["data.seed=-1"]),
    (["data.partition=aprat"], ["data.partition='aprat'", '"apart"']),
    (["data.partition=relations"], ['data.partition="relations"', "one graph"]),
    (["data.name=demo", "data.partition=apart"], ["data.partition='apart'", "'demo' consists of 3 parties", "remove"]),
    (["data.correlation=0.1"], ["data.correlation=0.1", "no effect", "remove it"]),
    (["data.edge_fraction=-0.5"], ["edge_fraction=-0.5", "[0, 1]"]),
    (["train.seed=" + "9" * 5000], ["train.seed='999", "integer"]),
    (["train.seed=0x" + "f" * 5000], ["train.seed=", "thousands of digits"]),
    (["model.hidden=99999999999999"], ["hidden=99999999999999", "2^31"]),
]


def test_encryption_without_its_package_is_refused_in_one_line(run_file, tmp_path):
    (tmp_path / "tenseal.py").write_text("raise ImportError\n")  # in place of the package
    words, log = ["--set", "privacy.secure_aggregation=ckks", "--out", str(tmp_path / "run")], tmp_path / "log"
    process = WarmProcess(["train", str(run_file), *words], log, path=[tmp_path])
    assert process.wait(240) == 2
    errors = log.read_text()
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].endswith(
        "needs the package tenseal, which is not installed; pip install 'glasu[ckks]'."
    )
    assert not (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(("settings", "words"), BAD_SETTINGS, ids=lambda item: ",".join(item)[:40])
def test_a_bad_setting_is_one_line_that_names_it_and_exit_code_2(run_file, tmp_path, settings, words):
    overrides = [word for setting in settings for word in ("--set", setting)]
    assert_refused(glasu("train", run_file, *overrides, "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("glasu", "round 0: the loss is"),
        ("standalone", "round 0: the loss is"),
        ("simulated", "representation: expected finite values, got NaN or infinity"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(overflow|invalid value).*:RuntimeWarning")
def test_a_run_that_diverges_is_one_line_exit_code_1_and_leaves_its_ledgers(run_file, tmp_path, method, found):
    overrides = ["--set", "train.learning_rate=1e30", "--set", f"train.method={method}"]
    result = glasu("train", run_file, *overrides, "--out", tmp_path / "run", "--quiet")
    *before, result.stderr = result.stderr.splitlines()
    assert all("removed" in line and "round-00000001.checkpoint" in line for line in before)
    assert_refused(result, "glasu train: party", found, "raining diverged", "learning_rate", code=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ledger"]


@pytest.mark.parametrize("method", ["glasu", "standalone", "centralized"])
def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_built(run_file, tmp_path, method):
    overrides = ["--set", "model.hidden=1000000000", "--set", f"train.method={method}"]
    result = glasu("train", run_file, *overrides, "--out", tmp_path / "deep" / "run", "--quiet")
    assert_refused(
        result, "glasu train: model.hidden=1000000000, ", "the model needs at least", "Choose smaller values."
    )
    assert not (tmp_path / "deep").exists()


def test_a_folder_in_the_place_of_the_report_is_refused_before_training(run_file, tmp_path):
    (tmp_path / "run" / "report.json").mkdir(parents=True)
    assert_refused(
        glasu("train", run_file, "--out", tmp_path / "run", "--quiet"), "report.json", "choose another --out"
    )
    assert list((tmp_path / "run" / "report.json").iterdir()) == []
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("error", [MemoryError("too large"), OSError(28, "No space left on device")], ids=repr)
def test_a_machine_that_is_too_small_is_one_line_and_exit_code_1(run_file, tmp_path, error):
    def fail(args: argparse.Namespace) -> None:
        raise error

    for command in ("train", "split"):
        result = glasu(command, run_file, "--out", tmp_path / "run", commands=replace_run(command, fail))
        assert_refused(result, f"glasu {command}: ", type(error).__name__, str(error), code=1)


def test_a_missing_or_broken_run_file_is_one_line(tmp_path):
    assert_refused(glasu("train", tmp_path / "none.toml", "--out", tmp_path), "none.toml", "cannot be read")
    (tmp_path / "broken.toml").write_text("[data\nname = 1")
    assert_refused(glasu("train", tmp_path / "broken.toml", "--out", tmp_path), "broken.toml", "line 1")


def test_an_unknown_command_or_flag_is_one_line(run_file):
    assert_refused(glasu("trian", run_file), "trian")
    assert_refused(glasu("train", run_file, "--outt", "x"), "--out")


@pytest.mark.parametrize(
    ("words", "prog"),
    [
        (["train", "run.toml", "--out", "x", "--sed", "1"], "glasu train"),
        (["provision", "pin", "kit", "--sed"], "glasu provision pin"),
        (["audit", "runs/a", "runs/b"], "glasu audit"),
    ],
)
def test_an_unknown_argument_names_the_help_of_its_command(words, prog):
    refused = glasu(*words)
    assert_refused(refused, f"{prog}: unrecognized arguments: ", f"; see {prog} --help")


def party(folder: Path, *, nodes: str, edges: str, more: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "party.toml").write_text(
        f'schema = 1\nname = "{folder.name}"\nid = "id"\nsource = "source"\ntarget = "target"\n'
        f'label = "y"\nsplit = "split"\n{more}'
    )
    (folder / "nodes.csv").write_text(nodes)
    (folder / "edges.csv").write_text(edges)
    return folder


NODES = "id,f,y,split\n1,0.5,u,train\n2,1.5,v,train\n3,2.5,u,validation\n4,3.5,v,test\n"
EDGES = "source,target\n1,2\n2,1\n3,4\n"


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        (NODES.replace("1.5", "nan"), EDGES, ["nodes.csv", "'f'", "row 2"]),
        (NODES.replace("1.5", "many"), EDGES, ["nodes.csv", "'f'", "row 2"]),
        (NODES, EDGES + "9,1\n", ["edges.csv", "'source'", "row 4"]),
        (NODES.replace("train", "test"), EDGES, ["train"]),
        (NODES.replace("4,3.5", "3,3.5"), EDGES, ["nodes.csv", "'id'"]),
        (NODES.replace("train", "trian"), EDGES, ["split", "row 1"]),
        (NODES.replace("5,v", "5,u"), EDGES, ["class"]),
        ("id,y,split\n1,u,train\n2,v,train\n3,u,test\n4,v,test\n", EDGES, ["feature"]),
    ],
    ids=["nan", "text", "edge", "no training", "twice", "split", "one class", "no feature"],
)
def test_bad_party_files_are_one_line_that_names_file_and_column(tmp_path, nodes, edges, words):
    party(tmp_path / "a", nodes=NODES, edges=EDGES)
    party(tmp_path / "b", nodes=nodes, edges=edges)
    (tmp_path / "run.toml").write_text('[data]\nparties = ["a", "b"]\n[train]\nnum_rounds = 1\n')
    assert_refused(glasu("train", tmp_path / "run.toml", "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('classes = ["u", "w"]\n', ["nodes.csv", "'y'", "row 2", "2 classes"]),
        ('classes = ["v", "u"]\n', ["classes of 'a' and 'b' differ"]),
        ('classes = ["u", "v", "w"]\n', ["classes of 'a' and 'b' differ"]),
        ('classes = ["u"]\n', ["nodes.csv", "'y'", "row 2"]),
    ],
    ids=["a label that is no class", "another order", "one more", "one"],
)
def test_classes_that_do_not_fit_are_one_line(tmp_path, more, words):
    party(tmp_path / "a", nodes=NODES, edges=EDGES)
    party(tmp_path / "b", nodes=NODES, edges=EDGES, more=more)
    (tmp_path / "run.toml").write_text('[data]\nparties = ["a", "b"]\n[train]\nnum_rounds = 1\n')
    assert_refused(glasu("train", tmp_path / "run.toml", "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run" / "report.json").exists()


def test_parties_without_common_nodes_are_refused(tmp_path):
    party(tmp_path / "a", nodes=NODES, edges=EDGES)
    other = "id,f,y,split\n7,0.5,u,train\n8,1.5,v,test\n"
    party(tmp_path / "b", nodes=other, edges="source,target\n7,8\n")
    (tmp_path / "run.toml").write_text('[data]\nparties = ["a", "b"]\n')
    assert_refused(glasu("train", tmp_path / "run.toml", "--out", tmp_path / "run"), "common")


def test_a_model_is_refused_for_parties_of_another_number(run_file, tmp_path):
    out = tmp_path / "run"
    assert glasu("train", run_file, "--set", "model.aggregation=concat", "--out", out, "--quiet").returncode == 0
    manifest = out / "model" / "model.toml"
    manifest.write_text(manifest.read_text().replace("num_clients = 3", "num_clients = 2"))
    assert_refused(glasu("predict", out, "--out", tmp_path / "p.csv"), "a, b, c", "a, b.")


def test_predict_without_a_model_or_with_another_file_type_is_one_line(tmp_path):
    assert_refused(glasu("predict", tmp_path, "--out", tmp_path / "p.csv"), "holds no model")
    assert_refused(glasu("predict", tmp_path, "--out", tmp_path / "p.txt"), ".parquet or .csv")


MANY_ROUNDS = ("--set", "train.num_rounds=40")


@pytest.fixture(scope="module")
def unbroken_report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return the report of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "run.toml").write_text(SMALL_RUN)
    result = glasu("train", folder / "run.toml", *MANY_ROUNDS, "--out", folder / "run", "--quiet")
    assert result.returncode == 0, result.stderr
    return report(folder / "run")


@pytest.mark.parametrize(
    ("sent", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_an_interrupted_run_resumes_when_the_command_is_repeated(run_file, tmp_path, unbroken_report, sent, code):
    out, log = tmp_path / "run", tmp_path / "log"
    log.touch()
    process = WarmProcess(["train", str(run_file), *MANY_ROUNDS, "--out", str(out)], log)
    while "round 4:" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.001)
    process.send_signal(sent)
    assert process.wait(60) == code
    errors = log.read_text()
    assert "Traceback" not in errors
    assert ("start the same command again to resume" in errors) == (sent != signal.SIGKILL)
    left = {".lock"} if sent == signal.SIGKILL else set()  # the system has released this lock
    assert {path.name for path in out.iterdir()} == {"checkpoints", "ledger"} | left  # nothing is half written

    again = glasu("train", run_file, *MANY_ROUNDS, "--out", out)
    assert again.returncode == 0, again.stderr
    assert "resuming after round" in again.stderr
    assert not (out / "checkpoints").exists()
    resumed = report(out)
    for field in ("weights_sha256", "test", "validation", "losses", "config"):
        assert resumed[field] == unbroken_report[field]
    for found, expected in zip(resumed["history"], unbroken_report["history"], strict=True):
        assert found.keys() == expected.keys()
        assert all(found[key] == expected[key] for key in found if key not in ("bytes", "exchanges", "seconds"))
    moved = [
        sum(each["traffic"][key] for key in ("bytes_to_server", "bytes_to_clients"))
        for each in (resumed, unbroken_report)
    ]
    assert moved[0] >= moved[1]
    audited = glasu("audit", out)
    assert audited.returncode == 0, audited.stderr
    assert "2 processes" in audited.stdout  # the entries of the first one stay


def test_a_folder_with_an_unfinished_run_accepts_another_run_only_with_fresh(run_file, tmp_path):
    from glasu.config import RunConfig
    from glasu.data.sources.catalog import load_parties
    from support.tiny import simulate

    class CrashError(Exception):
        pass

    def crash(event):
        if getattr(event, "split", None) == "validation" and event.round == 4:
            raise CrashError

    out = tmp_path / "run"
    config = RunConfig.from_toml(run_file)
    with pytest.raises(CrashError):
        simulate(load_parties(config), config, observer=crash, checkpoints=out / "checkpoints")
    kept = sorted(path.name for path in (out / "checkpoints").glob("*.checkpoint"))
    assert kept == ["round-00000002.checkpoint", "round-00000003.checkpoint"]

    other = ("train", run_file, "--set", "train.seed=1", "--out", out, "--quiet")
    assert_refused(glasu(*other), "unfinished run", "train.seed = 0 there, 1 here", "--fresh")
    assert sorted(path.name for path in (out / "checkpoints").glob("*.checkpoint")) == kept
    result = glasu(*other, "--fresh")
    assert result.returncode == 0, result.stderr
    for name in kept:
        assert name in result.stderr  # printed with --quiet too: a removal is never silent
    assert report(out)["config"]["train"]["seed"] == 1
    assert glasu("train", run_file, "--set", "train.seed=1", "--out", tmp_path / "new", "--quiet").returncode == 0
    assert report(out)["weights_sha256"] == report(tmp_path / "new")["weights_sha256"]
    assert report(out)["traffic"] == report(tmp_path / "new")["traffic"]


def test_two_commands_cannot_train_in_one_folder(run_file, tmp_path):
    from glasu.files import hold_folder

    with hold_folder(tmp_path / "run" / "checkpoints"):
        assert_refused(
            glasu("train", run_file, "--out", tmp_path / "run", "--quiet"), "another command is using this folder"
        )


HELP = """
import sys
from glasu.cli.main import build_parser
for command in sys.argv[1:]:
    try:
        build_parser().parse_args([command, "--help"])
    except SystemExit:
        pass
    heavy = {"torch", "numpy", "pyarrow", "rich", "plotly", "cryptography", "grpc", "optuna"} & set(sys.modules)
    assert not heavy, (command, heavy)
"""


def test_help_has_one_example_and_loads_nothing_heavy():
    words = [sys.executable, "-c", HELP, *COMMANDS]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    for command in COMMANDS:
        assert len(re.findall(f"example: glasu {command}\\b", result.stdout)) == 1


def test_demo_compares_six_methods_and_leaves_a_self_contained_page(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = glasu("demo", "--rounds", "2", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    for name in ("centralized", "standalone", "ensemble", "smooth", "GLASU Q=1", "GLASU Q=4", "best party"):
        assert name in result.stdout
    for name in ("profile", "follower", "reading"):
        assert name in result.stdout
    table = result.stdout.split("standalone is the mean")[0]
    assert "…" not in table  # nothing is cut in a terminal of 80 columns
    for heading in ("accuracy", "macro F1", "loss", "MB", "exchanges", "seconds", "best at"):
        assert heading in table
    page = (tmp_path / "report.html").read_text()
    assert "<script src=" not in page
    assert "<link" not in page
    assert "GLASU Q=4" in page
    alone = report(tmp_path / "standalone")
    validation, test = (
        [*alone[split]["per_client"], *alone[split]["per_client_propagation"]] for split in ("validation", "test")
    )
    pairs = [pair for pair in zip(validation, test, strict=True) if pair[0] is not None]
    best = f"{100 * max(pairs, key=lambda pair: pair[0])[1]:.1f} %"
    assert f"<td>best party</td><td>{best}</td>" in re.sub(r' class="words"', "", page)
    assert re.search(rf"best party +{best}", table)
    assert report(tmp_path / "standalone")["traffic"]["messages"] == 0
    assert len(report(tmp_path / "standalone")["test"]["per_client"]) == 3


def test_the_broken_pipe_of_a_reader_is_no_traceback(tmp_path):
    words = [*GLASU, "provision", "--parties", "a", "--host", "localhost", "--out", str(tmp_path / "kits")]
    script = f"{' '.join(words)} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr == ""


def test_out_that_cannot_be_a_folder_is_refused_before_training(run_file, tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(glasu("train", run_file, "--out", tmp_path / "file" / "run"), "--out", "choose another folder")


def test_the_installed_command_refuses_bad_input_with_one_line_and_exit_code_2(run_file, tmp_path):
    words = [*GLASU, "train", str(run_file), "--set", "train.num_local_steps=0", "--out", str(tmp_path / "run")]
    assert_refused(subprocess.run(words, capture_output=True, text=True, timeout=60, check=False), "num_local_steps=0")


def test_a_step_that_diverges_at_the_very_end_fails_too(run_file, tmp_path):
    changes = ["train.learning_rate=1e30", "train.num_rounds=1", "train.num_local_steps=1"]
    overrides = [word for change in changes for word in ("--set", change)]
    result = glasu("train", run_file, *overrides, "--out", tmp_path / "run", "--quiet")
    assert result.returncode == 1
    assert "learning_rate" in result.stderr
    assert not (tmp_path / "run" / "report.json").exists()


def test_an_unforeseen_fault_is_one_line_and_exit_code_1(run_file, tmp_path, monkeypatch):
    def fault(args: argparse.Namespace) -> None:
        raise RuntimeError("not enough memory: you tried to allocate\n1 TB")

    commands = replace_run("train", fault)
    result = glasu("train", run_file, "--out", tmp_path / "run", "--quiet", commands=commands)
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert "not enough memory" in result.stderr
    monkeypatch.setenv("GLASU_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="not enough memory"):
        glasu("train", run_file, "--out", tmp_path / "run", "--quiet", commands=commands)


def test_an_unforeseen_fault_between_organisations_quotes_nothing():
    def fault(args: argparse.Namespace) -> None:
        raise KeyError("P-canary-17")

    words = ["join", "a", "--server", "localhost:1", "--kit", "kit", "--out", "out"]
    result = glasu(*words, commands=replace_run("join", fault))
    assert result.returncode == 1
    said = result.stderr
    assert said.startswith("glasu join: failed: KeyError; set GLASU_TRACEBACK=1")
    assert "canary" not in said


def test_a_party_is_named_once_for_a_prediction_without_some_parties(run_file, tmp_path):
    assert glasu("train", run_file, "--out", tmp_path / "run", "--quiet").returncode == 0
    assert_refused(
        glasu("predict", tmp_path / "run", "--parties", "a,a", "--out", tmp_path / "p.csv"), "'a' is named twice"
    )


def test_a_joint_model_predicts_for_all_parties_and_accepts_no_party_name(run_file, tmp_path):
    assert glasu("train", run_file, "--out", tmp_path / "run", "--quiet").returncode == 0
    assert_refused(
        glasu("predict", tmp_path / "run", "--party", "a", "--out", tmp_path / "p.csv"),
        "party='a'",
        "the parties predict together",
    )


@pytest.mark.parametrize("words", [["demo"], ["train", "run.toml"], ["split", "run.toml"], ["reproduce", "accuracy"]])
def test_an_empty_output_folder_is_refused(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--out", ""])
    assert stopped.value.code == 2
    assert "--out: the path is empty" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf", "soon"])
@pytest.mark.parametrize("command", ["serve", "join", "doctor"])
def test_a_time_that_is_none_is_refused(command, seconds):
    words = {
        "serve": ["run.toml", "--listen", "localhost:0"],
        "join": ["a", "--server", "localhost:1"],
        "doctor": ["a", "--server", "localhost:1"],
    }
    assert_refused(
        glasu(command, *words[command], "--kit", "kit", "--out", "out", "--wait", seconds),
        f"argument --wait: {seconds!r} must be a number of seconds, 0 or more",
    )


@pytest.mark.parametrize("memory", ["nan", "0", "inf", "1e300", "much"])
def test_a_memory_limit_that_is_none_is_refused(memory):
    words = ("a", "--server", "localhost:1", "--kit", "kit", "--out", "out")
    assert_refused(
        glasu("join", *words, "--max-memory", memory), f"--max-memory: {memory!r} must be a positive number of GiB"
    )


@pytest.mark.parametrize("named", ["", "model"])
def test_predict_says_of_one_partys_part_how_to_predict_with_it(named, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "joining.json").write_text("{}")
    words = ("holds the model of one party", "glasu join", "--predict", str(tmp_path))
    assert_refused(glasu("predict", tmp_path / named, "--out", tmp_path / "p.csv"), *words)


@pytest.mark.parametrize(("kind", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_an_interruption_before_the_command_or_while_it_ends_has_its_exit_code_too(kind, code):
    class InterruptedError(ConfigError):
        def __str__(self) -> str:
            raise kind

    def interrupt(parser: argparse.ArgumentParser) -> None:
        raise kind

    def fail(args: argparse.Namespace) -> None:
        raise InterruptedError("interrupted while it is shown")

    before, ending = {"train": Fake(interrupt, fail)}, replace_run("train", fail)
    for commands in (before, ending):
        assert glasu("train", "no-such-file.toml", "--out", "nowhere", commands=commands).returncode == code
