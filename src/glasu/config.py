"""RunConfig: all settings of a run, read from TOML, frozen, and valid once constructed."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from glasu import registry
from glasu.config_checks import check_sections
from glasu.config_sections import (
    SAMPLING_ONLY,
    ConfigSections,
    DataConfig,
    ModelConfig,
    PrivacyConfig,
    TrainConfig,
    WireConfig,
    reads_whole_graph,
)
from glasu.errors import ConfigError
from glasu.profiles import Profile
from glasu.records import Checked, FlatSettings, RecordError, SettingValue, describe, parse_toml

__all__ = ["DataConfig", "ModelConfig", "PrivacyConfig", "RunConfig", "TrainConfig", "WireConfig"]

Part = typing.TypeVar("Part", bound=Checked)
WHERE = ("root", "parties")  # keys of [data] that locate the data on this machine; they do not identify the data
LEFT_OPEN = "keys that train.preset decides"
SMALL_GRAPH = 30_000  # maximum number of nodes for which "auto" means the full graph


class Override(typing.TypedDict):
    """A setting that the method, the sampler or the data replaced."""

    requested: Any
    used: Any


@dataclass(frozen=True, kw_only=True)
class RunConfig(ConfigSections):
    """All settings of a run. Settings and data together determine the result."""

    def __post_init__(self) -> None:
        self._apply_profile()
        check_sections(self)

    def _apply_profile(self) -> None:
        """Apply the settings of `privacy.profile`; refuse keys that contradict it, or have no effect with it."""
        profile: Profile = registry.load("profile", self.privacy.profile)
        named = f'privacy.profile="{self.privacy.profile}"'
        changes: dict[str, dict[str, SettingValue]] = {}
        faults = []
        for section, key, value in profile.list_required(self.model.num_layers):
            part = getattr(self, section)
            if key in part.given and getattr(part, key) != value:
                found, wanted = (
                    describe(list(each) if type(each) is tuple else each) for each in (getattr(part, key), value)
                )
                faults.append(f"{section}.{key}={found}: {named} needs {wanted}; remove the key, or the profile.")
            changes.setdefault(section, {})[key] = value
        for section, key, value in profile.list_suggested():
            if key not in getattr(self, section).given:
                changes.setdefault(section, {})[key] = value
        if not changes:
            return
        privacy = _set_keys(self.privacy, changes.get("privacy", {}))
        if profile.needs_noise and not privacy.adds_noise:
            faults.append(
                f"privacy.dp_noise_multiplier={describe(privacy.dp_noise_multiplier)}: {named} protects released rows "
                "with noise, and 0 means no noise; use a value above 0, or remove the key or the profile."
            )
        faults += privacy.list_unused_keys()
        if faults:
            raise ConfigError(" ".join(faults))
        for section, keys in changes.items():
            object.__setattr__(self, section, _set_keys(getattr(self, section), keys))

    @property
    def data_seed(self) -> int:
        """The seed of the data: of the synthetic graph, its division among clients, and the splits."""
        return self.train.seed if self.data.seed is None else self.data.seed

    def replace(self, **changes: FlatSettings) -> Self:
        """Return a copy with changed keys: `config.replace(train={"seed": 1})`. These keys count as set by the user."""
        parts: dict[str, Any] = {name: _set_keys(getattr(self, name), keys) for name, keys in changes.items()}
        return dataclasses.replace(self, **parts)

    def to_dict(self, *, given: bool = False) -> dict[str, dict[str, Any]]:
        """Return the sections as plain values that JSON and TOML can hold.

        Args:
            given: omit the keys that were not set. If a config is built from the result, its preset can still choose
                values for these keys.
        """
        found: dict[str, dict[str, Any]] = {}
        for item in dataclasses.fields(self):
            part: Checked = getattr(self, item.name)
            values = {key: getattr(part, key) for key in type(part).__dataclass_fields__}  # type: ignore[attr-defined]
            found[item.name] = {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in values.items()
                if not given or key in part.given
            }
        return found

    @classmethod
    def from_dict(cls, sections: Mapping[str, Any], source: str = "the config") -> Self:
        """Build a config from nested dictionaries. ConfigError lists all unknown names and wrong values."""
        classes = {item.name: item.default_factory for item in dataclasses.fields(cls)}
        if not isinstance(sections, Mapping):
            raise ConfigError(
                f"{source}: the settings are {describe(sections)} and must be an object of sections, for example "
                f'{{"train": {{"seed": 1}}}}; known sections are {", ".join(sorted(classes))}.'
            )
        parts: dict[str, Any] = {}
        faults: list[str] = []
        for name, keys in sections.items():
            if name not in classes:
                faults.append(f"{source}: unknown section [{name}]{suggest(name, classes)}")
                continue
            if not isinstance(keys, Mapping):
                faults.append(f"{source}: {name}={describe(keys)}: must be a section, written [{name}].")
                continue
            kind: Any = classes[name]
            known = [item.name for item in dataclasses.fields(kind)]
            faults += [f"{source}: unknown key {name}.{key}{suggest(key, known)}" for key in keys if key not in known]
            with _collect_faults(faults):
                parts[name] = kind(**{key: keys[key] for key in keys if key in known and keys[key] is not None})
        if faults:
            raise ConfigError(" ".join(faults))
        return cls(**parts)

    @classmethod
    def from_toml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file and apply `section.key=value` overrides; relative paths are relative to the file."""
        path = Path(path)
        sections, faults = read_sections(path), list[str]()
        for override in overrides:
            with _collect_faults(faults):
                _apply_override(sections, override)
        with _collect_faults(faults):
            _make_absolute(sections, path)
        with _collect_faults(faults):
            config = cls.from_dict(sections, f"{path} (or --set)" if overrides else str(path))
        if faults:
            raise ConfigError(" ".join(faults))
        if config.data.parties and "num_clients" in sections["data"]:  # the default does not conflict with the folders
            refuse_other_count(config.data.num_clients, len(config.data.parties), "data.parties lists")
        return config

    def apply_overrides(self, overrides: Sequence[str], sections: Sequence[str]) -> Self:
        """Return a copy with `section.key=value` overrides; relative paths are relative to the working folder.

        Args:
            overrides: texts like the arguments of --set.
            sections: the sections that may be changed.
        """
        changed: dict[str, Any] = {}
        faults: list[str] = []
        for override in overrides:
            if override.partition(".")[0].strip() not in sections:
                faults.append(f"--set {override}: only [{'], ['.join(sections)}] can be changed here.")
                continue
            with _collect_faults(faults):
                _apply_override(changed, override)
        if faults:
            raise ConfigError(" ".join(faults))
        _make_absolute(changed, Path("-"))
        base = self.to_dict(given=True)
        for key, other in (("name", "parties"), ("parties", "name")):
            if key in changed.get("data", {}):  # the new source replaces the old one
                base["data"].pop(other, None)
        return self.from_dict({name: {**keys, **changed.get(name, {})} for name, keys in base.items()}, "--set")

    def extensions(self) -> tuple[registry.Extension, ...]:
        """Return the extensions that the settings use, sorted by name."""
        sections: list[Checked] = [getattr(self, part.name) for part in dataclasses.fields(self)]
        found = {registry.find_extension(*choice) for section in sections for choice in section.choices().items()}
        return tuple(sorted(found - {None}, key=str))  # type: ignore[arg-type]

    def digest(self) -> str:
        """Return the SHA-256 of the settings, in hexadecimal. The location of the data is not included."""
        return self._digest

    @functools.cached_property  # computed once, because every checkpoint holds it
    def _digest(self) -> str:
        settings: dict[str, Any] = self.to_dict()
        for key in WHERE:
            del settings["data"][key]
        candidates = list_candidates(self)
        if len(candidates) > 1 or candidates[0] != self:
            settings["candidates"] = [candidate._flatten() for candidate in candidates]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def flatten(self) -> dict[str, Any]:
        """Return the settings that the digest covers, one entry each: {"train.seed": 0}.

        Keys that the preset decides have their defaults here, and one more entry lists these keys. So a config that
        sets such a key to its default differs from a config that does not set it.
        """
        found = self._flatten()
        left_open = list_open_keys(list_candidates(self))
        return {**found, LEFT_OPEN: left_open} if left_open else found

    def _flatten(self) -> dict[str, Any]:
        return {
            f"{section}.{key}": value
            for section, keys in self.to_dict().items()
            for key, value in keys.items()
            if section != "data" or key not in WHERE
        }


