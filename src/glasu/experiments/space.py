"""Search spaces: the keys of a run that vary, and their values; read from TOML and checked before a search."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

from glasu.config import RunConfig
from glasu.errors import ConfigError
from glasu.records import describe

Point = dict[str, Any]  # {"train.learning_rate": 0.01, ...}
TRIED = 300  # combinations that are checked with RunConfig before a search
FIXED = ("evaluate_nodes", "labels", "method", "sampled_evaluation", "seed", "task")  # keys of [train] that do not vary


def require(condition: bool, value: object, rule: str) -> None:
    """Raise ConfigError unless the condition holds; the message names the value and the rule."""
    if not condition:
        raise ConfigError(f"{value}: {rule}")


@dataclass(frozen=True)
class Choices:
    """A key that takes one of several values."""

    values: tuple[Any, ...]

    @property
    def labels(self) -> tuple[Any, ...]:
        """The values in the form that a study stores: a list becomes text."""
        return tuple(label(value) for value in self.values)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values to check before a search: all."""
        return self.values

    def contains(self, value: Any) -> bool:
        return value in self.values

    def to_plain(self) -> Any:
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """A key that takes any number between two bounds, both included; an integer if both bounds are integers."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values to check before a search: both bounds."""
        return (self.low, self.high)

    def round_to_step(self, value: float) -> float:
        """Return the decimal number next to a drawn value: 0.3, not 0.1 + 0.1 + 0.1."""
        if self.step is None or self.is_integer:
            return value
        low, step = Decimal(str(self.low)), Decimal(str(self.step))
        return float(low + step * round((Decimal(value) - low) / step))

    def contains(self, value: Any) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and self.low <= value <= self.high and (self.step is None or _divides(self.step, self.low, value))

    def to_plain(self) -> Any:
        return {"low": self.low, "high": self.high, "log": self.log, "step": self.step}


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
        settings = config.to_dict()
        point = {key: settings[key.partition(".")[0]][key.partition(".")[2]] for key in self.keys}
        return point if all(values.contains(point[key]) for key, values in self.keys.items()) else None

    def to_plain(self) -> dict[str, Any]:
        """Return the space as values that JSON can hold."""
        return {key: values.to_plain() for key, values in self.keys.items()}


def label(value: Any) -> Any:
    """Return a value in the form of a study and a table: a list becomes text."""
    return json.dumps(value, default=str) if isinstance(value, (list, tuple, dict)) else value


def format_point(point: Point) -> str:
    """Return a point as one line."""
    return ", ".join(
        f"{key}={f'{value:.4g}' if isinstance(value, float) else label(value)}" for key, value in point.items()
    )


def apply_point(config: RunConfig, point: Mapping[str, Any]) -> RunConfig:
    """Return the config with the keys of a point changed."""
    sections: dict[str, Any] = config.to_dict()
    for key, value in point.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return RunConfig.from_dict(sections)


def list_built_in_spaces() -> list[str]:
    """List the names of the spaces that come with GLASU."""
    return sorted(item.name.removesuffix(".toml") for item in _folder().iterdir() if item.name.endswith(".toml"))


def _folder() -> resources.abc.Traversable:
    return resources.files("glasu.experiments").joinpath("spaces")


def read_space(name: str | Path, config: RunConfig) -> Space:
    """Read a space and check its combinations with the settings of the run.

    Args:
        name: a built-in space, or the path of a TOML file with the sections of a run file. A list holds choices, a
            table {low, high, log, step} is a range.
        config: the settings of the keys that do not vary.
    """
    source = f"space {name}"
    try:
        sections = tomllib.loads(_text(str(name)))
    except ValueError as error:
        raise ConfigError(f"{source}: is not valid TOML: {error}.") from None
    keys: dict[str, Choices | Range] = {}
    for section, items in sections.items():
        require(
            isinstance(items, dict), f"{source}: {section}={describe(items)}", "must be in a section such as [train]."
        )
        for key, given in items.items():
            where = f"{section}.{key}"
            if section == "data" or (section == "train" and key in FIXED):
                rule = "changes the task or the score, so it cannot vary; set it in the run file or with --set."
                raise ConfigError(f"{source}: {where}: {rule}")
            keys[where] = _values(given, f"{source}: {where}={describe(given)}")
    require(bool(keys), source, "has no key that varies; give a list of choices, or a range {low = ..., high = ...}.")
    space = Space(keys)
    for point in _samples(space):
        try:
            apply_point(config, point)
        except ConfigError as error:
            raise ConfigError(f"{source}: {str(error).removeprefix('the config: ')}") from None
    return space


def _text(name: str) -> str:
    if name.endswith(".toml"):
        try:
            return Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"space {name}: cannot be read ({error.strerror}); give a TOML file or a name.") from None
    known = list_built_in_spaces()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}, or give a .toml file."
        raise ConfigError(f"space {name}: is unknown; {hint}")
    return _folder().joinpath(f"{name}.toml").read_text(encoding="utf-8")


def _values(given: Any, where: str) -> Choices | Range:
    if isinstance(given, list):
        require(bool(given), where, "at least one choice is needed.")
        choices = Choices(tuple(given))
        require(len(set(choices.labels)) == len(given), where, "names a choice twice.")
        return choices
    rule = "must be a list of choices, or a range such as {low = 0.001, high = 0.1, log = true} or {low = 2, high = 9}."
    require(isinstance(given, dict) and {"low", "high"} <= set(given) <= {"low", "high", "log", "step"}, where, rule)
    low, high, log, step = given["low"], given["high"], given.get("log", False), given.get("step")
    for number in (low, high) if step is None else (low, high, step):
        real = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
        require(real, where, "low, high and step must be numbers.")
    require(low < high, where, "low must lie below high.")
    require(isinstance(log, bool), where, "log must be true or false.")
    require(not log or (low > 0 and step is None), where, "a logarithmic range lies above 0 and has no step.")
    if step is not None:
        whole = not (isinstance(low, int) and isinstance(high, int)) or isinstance(step, int)
        fits = step > 0 and whole and _divides(step, low, high)
        require(fits, where, "high - low must be a multiple of step; with integer bounds, step must be an integer.")
    return Range(low, high, log, step)


def _divides(step: float, low: float, high: float) -> bool:
    """Return True if high - low is a multiple of the step, in decimal arithmetic."""
    return (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step)) == 0


def _samples(space: Space) -> Iterator[Point]:
    """Yield all combinations of choices and bounds; if there are too many, every value and random combinations."""
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
