"""Check output folders: a command must not overwrite the results of another role or run. Torch is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from glasu.config import RunConfig, list_candidates, resolve
from glasu.errors import ConfigError
from glasu.records import FlatSettings, RecordError, Sections, parse_json, read_record
from glasu.report import PartySummary

Writer = Literal["train", "server", "party", "provision", "other"]  # "other" cannot continue any results
SERVING, JOINING, PREDICTING, ALIGNING = "serving.json", "joining.json", "predicting.json", "aligning.json"
REPORT, MODEL = "report.json", "model/model.toml"
PARTY, KIT, PRIVATE_KEY = "party.toml", "kit.toml", "key.pem"
KITS = "the CA and the kits of `glasu provision`"
OTHER_DATA = (
    "holds a run that started with other data: this party's features, edges, labels or ids have changed since then; "
    "restore them, or start over with --fresh at the server and at every party"
)
SHOWN_DIFFERENCES = 4


@dataclass(frozen=True)
class UsedSetting:
    """A setting that the method, the sampler or the data replaced."""

    requested: Any
    used: Any


@dataclass(frozen=True)
class FinishedRun:
    """The parts of report.json that identify the run."""

    config: Sections
    overridden: Mapping[str, UsedSetting]
    parties: tuple[PartySummary, ...]
    baselines: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parties:
            raise ConfigError("parties is empty.")


def refuse_contents_of_others(out: Path, writer: Writer, party: str | None = None) -> None:
    """Refuse an --out folder that contains results of another writer, a party's data, a kit or keys.

    Args:
        out: the folder, which need not exist.
        writer: the kind of command that would write to the folder.
        party: the name of the party, if it is known.
    """
    for owner, words in _find_contents(out):
        if owner != writer:
            raise ConfigError(f"--out {out}: holds {words}; choose another --out.")
    there = _find_party(out)
    if writer == "party" and None not in (party, there) and party != there:
        raise ConfigError(
            f"--out {out}: holds {_describe_results(there)}, and this is party {party!r}; choose another --out."
        )


def refuse_file_among_others(path: Path, run_dir: Path) -> None:
    """Refuse an --out file if its folder does not exist, or contains results of another run.

    Args:
        path: the file, which need not exist.
        run_dir: the folder of the run that the command reads; writing the file there is allowed.
    """
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"--out {path}: {folder} is not an existing folder; create it, or choose another file.")
    if folder.resolve() == run_dir.resolve():
        return
    for _, words in _find_contents(folder):
        raise ConfigError(f"--out {path}: its folder holds {words}; choose another folder.")


def find_finished_run(out: Path, config: RunConfig) -> FinishedRun | None:
    """Return the finished run with these settings in a folder; None if the folder contains no finished run.

    Raises:
        ConfigError: the folder holds a finished run with other settings, which must not be replaced.
    """
    path = out / REPORT
    try:
        run = read_record(FinishedRun, parse_json(path.read_bytes(), str(path)), str(path), partial=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); choose another --out.") from None
    except RecordError as error:
        raise ConfigError(f"{error} Choose another --out, or replace this run with --fresh.") from None
    differences = _find_differences(run, config)
    if differences:
        raise ConfigError(
            f"--out {out}: holds a finished run with other settings: {list_differences(differences)}. Choose another "
            "--out, or replace that run with --fresh."
        )
    return run if (out / MODEL).is_file() else None


def remove_finished_run(out: Path) -> None:
    """Remove the report of a finished run, because another run starts in its folder."""
    (out / REPORT).unlink(missing_ok=True)


def list_differences(differences: Mapping[str, tuple[object, object]]) -> str:
    """Describe the first settings that differ, given their values in the folder and in this run."""
    listed = [f"{name} = {there!r} there, {here!r} here" for name, (there, here) in differences.items()]
    more = len(listed) - SHOWN_DIFFERENCES
    return "; ".join(listed[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _find_differences(run: FinishedRun, config: RunConfig) -> dict[str, tuple[object, object]]:
    """Return the settings in which a finished run differs from the requested settings.

    A report contains the resolved settings of its run. So the requested settings are first resolved for the number of
    nodes in that run. If the method, the sampler or the data replaced a setting, the two requested values are compared
    instead. If the preset has several candidates, the run may have used any candidate.
    """
    from glasu.data.methods import override_settings  # loads scipy, which a server installation does not have

    candidates = list_candidates(override_settings(resolve(config, run.parties[0].nodes)[0])[0])
    return min((_compare_settings(run, config, each) for each in candidates), key=len)


def _compare_settings(run: FinishedRun, config: RunConfig, candidate: RunConfig) -> dict[str, tuple[object, object]]:
    used = _flatten(candidate.to_dict())
    requested, defaults = _flatten(config.to_dict()), _flatten(RunConfig().to_dict())
    there = {**defaults, **_flatten(run.config)}
    found: dict[str, tuple[object, object]] = {}
    for name in sorted({*there, *used} - {"data.root"}):
        earlier = run.overridden[name].requested if name in run.overridden else there.get(name)
        if used.get(name) != there.get(name) and requested.get(name) != earlier:
            found[name] = earlier, requested.get(name)
    return found


def _flatten(sections: Sections) -> FlatSettings:
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _find_contents(out: Path) -> list[tuple[Writer | None, str]]:
    """List the contents of a folder: for each, the writer that may continue it (None: no writer) and a description."""
    found: list[tuple[Writer | None, str]] = []
    if (out / PARTY).is_file():
        found.append((None, f"a party's data ({PARTY})"))
    if (out / KIT).is_file():
        found.append((None, f"a kit ({KIT})"))
    elif (out / PRIVATE_KEY).is_file():
        found.append((None, f"a private key ({PRIVATE_KEY})"))
    if (out / "ca" / "ca.toml").is_file():
        found.append(("provision", KITS))
    if (out / "ca.toml").is_file():
        found.append((None, KITS))
    if any((out / name).is_file() for name in (SERVING, PREDICTING, ALIGNING)):
        found.append(("server", "results of a server (glasu serve)"))
    if (out / JOINING).is_file():
        found.append(("party", _describe_results(_find_party(out))))
    traces = (REPORT, MODEL, "checkpoints/run.json")
    if not found and any((out / trace).is_file() for trace in traces):
        found.append(("train", "results of glasu train"))
    return found


def _describe_results(party: str | None) -> str:
    owner = "a party" if party is None else f"party {party!r}"
    return f"results of {owner} (glasu join)"


def _find_party(out: Path) -> str | None:
    """Return the name of the party whose results are in a folder, or None if no file contains the name."""
    for name in (JOINING, REPORT):
        try:
            value = parse_json((out / name).read_bytes(), name)
        except (OSError, RecordError):
            continue
        party = value.get("party") if isinstance(value, dict) else None
        if isinstance(party, str):
            return party
    return None
