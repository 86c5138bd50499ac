"""An extension adds a choice to every seam without an edit of src; the server that loads it cannot import torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from glasu.cli.main import main
from glasu.config import RunConfig
from glasu.data.folders import write_party
from glasu.data.sources.catalog import load_parties
from glasu.pki.provision import provision
from support.extension_runs import EXTENSION, PAIRS, RUNS, read_port, start_server
from support.server_environment import link_packages
from support.small import SMALL
from support.warm_process import WarmProcess, run_program

TESTS = Path(__file__).parent
RUN_FILE = """
[train]
num_rounds = 2
sampler = "first-neighbors"
task = "smoothed"
[wire]
precision = "ring"
"""
LOADING = ("--extension", EXTENSION)
OPTIONS = {
    "train": ["run.toml", "--out", "out"],
    "predict": ["run", "--out", "predictions.csv"],
    "split": ["run.toml", "--out", "out"],
    "search": ["run.toml", "--out", "out"],
    "serve": ["run.toml", "--listen", "localhost:0", "--kit", "kit", "--out", "out"],
    "join": ["party", "--server", "localhost:1", "--kit", "kit", "--out", "out"],
    "doctor": ["party", "--server", "localhost:1", "--kit", "kit", "--out", "out"],
}


@pytest.fixture(scope="module")
def server_path(tmp_path_factory) -> str:
    """Return the PYTHONPATH of a process that has the packages of a server and the extension."""
    environment = link_packages(tmp_path_factory.mktemp("server") / "packages")
    return os.pathsep.join([environment["PYTHONPATH"], str(TESTS)])


PROGRAM = """
import sys
from pathlib import Path
from support import extension_runs
extension_runs.main(Path(sys.argv[1]), sys.argv[2])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, server_path) -> dict[str, dict]:
    """Return parts of the reports of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    return json.loads(run_program(PROGRAM, folder, arguments=[str(folder), server_path]))


@pytest.mark.parametrize("name", [*RUNS, *PAIRS])
def test_a_choice_of_an_extension_is_used(runs, name):
    others = [run["one process"] for other, run in runs.items() if other != name]
    assert runs[name]["one process"] not in others


@pytest.mark.parametrize("name", RUNS)
def test_a_choice_of_an_extension_trains_alike_in_one_process_and_over_the_network(runs, name):
    found = runs[name]
    assert found["network"]["weights_sha256"] == found["one process"]
    assert "torch" not in found["network"]["versions"]


def test_reports_show_the_metrics_that_a_task_declares(runs):
    found = runs["task"]
    scores, page = found["scores in one process"], found["page"]
    assert list(scores) == ["accuracy", "macro_f1", "loss", "top_2_accuracy", "brier", "round"]
    assert found["network"]["test"] == scores
    assert scores["accuracy"] <= scores["top_2_accuracy"] <= 1
    best = max(found["history"], key=lambda entry: entry["val_top_2_accuracy"])
    assert scores["round"] == best["round"]  # the task's own metric selects the model
    assert f"test top-2 accuracy {100 * scores['top_2_accuracy']:.1f} %" in found["summary"]
    assert "<th>Brier score</th>" in page
    assert f"<td>{scores['brier']:.4g}</td>" in page
    assert "Validation top-2 accuracy while training" in page
    assert "brier" not in runs["sampler"]["scores in one process"]


@pytest.mark.parametrize("command", OPTIONS)
def test_an_extension_that_cannot_be_imported_ends_the_command_with_one_line(command, capsys):
    assert main([command, *OPTIONS[command], "--extension", "no_such_module"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"glasu {command}: extension 'no_such_module': cannot import")


@pytest.mark.parametrize(
    ("source", "said"), [("1 +", "SyntaxError"), ("raise RuntimeError('broken')", "RuntimeError: broken")]
)
def test_the_error_of_a_faulty_extension_is_one_line(tmp_path, monkeypatch, capsys, source, said):
    (tmp_path / "faulty_extension.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["train", *OPTIONS["train"], "--extension", "faulty_extension"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "importing 'faulty_extension' failed" in line
    assert said in line


@dataclass
class Commands:
    """The commands of one run whose settings use the extension."""

    folder: Path
    port: int = 0

    def run(self, *words: object, path: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with these folders of modules before those of the tests."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        process = WarmProcess([*map(str, words)], folder / "log", folder / "out", path=path)
        code = process.wait(240)
        return subprocess.CompletedProcess(words, code, (folder / "out").read_text(), (folder / "log").read_text())

    def join(self, name: str, out: str, *more: object, path: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
        """Take part in the run; write to the folder `out`."""
        words = ["--server", f"localhost:{self.port}", "--kit", self.folder / "kits" / name, *more]
        return self.run("join", self.folder / "parties" / name, "--out", self.folder / out, *words, path=path)


@pytest.fixture
def commands(tmp_path) -> Commands:
    settings = SMALL.replace("[model]", "num_clients = 2\n[model]") + "aggregation_layers = [1]\n"
    (tmp_path / "plain.toml").write_text(settings)  # this process does not load the extension
    (tmp_path / "run.toml").write_text(settings + RUN_FILE)
    for party in load_parties(RunConfig.from_toml(tmp_path / "plain.toml")):
        write_party(party, tmp_path / "parties" / party.name)
    provision(tmp_path / "kits", ["a", "b"], ["localhost"])
    return Commands(tmp_path)


@pytest.fixture
def server(commands, server_path) -> Iterator[subprocess.Popen[str]]:
    environment, folder = {**os.environ, "PYTHONPATH": server_path}, commands.folder
    with start_server(folder / "run.toml", folder / "kits", folder / "server", environment) as process:
        commands.port = read_port(process)
        yield process


def test_a_party_with_another_extension_or_none_is_refused_with_one_line_at_both_ends(commands, server, tmp_path):
    changed = shutil.copytree(TESTS / "support", tmp_path / "changed" / "support")
    with (changed / "my_extension" / "layers.py").open("a") as file:
        file.write("# changed\n")
    without = commands.join("a", "without")  # the server cannot make a party load a module
    other = commands.join("a", "other", *LOADING, path=[changed.parent])
    server.terminate()
    _, log = server.communicate(timeout=60)
    for refused, stated in ((without, "a (nothing)"), (other, f"a {EXTENSION} 1.0 (")):
        assert refused.returncode == 2, refused.stderr
        for told in (refused.stderr.splitlines()[-1], log):
            assert f"extensions: the server {EXTENSION} 1.0 (" in told
            assert f", {stated}" in told
            assert "load the same extensions, of the same version and source, everywhere" in told


@pytest.mark.slow
def test_the_commands_train_and_predict_with_an_extension(commands, server, tmp_path):
    with ThreadPoolExecutor() as pool:
        for joined in pool.map(lambda name: commands.join(name, name, *LOADING), "ab"):
            assert joined.returncode == 0, joined.stderr
    assert server.wait(60) == 0
    alone = commands.run("train", tmp_path / "run.toml", "--out", tmp_path / "alone", *LOADING)
    assert alone.returncode == 0, alone.stderr
    reports = [json.loads((tmp_path / folder / "report.json").read_text()) for folder in ("server", "alone")]
    # The parties of the network run have secrets, so their weights differ. The bytes must not.
    assert reports[0]["traffic"]["by_kind"] == reports[1]["traffic"]["by_kind"]
    predictions = tmp_path / "predictions.csv"
    predicted = commands.run("predict", tmp_path / "alone", "--out", predictions, *LOADING)
    assert predicted.returncode == 0, predicted.stderr
    assert re.search(r'"\d \(0\.\d\d\)"', predictions.read_text())  # as the task describes a prediction
