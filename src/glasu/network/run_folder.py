"""The --out folder of a role: whether a run begins there, continues, or is refused. Torch is not loaded here."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path

from glasu.config import RunConfig
from glasu.errors import ConfigError
from glasu.network.compatibility import compare_settings
from glasu.network.state_file import JoiningRecord, ServingRecord, StateFile
from glasu.runtime.checkpointing import SUFFIX
from glasu.runtime.output_dir import JOINING, OTHER_DATA, PREDICTING, SERVING

CHECKPOINTS = "checkpoints"
SHOWN_SETTINGS = 4


class FolderCode(enum.StrEnum):
    """Why a role cannot use a folder."""

    UNKNOWN_CHECKPOINTS = "unknown_checkpoints"
    OTHER_PARTIES = "other_parties"
    OTHER_SETTINGS = "other_settings"
    OTHER_RUN = "other_run"
    OTHER_DATA = "other_data"
    NOT_FINISHED = "not_finished"


class FolderError(ConfigError):
    """The --out folder holds something else."""

    code: FolderCode

    def __init__(self, code: FolderCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def open_serving(out: Path) -> StateFile[ServingRecord]:
    """Read serving.json of a server's folder."""
    return StateFile(out / SERVING, ServingRecord())


def open_predicting(out: Path) -> StateFile[ServingRecord]:
    """Read predicting.json of a server's folder."""
    return StateFile(out / PREDICTING, ServingRecord())


def open_joining(out: Path, party: str) -> StateFile[JoiningRecord]:
    """Read joining.json of a party's folder."""
    return StateFile(out / JOINING, JoiningRecord(party=party))


def has_checkpoints(out: Path) -> bool:
    """Return whether a folder holds checkpoints."""
    return any((out / CHECKPOINTS).glob(f"*{SUFFIX}"))


def continues_run(out: Path, record: ServingRecord, config: RunConfig, roster: Sequence[str]) -> bool:
    """Return whether a server's folder holds this run.

    A run that no party has joined yet may change its settings: then the folder holds none.

    Raises:
        FolderError: the folder holds a run of other parties or settings.
    """
    if record.run is None:
        refuse_unknown_checkpoints(out, SERVING)
        return False
    if record.roster == tuple(roster) and record.digest == config.digest():
        return True
    joined = record.processes or record.attempt or record.closed
    if not joined and not has_checkpoints(out):
        return False
    if record.roster != tuple(roster):
        raise FolderError(
            FolderCode.OTHER_PARTIES,
            f"{out}: holds a run of other parties: {describe_roster_change(record.roster, roster)}. Restore that "
            "roster (`glasu provision --remove NAME` removes a name), choose another --out, or start over with "
            "--fresh, which removes the checkpoints.",
        )
    raise FolderError(
        FolderCode.OTHER_SETTINGS,
        f"{out}: holds a run with other settings: {describe_settings_change(record, config)}. Continue with those, "
        "choose another --out, or start over with --fresh, which removes the checkpoints.",
    )


def require_finished_training(out: Path, record: ServingRecord, config: RunConfig, roster: Sequence[str]) -> str:
    """Return the run id of the finished training in a server's folder, or raise FolderError."""
    if record.run is None or not record.closed:
        raise FolderError(
            FolderCode.NOT_FINISHED,
            f"{out}: holds no finished training of this server; --out must be the folder of a finished `glasu serve`.",
        )
    if record.roster != tuple(roster):
        raise FolderError(
            FolderCode.OTHER_PARTIES,
            f"{out}: holds a training of other parties: {describe_roster_change(record.roster, roster)}. Restore that "
            "roster (`glasu provision --remove NAME` removes a name).",
        )
    if record.digest != config.digest():
        raise FolderError(
            FolderCode.OTHER_SETTINGS,
            f"{out}: holds a training with other settings: {describe_settings_change(record, config)}. Predict with "
            "those.",
        )
    return record.run


def check_party_folder(out: Path, record: JoiningRecord, data: str | None, only: str | None) -> None:
    """Refuse a party's folder that does not fit what the party wants to do.

    Args:
        out: the folder.
        record: the content of its joining.json.
        data: digest of the party's present data; None if the data cannot be read.
        only: the only run that the party wants to join.

    Raises:
        FolderError: the folder belongs to another run, or the run began with other data.
    """
    if record.run is None:
        refuse_unknown_checkpoints(out, JOINING)
        return
    if only not in (None, record.run):
        raise FolderError(
            FolderCode.OTHER_RUN,
            f"{out}: holds a party's part of run {record.run}, not of {only}; give the --out folder of that run.",
        )
    if data not in (None, record.data):
        raise FolderError(FolderCode.OTHER_DATA, f"{out}: {OTHER_DATA}.")


def refuse_unknown_checkpoints(out: Path, state_file: str) -> None:
    """Refuse to begin a run in a folder with checkpoints whose state file is missing."""
    names = ", ".join(sorted(path.name for path in (out / CHECKPOINTS).glob(f"round-*{SUFFIX}")))
    if names:
        raise FolderError(
            FolderCode.UNKNOWN_CHECKPOINTS,
            f"{out / CHECKPOINTS}: holds checkpoints of another run ({names}), and {state_file} is missing. Restore "
            f"{state_file}, choose another --out, or start over with --fresh, which removes them.",
        )


def describe_settings_change(record: ServingRecord, config: RunConfig) -> str:
    """Return the first settings in which a run differs from the present ones."""
    changed = compare_settings({"here": config.flatten(), "there": record.settings})[:SHOWN_SETTINGS]
    return "; ".join(f"{each.name} = {each.values['there']!r} there, {each.values['here']!r} here" for each in changed)


def describe_roster_change(there: Sequence[str], here: Sequence[str]) -> str:
    """Return how the roster changed since a run began."""
    added, removed = ([name for name in one if name not in other] for one, other in ((here, there), (there, here)))
    changes = [f"{', '.join(names)} {verb}" for names, verb in ((added, "added"), (removed, "removed")) if names]
    began = f"it began with {', '.join(there)}"
    return (
        f"{began}; since then {' and '.join(changes)}" if changes else f"{began}; now their order is {', '.join(here)}"
    )
