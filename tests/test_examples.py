"""The examples run, and their settings are valid."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from glasu.config import RunConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_program_runs_and_is_short(path, capsys):
    assert len(path.read_text().splitlines()) < 60
    runpy.run_path(str(path), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_settings_of_an_example_are_valid(path):
    assert RunConfig.from_toml(path).data.name
