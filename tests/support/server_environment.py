"""A Python environment with the packages of deploy/server-requirements.txt and nothing else."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "deploy" / "server-requirements.txt"
GLASU = [sys.executable, "-S", "-m", "glasu.cli.main"]  # -S: site-packages is not on sys.path


def find_distributions(requirements: list[str]) -> dict[str, Distribution]:
    """Return the installed distributions that the requirements name, and those that they need in turn."""
    found: dict[str, Distribution] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        match = re.match(r"[\w.-]+", requirement)
        if match is None or "extra ==" in requirement or match[0] in found:
            continue
        try:
            found[match[0]] = distribution(match[0])
        except ModuleNotFoundError:  # not for this platform or Python version
            continue
        waiting += found[match[0]].requires or []
    return found


def link_packages(folder: Path) -> dict[str, str]:
    """Link the server's packages into a folder; return the environment variables of a process that has only these."""
    folder.mkdir()
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    for package in find_distributions([line for line in lines if line]).values():
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            link = folder / name
            if not link.exists():
                link.symlink_to(Path(str(package.locate_file(name))))
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'src'}"}
