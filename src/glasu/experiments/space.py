"""Search spaces: which keys of a run vary over which values, read from TOML and tried before anything runs."""

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
from glasu.config_section import require, show_value
from glasu.errors import ConfigError

Point = dict[str, Any]  # {"train.learning_rate": 0.01, ...}
TRIED = 300  # combinations that are tried in RunConfig before a search
GIVEN = ("evaluate_nodes", "labels", "method", "sampled_evaluation", "seed", "task")  # in [train]: what is compared


@dataclass(frozen=True)
class Choices:
    """A key that takes one of several values."""

    values: tuple[Any, ...]

    @property
    def labels(self) -> tuple[Any, ...]:
        """The values as a study stores them: a list becomes its text."""
        return tuple(label(value) for value in self.values)

    @property
    def ends(self) -> tuple[Any, ...]:
        """What is tried before a search: every value."""
        return self.values

    def contains(self, value: Any) -> bool:
        return value in self.values

    def to_plain(self) -> Any:
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """A key that takes any number between two bounds, both included; integers where both bounds are."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        """What is tried before a search: both bounds."""
        return (self.low, self.high)

    def exact(self, value: float) -> float:
        """Return a drawn value as a decimal reads: 0.3, not 0.1 + 0.1 + 0.1."""
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
        """The number of points; None where a range has no end of them."""
        if any(isinstance(values, Range) for values in self.keys.values()):
            return None
        return math.prod(len(values.ends) for values in self.keys.values())

    def point(self, number: int) -> Point:
        """Return one point of a space of choices, 0 <= number < size."""
        point = {}
        for key, values in reversed(self.keys.items()):
            number, digit = divmod(number, len(values.ends))
            point[key] = values.ends[digit]
        return {key: point[key] for key in self.keys}

    def point_of(self, config: RunConfig) -> Point | None:
        """Return the point at which a config lies; None where it lies outside."""
        settings = config.to_dict()
        point = {key: settings[key.partition(".")[0]][key.partition(".")[2]] for key in self.keys}
        return point if all(values.contains(point[key]) for key, values in self.keys.items()) else None

    def to_plain(self) -> dict[str, Any]:
        """Return the space as values that JSON can hold."""
        return {key: values.to_plain() for key, values in self.keys.items()}


def label(value: Any) -> Any:
    """Return a value as a study, a table and a line of text show it."""
    return json.dumps(value, default=str) if isinstance(value, (list, tuple, dict)) else value


def config_at(config: RunConfig, point: Mapping[str, Any]) -> RunConfig:
    """Return the config with the keys of a point changed."""
    sections: dict[str, Any] = config.to_dict()
    for key, value in point.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return RunConfig.from_dict(sections)


def built_in_spaces() -> list[str]:
    """List the names of the spaces that come with GLASU."""
    return sorted(item.name.removesuffix(".toml") for item in _folder().iterdir() if item.name.endswith(".toml"))


def _folder() -> resources.abc.Traversable:
    return resources.files("glasu.experiments").joinpath("spaces")


def read_space(name: str | Path, config: RunConfig) -> Space:
    """Read a space and try it with the run's settings, so that no trial fails for a value that cannot be.

    Args:
        name: a built-in space, or the path of a TOML file with the sections of a run file. A list holds choices, a
            table {low, high, log, step} is a range.
        config: what the keys that do not vary are.
    """
    source = f"space {name}"
    try:
        sections = tomllib.loads(_text(str(name)))
    except ValueError as error:
        raise ConfigError(f"{source}: is not valid TOML: {error}.") from None
    keys: dict[str, Choices | Range] = {}
    for section, items in sections.items():
        require(
            isinstance(items, dict), f"{source}: {section}={show_value(items)}", "must stand in a section, as [train]."
        )
        for key, given in items.items():
            where = f"{section}.{key}"
            if section == "data" or (section == "train" and key in GIVEN):
                rule = "decides what is learned and measured, not how well; set it in the run file or with --set."
                raise ConfigError(f"{source}: {where}: {rule}")
            keys[where] = _values(given, f"{source}: {where}={show_value(given)}")
    require(bool(keys), source, "varies nothing; give a key a list of choices or a range {low = ..., high = ...}.")
    space = Space(keys)
    for point in _samples(space):
        try:
            config_at(config, point)
        except ConfigError as error:
            raise ConfigError(f"{source}: {str(error).removeprefix('the config: ')}") from None
    return space


def _text(name: str) -> str:
    if name.endswith(".toml"):
        try:
            return Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"space {name}: cannot be read ({error.strerror}); give a TOML file or a name.") from None
    known = built_in_spaces()
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
        require(fits, where, "step must lead from low to high exactly, in integers where both are.")
    return Range(low, high, log, step)


def _divides(step: float, low: float, high: float) -> bool:
    """Tell whether whole steps lead from low to high, in decimals as they are written."""
    return (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step)) == 0


def _samples(space: Space) -> Iterator[Point]:
    """Yield all combinations of choices and bounds, or where they are too many, every value and random combinations."""
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
