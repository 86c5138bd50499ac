"""The --out folder of a role: decide whether a run may begin or continue in it. Torch is not loaded here.

The public message of each error contains no path and no id, because the dry run shows it to all roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from glasu.config import RunConfig, list_candidates
from glasu.errors import ConfigError, DataError
from glasu.network.compatibility import compare_settings
from glasu.network.state_file import JoiningRecord, ServingRecord, StateFile
from glasu.pki.kit import Kit
from glasu.pki.secret_file import SECRET
from glasu.records import RecordError, parse_json, read_record
from glasu.report import PartySummary, Seconds, SubsetScores, Traffic
from glasu.runtime.checkpointing import SUFFIX, refuse_unknown_checkpoints
from glasu.runtime.output_dir import JOINING, OTHER_DATA, REPORT, SERVING

T = TypeVar("T")
CHECKPOINTS = "checkpoints"
SHOWN_SETTINGS = 4
NEW_RUN = "for a new training, give another --out, or --fresh, at the server and at every party"


@dataclass(frozen=True)
class FinishedPrivacy:
    """The fields that are read from `privacy` in a report.json."""

    differential_privacy: Mapping[str, Any] | None = None  # the fields of `SpentEpsilon` and others


@dataclass(frozen=True)
class FinishedPart:
    """The fields that are read from a party's report.json."""

    party: str
    parties: tuple[str, ...]
    run: str
    config: Mapping[str, Any]
    weights_sha256: tuple[str, ...]
    traffic: Traffic
    seconds: Seconds
    privacy: FinishedPrivacy


@dataclass(frozen=True)
class FinishedTraining:
    """The fields that are read from a server's report.json."""

    config: Mapping[str, Any]
    parties: tuple[PartySummary, ...]
    weights_sha256: tuple[str, ...]
    test: Mapping[str, Any]


@dataclass(frozen=True)
class ListedSubsets:
    """The validation scores of subsets of the parties, read from a server's report.json."""

    subsets: tuple[Mapping[str, Any], ...] | None = None


def open_serving(out: Path) -> StateFile[ServingRecord]:
    """Read serving.json of a server's folder."""
    return StateFile(out / SERVING, ServingRecord())


def continues_run(out: Path, record: ServingRecord, config: RunConfig, roster: Sequence[str]) -> bool:
    """Return whether a server's folder contains a run with these parties and settings.

    Until a party has joined, the parties and settings may change. If they have changed, the function returns False.

    Raises:
        ConfigError: parties have joined the run in the folder, but its roster or settings differ.
    """
    if record.run is None:
        refuse_unknown_checkpoints(out / CHECKPOINTS, SERVING)
        return False
    if not record.has_begun and not any((out / CHECKPOINTS).glob(f"*{SUFFIX}")):
        return record.roster == tuple(roster) and record.digest == config.digest()
    fresh = ", choose another --out, or start over with --fresh, which removes the checkpoints"
    _refuse_other_run(out, record, config, roster, fresh)
    return True


def require_finished_training(out: Path, record: ServingRecord, config: RunConfig, roster: Sequence[str]) -> str:
    """Return the run id of the finished training in a server's folder, or raise ConfigError."""
    if record.run is None or not record.closed:
        raise ConfigError(
            f"{out}: holds no finished training of this server; --out must be the folder of a finished `glasu serve`."
        )
    _refuse_other_run(out, record, config, roster)
    return record.run


def read_trained_config(out: Path, config: RunConfig) -> RunConfig:
    """Return the settings of a finished training. If `train.preset` chose some of them, read them from the report."""
    if len(list_candidates(config)) == 1:
        return config
    trained = RunConfig.from_dict(read_report(FinishedTraining, out).config, str(out / REPORT))
    return trained.replace(data={"parties": (), "root": None})


