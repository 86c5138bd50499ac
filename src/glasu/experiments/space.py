"""Search spaces: the keys of a run that vary, and their values; read from TOML and checked before a search."""

from __future__ import annotations

import enum
import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

from glasu.config import RunConfig, read_sections, suggest
from glasu.errors import ConfigError
from glasu.records import FlatSettings, RecordError, Sections, SettingValue, describe, read_record

Point = dict[str, SettingValue]  # {"train.learning_rate": 0.01, ...}
TRIED = 300  # number of combinations that are checked with RunConfig before a search
FIXED = ("evaluate_nodes", "labels", "method", "sampled_evaluation", "seed", "task")  # keys of [train] that do not vary
SPACES = Path(str(resources.files("glasu.experiments"))) / "spaces"


class SearchSampler(enum.StrEnum):
    """How a search chooses its points."""

    TPE = "tpe"
    GRID = "grid"  # every point once, in random order
    RANDOM = "random"


def require(condition: bool, value: object, rule: str) -> None:
    """Raise ConfigError unless the condition holds; the message names the value and the rule."""
    if not condition:
        raise ConfigError(f"{value}: {rule}")


@dataclass(frozen=True)
class Choices:
    """A key that takes one of several values."""

    ends: tuple[Any, ...]  # all values; they are checked before a search

    def __post_init__(self) -> None:
        require(bool(self.ends), "[]", "at least one choice is needed.")
        require(len(set(self.labels)) == len(self.ends), describe(list(self.ends)), "names a choice twice.")

    @property
    def labels(self) -> tuple[Any, ...]:
        """The values in the form that a study stores: a list becomes text."""
        return tuple(label(value) for value in self.ends)

    def contains(self, value: Any) -> bool:
        return value in self.ends

    def decode(self, stored: Any) -> Any:
        """Return the value of a label."""
        return self.ends[self.labels.index(stored)]


@dataclass(frozen=True)
class Range:
    """A key that takes any number between two bounds, both included; an integer if both bounds are integers."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    def __post_init__(self) -> None:
        require(self.low < self.high, f"low={self.low}", f"low must lie below high, which is {self.high}.")
        logarithmic = not self.log or (self.low > 0 and self.step is None)
        require(logarithmic, "log=true", "a logarithmic range lies above 0 and has no step.")
        if self.step is not None:
            whole = not self.is_integer or isinstance(self.step, int)
            fits = self.step > 0 and whole and _divides(self.step, self.low, self.high)
            rule = "high - low must be a multiple of step; with integer bounds, step must be an integer."
            require(fits, f"step={self.step}", rule)

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values to check before a search: both bounds."""
        return (self.low, self.high)

    def contains(self, value: Any) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and self.low <= value <= self.high and (self.step is None or _divides(self.step, self.low, value))

    def decode(self, stored: float) -> float:
        """Return the nearest short decimal number to a drawn value: 0.3, not 0.1 + 0.1 + 0.1."""
        if self.step is None or self.is_integer:
            return stored
        low, step = Decimal(str(self.low)), Decimal(str(self.step))
        return float(low + step * round((Decimal(stored) - low) / step))


@dataclass(frozen=True)
class Space:
    """The keys that vary: {"train.learning_rate": Range(0.001, 0.05, log=True), ...}."""

    keys: dict[str, Choices | Range]

    @property
    def size(self) -> int | None:
        """The number of points; None if there is a range."""
        if any(isinstance(values, Range) for values in self.keys.values()):
            return None
        return math.prod(len(values.ends) for values in self.keys.values())

    def point(self, number: int) -> Point:
        """Return one point of a finite space, 0 <= number < size."""
        point = {}
        for key, values in reversed(self.keys.items()):
            number, digit = divmod(number, len(values.ends))
            point[key] = values.ends[digit]
        return {key: point[key] for key in self.keys}

    def point_of(self, config: RunConfig) -> Point | None:
        """Return the point of a config; None if the space does not contain it."""
        settings = config.flatten()
        point = {key: settings[key] for key in self.keys}
        return point if all(values.contains(point[key]) for key, values in self.keys.items()) else None


