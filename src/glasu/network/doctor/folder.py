"""What lies in the --out folder: whether the run will begin there, go on, or be refused; no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glasu.config import RunConfig
from glasu.data.digest import data_digest
from glasu.data.party import PartyData
from glasu.errors import ConfigError
from glasu.network.doctor.findings import Finding
from glasu.network.serve import goes_on, opened
from glasu.network.state_file import Durable
from glasu.runtime.checkpointing import SUFFIX, refuse_unknown_checkpoints
from glasu.runtime.output_dir import JOINING, OTHER_DATA

TOGETHER = "at the server and at every party"
ANOTHER = f"to train anew, give another --out, or --fresh, {TOGETHER}"


def server_folder(out: Path, config: RunConfig, roster: Sequence[str], *, fresh: bool) -> list[Finding]:
    """Tell what `glasu serve` will do with its folder; nothing where it is new."""
    durable = opened(out)
    if fresh:
        return _given_up(out)
    try:
        if not goes_on(out, durable, config, roster):
            return []
    except ConfigError as error:
        whose = "of other parties or settings, or of unknown ones"
        return [Finding("folder", "bad", f"holds a run {whose}; {ANOTHER}", str(error))]
    return [_state(closed=durable["closed"])]


def party_folder(out: Path, party: PartyData | None, only: str | None, *, fresh: bool) -> list[Finding]:
    """Tell what `glasu join` will do with its folder; nothing where it is new.

    Args:
        out: the folder.
        party: the data as it is now; None where it could not be read.
        only: the run in which alone the party wants to take part.
        fresh: whether it will start over.
    """
    durable = Durable(out / JOINING, {"run": None, "data": None, "closed": False})
    if fresh:
        return _given_up(out)
    if durable["run"] is None:
        try:
            refuse_unknown_checkpoints(out / "checkpoints", JOINING)
        except ConfigError as error:
            return [Finding("folder", "bad", f"holds checkpoints of another run; {ANOTHER}", str(error))]
        return []
    if only not in (None, durable["run"]):
        return [Finding("folder", "bad", "holds a part of another run than --run names; give the --out of that run")]
    if party is not None and durable["data"] != data_digest(party):
        return [Finding("folder", "bad", OTHER_DATA)]
    return [_state(closed=durable["closed"])]


def _given_up(out: Path) -> list[Finding]:
    """Tell what --fresh will remove."""
    count = len(list((out / "checkpoints").glob(f"*{SUFFIX}")))
    return [Finding("folder", "warning", f"holds {count} checkpoints, which --fresh will remove")] if count else []


def _state(*, closed: bool) -> Finding:
    if closed:
        return Finding("folder", "warning", f"holds a finished run, which will not begin again; {ANOTHER}")
    return Finding("folder", "good", "holds a run that will go on")