def _refuse_other_run(
    out: Path, record: ServingRecord, config: RunConfig, roster: Sequence[str], or_else: str = ""
) -> None:
    """Refuse a server's folder if its run has other parties or settings. `or_else` adds remedies to the error."""
    if record.roster != tuple(roster):
        raise ConfigError(
            f"{out}: holds a run of other parties: {describe_roster_change(record.roster, roster)}. Restore that "
            f"roster (`glasu provision --remove NAME` removes a name){or_else}.",
            f"holds a run of other parties; {NEW_RUN}",
        )
    if record.digest != config.digest():
        differences = compare_settings({"here": config.flatten(), "there": record.settings})[:SHOWN_SETTINGS]
        listed = (f"{each.name} = {each.values['there']!r} there, {each.values['here']!r} here" for each in differences)
        raise ConfigError(
            f"{out}: holds a run with other settings: {'; '.join(listed)}. Use the earlier settings{or_else}.",
            f"holds a run with other settings; {NEW_RUN}",
        )


def continues_part(out: Path, record: JoiningRecord, data: str | None, only: str | None) -> bool:
    """Return whether a party's folder contains a part of a run that the party can continue.

    Args:
        out: the folder.
        record: the content of its joining.json.
        data: digest of the party's current data; None if the data cannot be read.
        only: the only run that the party may join; None: any run.

    Raises:
        ConfigError: the folder belongs to another run, or the run began with other data.
    """
    if record.run is None:
        refuse_unknown_checkpoints(out / CHECKPOINTS, JOINING)
        return False
    if only not in (None, record.run):
        raise ConfigError(
            f"{out}: holds a party's part of run {record.run}, not of {only}; give the --out folder of run {only}.",
            "holds a part of another run than --run; give the --out folder of the run in --run",
        )
    if data not in (None, record.data):
        raise ConfigError(f"{out}: {OTHER_DATA}.", OTHER_DATA)
    return True


def check_same_secret(kit: Kit, record: JoiningRecord) -> None:
    """Refuse to continue a run if the party's secret is missing or has changed since the run began."""
    if not record.closed:
        remedy = "restore it, or start over with --fresh at the server and at every party"
        refuse_other_secret(kit, record, "this run began", remedy)


def refuse_other_secret(kit: Kit, record: JoiningRecord, since: str, remedy: str) -> None:
    """Refuse a secret that is missing or has changed.

    Args:
        kit: the kit with the party's secret.
        record: the content of joining.json, with the commitment of the original secret.
        since: the event after which the secret must not change, for the error.
        remedy: what to do, for the error.
    """
    secret = kit.secret
    if secret is not None and secret.commitment() == record.secret:
        return
    state = "is missing" if secret is None else f"has changed since {since}"
    raise ConfigError(f"{kit.folder / SECRET}: {state}; {remedy}.", f"the secret in its kit {state}; {remedy}")


def describe_roster_change(there: Sequence[str], here: Sequence[str]) -> str:
    """Describe how the roster changed since a run began."""
    added, removed = ([name for name in one if name not in other] for one, other in ((here, there), (there, here)))
    changes = [f"{', '.join(names)} {verb}" for names, verb in ((added, "added"), (removed, "removed")) if names]
    began = f"it began with {', '.join(there)}"
    return (
        f"{began}; since then {' and '.join(changes)}" if changes else f"{began}; now their order is {', '.join(here)}"
    )


def read_subsets(out: Path) -> list[SubsetScores]:
    """Return the validation scores of subsets of the parties from a server's report.json.

    If the report is missing or unreadable, return no scores, because a prediction does not require them.
    """
    try:
        return [_read_subset(each) for each in read_report(ListedSubsets, out).subsets or ()]
    except DataError:
        return []


def _read_subset(listed: Mapping[str, Any]) -> SubsetScores:
    """Read one entry of `subsets`. Metrics without a value are omitted."""
    metrics = {name: value for name, value in listed.items() if name != "parties" and value is not None}
    return read_record(SubsetScores, {"parties": listed.get("parties"), "metrics": metrics}, REPORT)


def read_report(cls: type[T], out: Path) -> T:
    """Read report.json of a finished role. `cls` is a dataclass with the fields that the caller needs."""
    path = out / REPORT
    try:
        return read_record(cls, parse_json(path.read_bytes(), str(path)), str(path), partial=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); restore it.") from None
    except RecordError as error:
        raise DataError(f"{error} Restore the file.") from None
