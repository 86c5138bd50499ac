"""Packaging: versions, dependencies and benchmarks are declared once and used."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import glasu

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# requirement -> module
MODULES = {
    "optuna": "optuna",
    "flwr": "flwr",
    "prometheus-client": "prometheus_client",
    "rbcl": "rbcl",
    "tenseal": "tenseal",
    "dp-accounting": "dp_accounting",
}


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def requirements(path: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / path).read_text().splitlines())
    return [line for line in lines if line]


def test_the_version_is_written_in_one_place():
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    source = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, re.M) == [glasu.__version__]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.M) == [glasu.__version__]
    assert f"\n## {glasu.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("extra", PROJECT["project"]["optional-dependencies"])
def test_every_extra_is_imported_by_the_package(extra):
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name in names(PROJECT["project"]["optional-dependencies"][extra]):
        assert re.search(rf"^\s*(from|import) {MODULES[name]}\b", source, re.M)


def test_the_constraints_pin_every_requirement():
    project = PROJECT["project"]
    declared = [*project["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    declared += [item for extra in project["optional-dependencies"].values() for item in extra]
    pins = requirements("constraints.txt")
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    of_others = {"protobuf", "barriers", "absl-py", "attrs", "dm-tree"}  # of flwr, rbcl and dp-accounting
    assert names(pins) - names(declared) == of_others
    assert names(declared) <= names(pins)


def test_make_bench_lists_every_benchmark_with_its_question():
    shown = subprocess.run(
        ["make", "--no-print-directory", "-s", "bench"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines())
    runnable = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef main()" in path.read_text()}
    assert set(lines) == runnable
    assert all("?" in question for question in lines.values())


def test_make_bench_runs_the_named_benchmark_with_the_given_arguments():
    command = ["make", "--no-print-directory", "-n", "bench", "NAME=round", "ARGS=--quick"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1].endswith("/python benchmarks/round.py --quick")


def test_the_wheel_holds_the_package_alone():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/glasu"]}
