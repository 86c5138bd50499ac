"""Sections of settings: frozen dataclasses that check the types of their fields on construction."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import sys
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from glasu import registry
from glasu.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """Marks a string field whose values are the choices of a seam: `Annotated[str, Choice("sampler")]`."""

    seam: str


def require(condition: bool, value: object, rule: str) -> None:
    """Raise ConfigError unless the condition holds; the message names the value and the rule."""
    if not condition:
        raise ConfigError(f"{value}: {rule}")


def show_value(value: object) -> str:
    """Return a value as one line of bounded length."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "(a number with thousands of digits)"
    return text if len(text) <= 500 else f"{text[:100]}...{text[-1]}"


def _list_options(annotation: Any) -> list[Any]:
    """Return the alternatives of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [option for part in typing.get_args(annotation) for option in _list_options(part)]
    return [annotation]


def _to_python(value: Any) -> Any:
    """Convert a numpy number to a Python number; a grid search may produce numpy numbers."""
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def _convert(value: Any, option: Any) -> Any:
    """Convert `value` to the type `option`, or raise TypeError."""
    value = _to_python(value)
    origin = typing.get_origin(option)
    if origin is Literal:
        if isinstance(value, str) and value in typing.get_args(option):
            return value
    elif origin is Annotated:
        if isinstance(value, str) and registry.is_choice(_seam(option), value):
            return value
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            inner = typing.get_args(option)
            if inner[-1] is Ellipsis:
                return tuple(_convert(item, inner[0]) for item in value)
            if len(inner) == len(value):
                return tuple(_convert(item, kind) for item, kind in zip(value, inner, strict=True))
    elif option is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            return float(value)
    elif option is type(None):
        if value is None:
            return None
    elif isinstance(value, option) and not (option is int and isinstance(value, bool)):
        return value
    raise TypeError


def _seam(option: Any) -> str:
    (choice,) = typing.get_args(option)[1:]
    assert isinstance(choice, Choice)
    return choice.seam


def _describe(option: Any) -> str:
    origin = typing.get_origin(option)
    if origin in (Literal, Annotated):
        known = typing.get_args(option) if origin is Literal else registry.choices(_seam(option))
        return " or ".join(f'"{choice}"' for choice in known)
    if origin is tuple:
        inner = typing.get_args(option)
        if inner[-1] is Ellipsis:
            return f"a list of {_describe(inner[0]).removeprefix('a ').removeprefix('an ')}s"
        return f"a list of {len(inner)} numbers"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "nothing"}
    return names[option]


def _convert_field(name: str, value: Any, options: list[Any]) -> Any:
    """Convert `value` to the first matching option, or raise ConfigError."""
    if int in options and isinstance(value, int):
        bits = 63 if name == "seed" else 31  # counts and index arrays are sent as 32-bit integers
        if abs(value) > 2**bits:
            raise ConfigError(f"must be an integer below 2^{bits}.")
    for option in options:
        with contextlib.suppress(TypeError):
            return _convert(value, option)
    expected = " or ".join(_describe(option) for option in options if option is not type(None))
    raise ConfigError(f"must be {expected}.")


class Section:
    """Base class of a section. The constructor refuses invalid values."""

    section: typing.ClassVar[str]

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        faults = []
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = _to_python(getattr(self, item.name))
            try:
                object.__setattr__(self, item.name, _convert_field(item.name, value, _list_options(hints[item.name])))
            except ConfigError as error:
                faults.append(f"{self.section}.{item.name}={show_value(value)}: {error}")
        if faults:
            raise ConfigError(" ".join(faults))
        self._check()

    def choices(self) -> dict[str, str]:
        """Return the chosen implementation of every seam that a field of this section names."""
        hints = typing.get_type_hints(type(self), include_extras=True)
        return {
            _seam(option): getattr(self, name)
            for name, hint in hints.items()
            for option in _list_options(hint)
            if typing.get_origin(option) is Annotated
        }

    def _check(self) -> None:
        """Raise ConfigError if a value is out of range or does not fit another value."""

    def _need(self, key: str, condition: bool, rule: str) -> None:
        require(condition, f"{self.section}.{key}={show_value(getattr(self, key))}", rule)

    def _refuse_without_effect(self, *keys: str) -> None:
        """Refuse values other than the default for keys that this version ignores."""
        defaults = {item.name: item.default for item in dataclasses.fields(self)}  # type: ignore[arg-type]
        for key in keys:
            rule = f"has no effect in this version, so only its default {defaults[key]!r} is accepted; remove it."
            self._need(key, getattr(self, key) == defaults[key], rule)
