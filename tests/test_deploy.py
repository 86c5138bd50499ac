"""The examples in deploy/ fit the commands, each other and the guide."""

from __future__ import annotations

import re
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


def test_server_and_party_of_one_training_can_run_on_one_machine():
    server, party = (build_parser().parse_args(command(role)) for role in ROLES)
    assert server.kit != party.kit
    assert server.out != party.out
    assert server.run_file == party.expect  # the settings, which both only read
