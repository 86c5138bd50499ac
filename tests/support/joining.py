"""The state file of a party, as a test reads it without a session."""

from __future__ import annotations

from pathlib import Path

from glasu.network.state_file import JoiningRecord, StateFile
from glasu.runtime.output_dir import JOINING


def open_joining(out: Path, party: str) -> StateFile[JoiningRecord]:
    """Read joining.json of a party's folder; without a file, the record is that of a new folder."""
    return StateFile(out / JOINING, JoiningRecord(party=party))
