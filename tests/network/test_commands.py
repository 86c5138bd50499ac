"""`glasu serve` and `glasu join` with bad input: one line, exit code 2, and no trace in the file system."""

from __future__ import annotations

import json
import socket

import pytest

from glasu.cli.main import main
from glasu.config import RunConfig
from glasu.data.folders import write_party
from glasu.data.sources.catalog import load_parties
from support.processes import SMALL_RUN


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.toml").write_text(SMALL_RUN.format(rounds=2))
    return tmp_path


def serve(folder, kits, *more):
    arguments = [folder / "run.toml", "--kit", kits / "server", "--out", folder / "out", *more]
    return main(["serve", *map(str, arguments)])


def join(folder, kits, *more):
    party = load_parties(RunConfig.from_toml(folder / "run.toml"))[0]
    write_party(party, folder / "a")
    arguments = [folder / "a", "--kit", kits / "a", "--server", "localhost:1", "--wait", "0", *more]
    return main(["join", *map(str, arguments)])


def test_a_bad_listen_address_leaves_no_folder(folder, kits, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addresses = [f"127.0.0.1:{taken.getsockname()[1]}", "192.0.2.1:9443", "no.such.host.invalid:9443", "localhost"]
        addresses.append("127.0.0.1:\N{ARABIC-INDIC DIGIT THREE}")
        for address in addresses:
            assert serve(folder, kits, "--listen", address) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert f"--listen {address}" in line
            assert not (folder / "out").exists()


def test_a_prediction_without_a_training_leaves_no_folder(folder, kits, capsys):
    assert serve(folder, kits, "--listen", "127.0.0.1:0", "--predict") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds no finished training" in line
    assert not (folder / "out").exists()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "127.0.0.1:\N{ARABIC-INDIC DIGIT THREE}"])
def test_a_bad_metrics_address_leaves_no_folder(address, folder, kits, capsys):
    assert serve(folder, kits, "--listen", "127.0.0.1:0", "--metrics", address) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--metrics {address}" in line
    assert not (folder / "out").exists()


def test_a_wrong_kit_leaves_no_folder(folder, kits, capsys):
    assert serve(folder, kits, "--listen", "127.0.0.1:0", "--kit", str(kits / "a")) == 2
    assert not (folder / "out").exists()
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"run": 7}', '{"attempt": null}', "[" * 100_000, '{"run": null, "x": 1}']
)
def test_a_damaged_state_file_is_one_line_and_exit_code_2(content, folder, kits, capsys):
    out = folder / "out"
    out.mkdir()
    for name in ("serving.json", "joining.json"):
        (out / name).write_text(content)
        code = (
            serve(folder, kits, "--listen", "127.0.0.1:0", "--wait", "0")
            if name == "serving.json"
            else join(folder, kits, "--out", out)
        )
        (line,) = capsys.readouterr().err.splitlines()
        assert code == 2
        assert f"{out / name}: " in line
        (out / name).unlink()


def test_a_state_file_of_an_earlier_version_is_refused_in_one_line(folder, kits, capsys):
    (folder / "out").mkdir()
    old = {"run": "00", "digest": "x", "settings": {}, "roster": ["a"], "attempt": 1, "incarnations": {"a": [1, "x"]}}
    (folder / "out" / "serving.json").write_text(json.dumps(old))
    assert serve(folder, kits, "--listen", "127.0.0.1:0", "--wait", "0") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another version of GLASU wrote it" in line