def label(value: Any) -> Any:
    """Return a value in the form that studies and tables use: a list becomes text."""
    return json.dumps(value, default=str) if isinstance(value, (list, tuple, dict)) else value


def format_point(point: Point) -> str:
    """Return a point as one line."""
    return ", ".join(
        f"{key}={f'{value:.4g}' if isinstance(value, float) else label(value)}" for key, value in point.items()
    )


def apply_point(config: RunConfig, point: FlatSettings) -> RunConfig:
    """Return the config with the keys of a point changed."""
    sections: dict[str, Any] = config.to_dict()
    for key, value in point.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    sections["train"]["preset"] = "none"  # a search takes every key as written, and so does its best.toml
    return RunConfig.from_dict(sections)


def list_built_in_spaces() -> list[str]:
    """List the names of the spaces that come with GLASU."""
    return sorted(path.stem for path in SPACES.glob("*.toml"))


def read_space(name: str | Path, config: RunConfig) -> Space:
    """Read a space and check its combinations with the settings of the run.

    Args:
        name: a built-in space, or the path of a TOML file with the sections of a run file. A list holds choices, a
            table {low, high, log, step} is a range.
        config: the settings of the keys that do not vary.
    """
    known, name = list_built_in_spaces(), str(name)
    if not name.endswith(".toml") and name not in known:
        raise ConfigError(f"space {name}: is unknown; give a .toml file or a built-in space{suggest(name, known)}")
    try:
        space = Space(_read_keys(read_sections(Path(name) if name.endswith(".toml") else SPACES / f"{name}.toml")))
        for point in _list_samples(space):
            apply_point(config, point)
    except (ConfigError, RecordError) as error:
        raise ConfigError(f"space {name}: {str(error).removeprefix('the config: ')}") from None
    return space


def _read_keys(sections: Sections) -> dict[str, Choices | Range]:
    keys: dict[str, Choices | Range] = {}
    for section, items in sections.items():
        require(isinstance(items, dict), f"{section}={describe(items)}", "must be in a section such as [train].")
        for key, given in items.items():
            where = f"{section}.{key}"
            fixed = section == "data" or (section == "train" and key in FIXED)
            rule = "changes the task or the score, so it cannot vary; set it in the run file or with --set."
            require(not fixed, where, rule)
            if isinstance(given, dict):
                keys[where] = read_record(Range, given, where)
            else:
                rule = "must be a list of choices, or a range such as {low = 0.001, high = 0.1, log = true}."
                require(isinstance(given, list), f"{where}={describe(given)}", rule)
                keys[where] = Choices(tuple(given))
    rule = "has no key that varies; give a list of choices, or a range {low = ..., high = ...}."
    require(bool(keys), "the file", rule)
    return keys


def _divides(step: float, low: float, high: float) -> bool:
    """Return True if high - low is a multiple of the step, in decimal arithmetic."""
    return (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step)) == 0


def _list_samples(space: Space) -> Iterator[Point]:
    """Yield all combinations of choices and bounds.

    If there are too many, first yield some combinations in which every value occurs, then random combinations.
    """
    ends = [values.ends for values in space.keys.values()]
    if math.prod(len(values) for values in ends) <= TRIED:
        combinations: Iterator[tuple[Any, ...]] = itertools.product(*ends)
    else:
        rng, longest = random.Random(0), max(len(values) for values in ends)
        combinations = itertools.chain(
            (tuple(values[index % len(values)] for values in ends) for index in range(longest)),
            (tuple(rng.choice(values) for values in ends) for _ in range(TRIED - longest)),
        )
    for values in combinations:
        yield dict(zip(space.keys, values, strict=True))