def _set_keys(part: Part, keys: FlatSettings) -> Part:
    """Return a section with changed keys. They count as given, as if the user had set them."""
    return type(part)(**{**{key: getattr(part, key) for key in part.given}, **keys})


def describe_profile(config: RunConfig) -> str:
    """Return the settings of `privacy.profile` in one line, as TOML; an empty string for "off"."""
    name = config.privacy.profile
    profile: Profile = registry.load("profile", name)
    found = []
    for section, key, value in [*profile.list_required(config.model.num_layers), *profile.list_suggested()]:
        used = getattr(getattr(config, section), key)
        note = "" if used == value else f" (set explicitly; {name} suggests {_write_toml(value)})"
        found.append(f"{section}.{key} = {_write_toml(used)}{note}")
    return f'privacy.profile = "{name}": {", ".join(found)}' if found else ""


def _write_toml(value: Any) -> str:
    """Return a setting as TOML. For these types, JSON is TOML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def list_candidates(config: RunConfig) -> tuple[RunConfig, ...]:
    """Return the candidates of `train.preset` as settings, in order of preference. Often there is only one."""
    candidates: tuple[RunConfig, ...] = registry.load("preset", config.train.preset).expand(config)
    return candidates


def list_open_keys(candidates: Sequence[RunConfig]) -> list[str]:
    """Return the names of the settings in which candidates differ, sorted."""
    flat = [candidate._flatten() for candidate in candidates]
    return sorted(key for key, value in flat[0].items() if any(other[key] != value for other in flat[1:]))


def read_sections(path: Path) -> dict[str, Any]:
    """Read a TOML file whose top level consists of sections."""
    try:
        return parse_toml(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file.") from None
    except RecordError as error:
        raise ConfigError(str(error)) from None


def refuse_other_count(num_clients: int, found: int, where: str) -> None:
    """Refuse a `data.num_clients` that differs from the number of given parties."""
    if num_clients != found:
        raise ConfigError(
            f"data.num_clients={num_clients}: {where} {found}; remove data.num_clients, or set it to {found}. Only a "
            "single graph can be divided among any number of clients."
        )


def _make_absolute(sections: dict[str, Any], file: Path) -> None:
    """Make the paths in [data] absolute; relative paths start at the folder of `file`."""
    data = sections.get("data")
    if isinstance(data, dict):
        if isinstance(data.get("root"), str):
            data["root"] = _resolve_path(file, data["root"])
        if isinstance(data.get("parties"), list):
            data["parties"] = [_resolve_path(file, item) if isinstance(item, str) else item for item in data["parties"]]


def _resolve_path(file: Path, path: str) -> str:
    try:
        return str((file.parent / Path(path).expanduser()).resolve())
    except (RuntimeError, ValueError) as error:  # an unknown user's home, a loop of links, a null character
        raise ConfigError(f"{file}: the path {path!r} is invalid: {error}") from None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the most similar known name, or all names."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else f"; known are {', '.join(sorted(known))}."


@contextlib.contextmanager
def _collect_faults(faults: list[str]) -> Iterator[None]:
    """Append the message of a ConfigError in the block to `faults`, so that one error can list all faults."""
    try:
        yield
    except ConfigError as error:
        faults.append(str(error))


def _apply_override(sections: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into the sections. A value that is not valid TOML is a string."""
    path, equals, text = override.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {override}: must look like section.key=value, for example train.seed=1.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # not TOML
        value = text.strip()
    except RecursionError:
        raise ConfigError(f"--set {path.strip()}: the value is nested too deeply.") from None
    keys = sections.setdefault(section, {})
    if isinstance(keys, dict):
        keys[key] = value


