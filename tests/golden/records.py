"""The recorded outcomes: one JSON file per setting, with fields that do not depend on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded"


def read_record(name: str) -> dict[str, Any]:
    """Return the record of a setting; empty where it was never recorded."""
    path = FOLDER / f"{name}.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return record


def write_record(name: str, recorded: dict[str, Any]) -> None:
    """Write the record of a setting."""
    (FOLDER / f"{name}.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def recorded_names() -> set[str]:
    """Return the settings that have a record."""
    return {path.stem for path in FOLDER.glob("*.json")}
