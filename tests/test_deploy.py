"""The examples in deploy/ fit the commands, each other and the guide."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from glasu.cli.main import build_parser

ROOT = Path(__file__).parents[1]
ROLES = ("server", "party")


def unit(role: str) -> str:
    return (ROOT / "deploy" / "systemd" / f"glasu-{role}@.service").read_text()


def command(role: str) -> list[str]:
    """Return the words of a unit's command after the program, for the training "trial"."""
    (line,) = re.findall(r"^ExecStart=/opt/glasu/bin/glasu (.*)$", unit(role), re.M)
    return line.replace("%i", "trial").replace("${GLASU_SERVER}", "glasu.example.org:9443").split()


@pytest.mark.parametrize("role", ROLES)
def test_a_unit_gives_a_command_that_exists_and_may_write_where_it_writes(role):
    args = build_parser().parse_args(command(role))
    (state,) = re.findall(r"^StateDirectory=(.*)$", unit(role), re.M)
    assert args.out == Path("/var/lib") / state / "trial"
    guide = (ROOT / "docs" / "deployment.md").read_text()
    assert str(args.kit) in guide
    assert str(args.out) in guide


@pytest.mark.parametrize("role", ROLES)
def test_a_unit_is_started_again_for_as_long_as_it_takes_but_not_after_bad_input(role):
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit(role), re.M))
    assert settings["Restart"] == "on-failure"
    assert settings["RestartPreventExitStatus"] == "2"
    assert settings["StartLimitIntervalSec"] == "0"
    assert "StartLimitBurst" not in settings


@pytest.mark.parametrize("role", ROLES)
def test_a_unit_may_open_more_files_than_idle_connections_take(role):
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit(role), re.M))
    assert int(settings["LimitNOFILE"]) >= 2**16


@pytest.mark.parametrize("role", ROLES)
def test_the_guide_installs_what_a_unit_names_as_its_documentation(role):
    (place,) = re.findall(r"^Documentation=file://(.*)$", unit(role), re.M)
    guide = (ROOT / "docs" / "deployment.md").read_text()
    assert f"-t {Path(place).parent} docs/*.md" in guide
    assert (ROOT / "docs" / Path(place).name).is_file()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
@pytest.mark.parametrize("role", ROLES)
def test_systemd_accepts_a_unit(role, tmp_path):
    path = tmp_path / f"glasu-{role}@trial.service"
    path.write_text(unit(role).replace("/opt/glasu/bin/glasu", shutil.which("true") or "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60)
    assert path.name not in verified.stderr, verified.stderr
    assert verified.returncode == 0, verified.stderr


@pytest.mark.parametrize("role", ROLES)
def test_the_guide_predicts_beside_a_unit_with_its_kit_in_its_folder(role):
    training = build_parser().parse_args(command(role))
    guide = (ROOT / "docs" / "deployment.md").read_text()
    verb = "serve" if role == "server" else "join"
    (line,) = re.findall(rf"^runuser .*/opt/glasu/bin/glasu ({verb} .*--predict.*)$", guide, re.M)
    predicting = build_parser().parse_args(line.split())
    assert (predicting.kit, predicting.out) == (training.kit, training.out)


def test_server_and_party_of_one_training_can_run_on_one_machine():
    server, party = (build_parser().parse_args(command(role)) for role in ROLES)
    assert server.kit != party.kit
    assert server.out != party.out
    assert server.run_file == party.expect  # the settings, which both roles only read


def test_the_server_image_installs_the_server_requirements_and_no_torch():
    text = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S))
    assert "-r deploy/server-requirements.txt" in stages["build-server"]
    assert "--no-deps ." in stages["build-server"]
    assert "torch" not in stages["build-server"]
    assert "--from=build-server" in stages["server"]


def test_a_server_requirement_is_a_requirement_of_the_package():
    lines = (ROOT / "deploy" / "server-requirements.txt").read_text().splitlines()
    server = {line for line in lines if line and not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert server < set(project["dependencies"])