def resolve(config: RunConfig, num_nodes: int) -> tuple[RunConfig, dict[str, Override]]:
    """Replace "auto" with its value for a graph of this size. `glasu.data.methods` applies `train.method`.

    If the preset has only one candidate, that candidate is applied as well. Otherwise the run chooses a
    candidate later (`glasu.protocol.race`).

    Returns:
        The resolved settings, and the settings that were replaced because the sampler reads the whole graph:
        {"train.sampled_evaluation": {"requested": True, "used": False}}.
    """
    candidates = list_candidates(config)
    config = candidates[0] if len(candidates) == 1 else config
    train = config.train
    small = num_nodes <= SMALL_GRAPH and not train.max_nodes  # a node limit needs a sampler that draws nodes
    large_batch = min(512, train.max_nodes or 512)
    sampler = train.sampler
    if sampler == "auto":
        sampler = next(registry.select("sampler", default_for="small graphs" if small else "large graphs"))
    batch_size = (0 if small else large_batch) if train.batch_size == "auto" else train.batch_size
    defaults = {key: getattr(TrainConfig, key) for key in SAMPLING_ONLY if reads_whole_graph(sampler)}
    unused = {key: value for key, value in defaults.items() if getattr(train, key) != value}
    overridden: dict[str, Override] = {
        f"train.{key}": {"requested": getattr(train, key), "used": value} for key, value in unused.items()
    }
    return config.replace(train={"sampler": sampler, "batch_size": batch_size, **unused}), overridden
