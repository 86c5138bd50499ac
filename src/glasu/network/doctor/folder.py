"""Checks of the --out folder: whether the run will begin there, continue, or be refused. Torch is not loaded here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.network.doctor.machine import log_detail
from glasu.network.findings import Finding
from glasu.network.run_folder import (
    CHECKPOINTS,
    FolderCode,
    FolderError,
    check_party_folder,
    continues_run,
    open_joining,
    open_serving,
)
from glasu.runtime.checkpointing import SUFFIX
from glasu.runtime.output_dir import OTHER_DATA

NEW_RUN = "for a new training, give another --out, or --fresh, at the server and at every party"
SENTENCES = {  # for all roles: neither paths nor ids
    FolderCode.UNKNOWN_CHECKPOINTS: f"holds checkpoints of an unknown run; {NEW_RUN}",
    FolderCode.OTHER_PARTIES: f"holds a run of other parties; {NEW_RUN}",
    FolderCode.OTHER_SETTINGS: f"holds a run with other settings; {NEW_RUN}",
    FolderCode.OTHER_RUN: "holds a part of another run than --run names; give the --out of that run",
    FolderCode.OTHER_DATA: OTHER_DATA,
}


def check_server_folder(
    out: Path, config: RunConfig, roster: Sequence[str], log: logging.Logger, *, fresh: bool
) -> list[Finding]:
    """Return what `glasu serve` will do with its folder; nothing if the folder is new."""
    record = open_serving(out).value
    if fresh:
        return _count_checkpoints(out)
    try:
        return [_describe_run(closed=record.closed)] if continues_run(out, record, config, roster) else []
    except FolderError as error:
        return [_explain(error, log)]


def check_joining_folder(
    out: Path, name: str, party: PartyData | None, only: str | None, log: logging.Logger, *, fresh: bool
) -> list[Finding]:
    """Return what `glasu join` will do with its folder; nothing if the folder is new.

    Args:
        out: the folder.
        name: of the party.
        party: its data; None if the data cannot be read.
        only: the only run that the party wants to join.
        log: for what the others must not read.
        fresh: whether it will start over.
    """
    record = open_joining(out, name).value
    if fresh:
        return _count_checkpoints(out)
    try:
        check_party_folder(out, record, None if party is None else party.data_digest(), only)
    except FolderError as error:
        return [_explain(error, log)]
    return [] if record.run is None else [_describe_run(closed=record.closed)]


def _explain(error: FolderError, log: logging.Logger) -> Finding:
    log_detail(log, "folder", str(error))
    return Finding("folder", "bad", SENTENCES[error.code])


def _count_checkpoints(out: Path) -> list[Finding]:
    count = len(list((out / CHECKPOINTS).glob(f"*{SUFFIX}")))
    return [Finding("folder", "warning", f"holds {count} checkpoints, which --fresh will remove")] if count else []


def _describe_run(*, closed: bool) -> Finding:
    if closed:
        return Finding("folder", "warning", f"holds a finished run, which will not begin again; {NEW_RUN}")
    return Finding("folder", "good", "holds a run that will continue")
