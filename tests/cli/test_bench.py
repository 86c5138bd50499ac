"""The door to the benchmarks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from glasu.cli import bench
from glasu.cli.main import main

ROOT = Path(__file__).parents[2]


def test_the_list_names_every_script_with_its_question(capsys):
    assert main(["bench", "--list"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    runnable = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef main()" in path.read_text()}
    assert set(lines) == runnable >= set(bench.USUAL)
    assert all("?" in question for question in lines.values())


def test_a_name_that_is_none_is_refused_with_the_choices(capsys):
    assert main(["bench", "nothing"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "traffic" in message


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text('"""One?"""\nimport sys\ndef main(): ...\nsys.exit(int(sys.argv[1]))\n')
    (tmp_path / "part.py").write_text('"""Not a benchmark."""\n')
    monkeypatch.setattr(bench, "folder", lambda: tmp_path)
    return tmp_path


def test_what_follows_the_name_goes_to_the_script_and_its_exit_code_comes_back(scripts):
    assert main(["bench", "one", "0"]) == 0
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "one", "3", "--help"])
    assert stopped.value.code == 3


def test_parts_of_benchmarks_are_none(scripts, capsys):
    assert main(["bench", "part"]) == 2
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out == "one  One?\n"


def test_an_installed_package_has_all_scripts():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    inside = {name for name in build["force-include"] if name.endswith(".py")}
    assert inside == {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")}
    assert all(there == f"glasu/{here}" for here, there in build["force-include"].items())


def test_quick_is_for_all_that_are_run(scripts, monkeypatch):
    (scripts / "one.py").write_text('"""One?"""\nimport sys\ndef main(): ...\nsys.exit(sys.argv[1:] != ["--quick"])\n')
    monkeypatch.setattr(bench, "USUAL", ("one",))
    assert main(["bench", "--quick"]) == 0
    with pytest.raises(SystemExit):
        main(["bench"])
