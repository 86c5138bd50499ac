"""Read JSON and TOML objects strictly into frozen dataclasses, and write them back as plain values.

The annotations of the dataclass are the rules. A key that the class does not have, a missing key and a value of the
wrong type are faults. All faults of one object are reported together. Every fault has a path and a code. A dataclass
that inherits from `Checked` applies the same rules when it is constructed.

annotation                       plain value
str, bool, int, float, None      the same; an integer fits into 64 bits, a float is finite
datetime                         the same, with a time zone; TOML only
Literal[...]                     one of the values
bytes                            a string of hexadecimal digits
tuple[X, ...], tuple[X, Y]       a list
Mapping[str, X]                  an object
Mapping[Literal[...], X]         an object whose keys are among these values
Mapping[K, X]                    a list of [key, value] pairs
a dataclass                      an object
X | Y                            the first alternative that fits
Any                              any plain value
Annotated[X, Bounds(...)]        X, with a minimum and a maximum value
Annotated[str, Choice(...)]      one of the names of a seam (`glasu.registry`)
Annotated[X, Length(...)]        X, with a minimum and a maximum length
any other class                  an instance of the class, which the caller has inserted
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import enum
import functools
import json
import math
import numbers
import reprlib
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from glasu import registry
from glasu.errors import ConfigError, DataError, GlasuError

T = TypeVar("T")
SettingValue = bool | int | float | str | tuple[Any, ...] | None
FlatSettings = Mapping[str, SettingValue]  # {"train.num_local_steps": 1}, or the keys of one section
Sections = Mapping[str, Mapping[str, Any]]  # settings as plain values: {"train": {"num_local_steps": 1}}
PLAIN = (str, int, float, list, tuple, Mapping, types.NoneType)  # values that JSON and TOML have; bool is an int
SCALARS = frozenset({str, bool, int, float, types.NoneType})  # types of values that need no conversion
MAX_DEPTH = 32  # maximum depth of nested values; the only limit of json.loads is Python's recursion limit
MAX_ITEMS = 1_000_000  # maximum number of items of one list or object, unless `Length` sets another limit
MAX_TEXT = 1_000_000  # maximum number of characters of one string, unless `Length` sets another limit
MAX_DOCUMENT_BYTES = 64 * 2**20  # maximum number of bytes of one document
SHOWN_FAULTS = 8
MAX_FAULTS = 100  # reading stops at this number of faults
TYPE_NAMES: dict[Any, tuple[str, str]] = {  # type -> its name in the singular and in the plural
    str: ("a string", "strings"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "values"),
    bytes: ("hexadecimal digits", "strings"),
    datetime: ("a time with a time zone", "times"),
}


class _ShortRepr(reprlib.Repr):
    """Short texts of values, with true and false as in JSON and TOML."""

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()


_SHORT = _ShortRepr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 2, 12, 12, 4
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


class FaultCode(enum.StrEnum):
    """The kinds of faults that a caller may need to distinguish."""

    NOT_PARSED = "not-parsed"  # not JSON or not TOML
    MISSING = "missing"
    UNKNOWN = "unknown"
    TYPE = "type"
    VALUE = "value"  # correct type, but not an allowed value
    SIZE = "size"  # too long or too deeply nested


@dataclass(frozen=True)
class Fault:
    """One fault of a document."""

    code: FaultCode
    path: str  # for example `client[2].name`; empty for the whole document
    rule: str
    found: str = ""  # the value, as one short line

    def __str__(self) -> str:
        value = f"={self.found}" if self.found else ""
        return f"{self.path}{value}: {self.rule}" if self.path else self.rule


class RecordError(DataError):
    """A document does not have the fields that its reader needs."""

    def __init__(self, source: str, faults: Sequence[Fault]) -> None:
        """List the faults of the document called `source`, in one line."""
        self.source, self.faults = source, tuple(faults)
        listed = "; ".join(map(str, self.faults[:SHOWN_FAULTS]))
        more = len(self.faults) - SHOWN_FAULTS
        super().__init__(f"{source}: {listed}{f'; and {more} more faults' if more > 0 else ''}.")


@dataclass(frozen=True)
class Bounds:
    """An interval of numbers."""

    least: float
    most: float = math.inf
    hint: str = ""  # the meaning of the number, or of one of the bounds
    ends: str = "[]"  # a round bracket excludes a bound

    def contains(self, value: float) -> bool:
        """Return whether a number lies in the interval."""
        above = value > self.least if self.ends[0] == "(" else value >= self.least
        return above and (value < self.most if self.ends[1] == ")" else value <= self.most)

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        if self.most == math.inf:
            return f"must be {'above' if self.ends[0] == '(' else 'at least'} {self.least:g}{hint}"
        return f"must lie in {self.ends[0]}{self.least:g}, {_format_bound(self.most)}{self.ends[1]}{hint}"


@dataclass(frozen=True)
class Length:
    """The lengths that a string, list or object may have."""

    most: int
    least: int = 0


@dataclass(frozen=True)
class Choice:
    """A string that must be one of the names that the registry lists for a seam."""

    seam: str


class Checked:
    """Base class of a frozen dataclass that checks its fields on construction. ConfigError lists all faults."""

    section: typing.ClassVar[str]  # first part of the path of every fault
    given: frozenset[str]  # the keys that the caller passed; all other keys have their defaults

    def __new__(cls, **given: Any) -> typing.Self:
        created = super().__new__(cls)
        object.__setattr__(created, "given", frozenset(given))
        return created

    def __post_init__(self) -> None:
        reader, hints = _Reader("", True, {}), read_type_hints(typing.cast(Any, type(self)))
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = reader.read_value(hints[item.name], getattr(self, item.name), f"{self.section}.{item.name}", 1)
            object.__setattr__(self, item.name, value)
        if reader.faults:
            raise ConfigError(" ".join(f"{fault}." for fault in reader.faults))
        self._check()

    def choices(self) -> dict[str, str]:
        """Return {seam: chosen name} for all fields that choose an implementation of a seam."""
        return {
            rule.seam: getattr(self, name)
            for name, hint in read_type_hints(typing.cast(Any, type(self))).items()
            for option in (hint, *typing.get_args(hint))  # the alternatives of a union
            for rule in getattr(option, "__metadata__", ())
            if isinstance(rule, Choice)
        }

    def _check(self) -> None:
        """Raise ConfigError if two values do not fit together."""

    def _need(self, key: str, condition: bool, rule: str) -> None:
        """Raise ConfigError unless the condition holds; the message names the key, its value and the rule."""
        if not condition:
            raise ConfigError(f"{self.section}.{key}={describe(getattr(self, key))}: {rule}")


def read_record(
    cls: type[T],
    value: object,
    source: str,
    *,
    finite: bool = True,
    partial: bool = False,
    names: Mapping[str, Any] | None = None,
) -> T:
    """Build a dataclass from a plain object, or raise RecordError with all faults.

    Args:
        cls: a frozen dataclass.
        value: the parsed JSON or TOML.
        source: name of the file or message; the error starts with it.
        finite: whether to refuse floats that are not finite.
        partial: whether to ignore unknown keys, because the document contains more than the fields of `cls`.
        names: types that the module of `cls` imports for type checking only, by name.
    """
    reader = _Reader(source, finite, names or {}, partial=partial)
    result = reader.read_dataclass(cls, value, "", 0)
    if reader.faults:
        raise RecordError(source, reader.faults)
    return typing.cast(T, result)


def to_plain(record: Any) -> dict[str, Any]:
    """Return a dataclass as plain values; `read_record` is the inverse.

    A field is omitted if it is None by default and its value is None, because TOML has no null.
    """
    return {
        name: _to_plain_value(value)
        for name, is_optional in _fields(record.__class__)
        if (value := getattr(record, name)) is not None or not is_optional
    }


@functools.cache
def _fields(cls: type[Any]) -> tuple[tuple[str, bool], ...]:
    """Return the fields of a dataclass: the name, and whether it is None by default."""
    return tuple((field.name, field.default is None) for field in dataclasses.fields(cls))


def parse_json(content: bytes | str, source: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> object:
    """Parse JSON; refuse duplicate keys, deep nesting and documents that are too long."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("an object has the same key twice")
        return found

    return _parse(lambda text: json.loads(text, object_pairs_hook=unique), "JSON", content, source, max_bytes)


def parse_toml(content: bytes | str, source: str) -> dict[str, Any]:
    """Parse TOML; refuse deep nesting and documents that are too long."""
    return typing.cast("dict[str, Any]", _parse(tomllib.loads, "TOML", content, source, MAX_DOCUMENT_BYTES))


def _parse(
    parser: Callable[[str], object], format_name: str, content: bytes | str, source: str, max_bytes: int
) -> object:
    if len(content) > max_bytes:
        message = f"has {len(content)} bytes, and at most {max_bytes} are read"
        raise RecordError(source, [Fault(FaultCode.SIZE, "", message)])
    try:
        return parser(content if isinstance(content, str) else content.decode("utf-8"))
    except RecursionError:
        raise RecordError(source, [Fault(FaultCode.SIZE, "", "is nested too deeply")]) from None
    except ValueError as error:  # not UTF-8, not JSON or TOML, or a number with thousands of digits
        why = str(error).rstrip(".")
        if isinstance(error, UnicodeDecodeError):
            line = error.object.count(b"\n", 0, error.start) + 1
            why = f"line {line} is not UTF-8; save it as UTF-8"
        message = f"is not valid {format_name}: {why}"
        raise RecordError(source, [Fault(FaultCode.NOT_PARSED, "", message)]) from None


def _to_plain_value(value: Any) -> Any:
    if type(value) in SCALARS:  # first, because most values of a long state are numbers
        return value
    if isinstance(value, (list, tuple)):
        if SCALARS.issuperset(map(type, value)):  # for example the losses of all rounds
            return list(value)
        return [_to_plain_value(item) for item in value]
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _to_plain_value(item) for key, item in value.items()}
        return [[_to_plain_value(key), _to_plain_value(item)] for key, item in value.items()]
    if isinstance(value, bytes):
        return value.hex()
    return value


_ANY_MAPPING, _ANY_TUPLE = dict[str, Any], tuple[Any, ...]


class _Reader:
    """Collects the faults of one document while it is converted."""

    def __init__(self, source: str, finite: bool, names: Mapping[str, Any], *, partial: bool = False) -> None:
        self.source, self.finite, self.names, self.partial = source, finite, dict(names), partial
        self.faults: list[Fault] = []

    def fault(self, code: FaultCode, path: str, rule: str, found: str = "") -> None:
        self.faults.append(Fault(code, path, rule, found))
        if len(self.faults) == MAX_FAULTS:
            raise RecordError(self.source, self.faults)

    def read_dataclass(self, cls: Any, value: object, path: str, depth: int) -> Any:
        if not isinstance(value, Mapping):
            return self.fault(FaultCode.TYPE, path, "must be an object", describe(value))
        hints = read_type_hints(cls, tuple(self.names.items()))
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        before = len(self.faults)
        for key in value:
            if key not in fields and not self.partial:
                known = ", ".join(fields) or "none"
                self.fault(FaultCode.UNKNOWN, path, f"has the unknown key {describe(key)}; known keys are {known}")
        found = {}
        for name, field in fields.items():
            where = f"{path}.{name}" if path else name
            if name in value:
                found[name] = self.read_value(hints[name], value[name], where, depth + 1)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.fault(FaultCode.MISSING, where, "is missing")
        if len(self.faults) > before:
            return None
        try:
            return cls(**found)
        except GlasuError as error:  # a rule of the dataclass itself
            return self.fault(FaultCode.VALUE, path, str(error).rstrip("."))

    def read_value(self, annotation: Any, value: object, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            return self.fault(FaultCode.SIZE, path, f"is nested more than {MAX_DEPTH} levels deep")
        if annotation is Any or annotation is object:
            return self.read_any(value, path, depth)
        origin = typing.get_origin(annotation)
        if origin is Annotated:
            return self.read_annotated(annotation, value, path, depth)
        if origin in (typing.Union, types.UnionType):
            return self.read_union(annotation, value, path, depth)
        if dataclasses.is_dataclass(annotation):
            return self.read_dataclass(annotation, value, path, depth)
        if origin is tuple:
            return self.read_tuple(annotation, value, path, depth)
        if origin in (dict, collections.abc.Mapping):
            return self.read_mapping(annotation, value, path, depth)
        return self.read_scalar(annotation, value, path)

    def read_annotated(self, annotation: Any, value: object, path: str, depth: int) -> Any:
        inner, rule = typing.get_args(annotation)
        length = len(value) if isinstance(rule, Length) and isinstance(value, (str, list, Mapping)) else None
        if length is not None and not rule.least <= length <= rule.most:
            return self.fault(FaultCode.SIZE, path, f"has length {length} and must have {rule.least} to {rule.most}")
        if isinstance(rule, Choice):
            if isinstance(value, str) and registry.is_choice(rule.seam, value):
                return value
            rule = f"must be {describe_expected(annotation)}{_suggest_choice(value, annotation)}"
            return self.fault(FaultCode.VALUE, path, rule, describe(value))
        before = len(self.faults)
        result = self.read_value(inner, value, path, depth)
        if isinstance(rule, Bounds) and len(self.faults) == before and not rule.contains(result):
            return self.fault(FaultCode.VALUE, path, str(rule), describe(result))
        return result

    def read_union(self, annotation: Any, value: object, path: str, depth: int) -> Any:
        options = typing.get_args(annotation)
        rest = [option for option in options if option is not type(None)]
        if value is None and len(rest) < len(options):
            return None
        if len(rest) == 1:
            return self.read_value(rest[0], value, path, depth)
        rule, code = f"must be {' or '.join(map(describe_expected, rest))}", FaultCode.TYPE
        rule += next(filter(None, (_suggest_choice(value, option) for option in rest)), "")
        for option in rest:
            attempt = _Reader(self.source, self.finite, self.names, partial=self.partial)
            with contextlib.suppress(RecordError):  # too many faults
                result = attempt.read_value(option, value, path, depth)
                if not attempt.faults:
                    return result
            fault = attempt.faults[0]
            if fault.code is FaultCode.VALUE and isinstance((None, *typing.get_args(option))[-1], Bounds):
                rule, code = fault.rule, fault.code  # the type is correct: report the rule of this alternative
        return self.fault(code, path, rule, describe(value))

    def read_tuple(self, annotation: Any, value: object, path: str, depth: int) -> Any:
        inner = typing.get_args(annotation)
        if not isinstance(value, (list, tuple)):
            return self.fault(FaultCode.TYPE, path, f"must be {describe_expected(annotation)}", describe(value))
        if len(inner) == 2 and inner[1] is Ellipsis:
            inner = (inner[0],) * len(value)
        if len(inner) != len(value):
            return self.fault(FaultCode.TYPE, path, f"must be {describe_expected(annotation)}", describe(value))
        if len(value) > MAX_ITEMS:
            return self.fault(FaultCode.SIZE, path, f"has {len(value)} items, and at most {MAX_ITEMS} are allowed")
        pairs = enumerate(zip(inner, value, strict=True))
        return tuple(self.read_value(kind, item, f"{path}[{index}]", depth + 1) for index, (kind, item) in pairs)

    def read_mapping(self, annotation: Any, value: object, path: str, depth: int) -> Any:
        key_type, value_type = typing.get_args(annotation)
        choices = typing.get_args(key_type) if typing.get_origin(key_type) is Literal else None
        if key_type is not str and choices is None:
            if value == {}:  # `to_plain` does not know the type of the keys of an empty mapping
                return {}
            pair = types.GenericAlias(tuple, (key_type, value_type))
            before = len(self.faults)
            pairs = self.read_tuple(types.GenericAlias(tuple, (pair, Ellipsis)), value, path, depth)
            return None if len(self.faults) > before else dict(pairs)
        if not isinstance(value, Mapping):
            return self.fault(FaultCode.TYPE, path, "must be an object", describe(value))
        if len(value) > MAX_ITEMS:
            return self.fault(FaultCode.SIZE, path, f"has {len(value)} keys, and at most {MAX_ITEMS} are allowed")
        for key in value:
            if choices is not None and key not in choices:
                known = ", ".join(choices)
                self.fault(FaultCode.UNKNOWN, path, f"has the unknown key {describe(key)}; known keys are {known}")
        return {
            key: self.read_value(value_type, item, f"{path}.{_make_printable(str(key)[:80])}", depth + 1)
            for key, item in value.items()
        }

    def read_any(self, value: object, path: str, depth: int) -> Any:
        if isinstance(value, Mapping):
            return self.read_mapping(_ANY_MAPPING, value, path, depth)
        if isinstance(value, (list, tuple)):
            return list(self.read_tuple(_ANY_TUPLE, value, path, depth) or ())
        if value is None or isinstance(value, bool):
            return value
        for kind in (str, int, float):
            if isinstance(value, kind):
                return self.read_scalar(kind, value, path)
        return self.fault(FaultCode.TYPE, path, "must be a plain value", describe(value))

    def read_scalar(self, annotation: Any, value: Any, path: str) -> Any:
        if type(value) not in SCALARS and isinstance(value, numbers.Number) and hasattr(value, "item"):
            # a numpy number, as from a grid search
            value = value.item()
        if typing.get_origin(annotation) is Literal:
            if any(value == choice and type(value) is type(choice) for choice in typing.get_args(annotation)):
                return value
            rule = f"must be {describe_expected(annotation)}{_suggest_choice(value, annotation)}"
            return self.fault(FaultCode.VALUE, path, rule, describe(value))
        if annotation is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            too_large = isinstance(value, int) and abs(value) > sys.float_info.max
            if too_large or (self.finite and not math.isfinite(value)):
                return self.fault(FaultCode.VALUE, path, "must be a finite number", describe(value))
            return float(value)
        if annotation is bytes and isinstance(value, str):
            return self.read_bytes(value, path)
        if isinstance(value, datetime) and value.tzinfo is None:
            return self.fault(FaultCode.TYPE, path, f"must be {describe_expected(annotation)}", describe(value))
        if not isinstance(value, PLAIN) and isinstance(value, typing.get_origin(annotation) or annotation):
            return value
        if annotation not in (str, bool, int) or type(value) is not annotation:
            return self.fault(FaultCode.TYPE, path, f"must be {describe_expected(annotation)}", describe(value))
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return self.fault(FaultCode.VALUE, path, "must fit into 64 bits", describe(value))
        if isinstance(value, str) and len(value) > MAX_TEXT:
            rule = f"has {len(value)} characters, and at most {MAX_TEXT} are allowed"
            return self.fault(FaultCode.SIZE, path, rule)
        return value

    def read_bytes(self, value: str, path: str) -> Any:
        try:
            return bytes.fromhex(value)
        except ValueError:
            return self.fault(FaultCode.VALUE, path, "must consist of hexadecimal digits")


@functools.lru_cache(maxsize=256)
def read_type_hints(cls: Any, names: tuple[tuple[str, Any], ...] = ()) -> dict[str, Any]:
    """Return the annotations of a dataclass. `names`: types that its module imports for type checking only."""
    return typing.get_type_hints(cls, localns=dict(names), include_extras=True)


def list_fields(cls: Any, names: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the names and types of the fields of a dataclass and of the dataclasses in its fields.

    Args:
        cls: the dataclass.
        names: types that its module imports for type checking only.
    """
    found: dict[Any, list[tuple[str, str]]] = {}
    waiting = [cls]
    while waiting:
        current = waiting.pop()
        inner = typing.get_args(current)
        if inner:
            waiting += inner
        elif dataclasses.is_dataclass(current) and current not in found:
            found[current] = [(item.name, str(item.type)) for item in dataclasses.fields(current)]
            waiting += read_type_hints(typing.cast(Any, current), tuple(names.items())).values()
    return [(record.__name__, fields) for record, fields in found.items()]


def describe_expected(annotation: Any) -> str:
    """Describe the plain value that an annotation requires."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        choice = inner[1]
        return (
            _list_choices(registry.choices(choice.seam)) if isinstance(choice, Choice) else describe_expected(inner[0])
        )
    if origin is Literal:
        return _list_choices(inner)
    if origin is tuple and inner[-1] is Ellipsis:
        return f"a list of {_name_plural(inner[0])}"
    if origin is tuple:
        kinds = set(map(_name_plural, inner))
        return f"a list of {len(inner)} {kinds.pop() if len(kinds) == 1 else 'values'}"
    if origin in (dict, collections.abc.Mapping) or dataclasses.is_dataclass(annotation):
        return "an object"
    return TYPE_NAMES.get(annotation, ("a plain value", ""))[0]


def _suggest_choice(value: object, annotation: Any) -> str:
    """Return the end of a rule that says how to correct a wrong choice: the most similar choice, and --extension."""
    if not isinstance(value, str):
        return ""
    inner, hint = typing.get_args(annotation), ""
    choices: Sequence[object] = ()
    if typing.get_origin(annotation) is Literal:
        choices = inner
    elif typing.get_origin(annotation) is Annotated and isinstance(inner[1], Choice):
        choices = registry.choices(inner[1].seam)
        hint = f"; {registry.EXTENSION_HINT}" if inner[1].seam in registry.EXTENSIBLE else ""
    names = [choice for choice in choices if isinstance(choice, str)]
    match = difflib.get_close_matches(value, names, n=1)
    return (f" (did you mean {json.dumps(match[0])}?)" if match else "") + hint


def _name_plural(annotation: Any) -> str:
    return TYPE_NAMES.get(annotation, ("", "values"))[1]


def _list_choices(choices: Sequence[object]) -> str:
    return " or ".join(json.dumps(choice) for choice in choices)


def _format_bound(bound: float) -> str:
    return next((f"2^{bits}-1" for bits in (31, 32, 63) if bound == 2**bits - 1), f"{bound:g}")


def describe(value: object) -> str:
    """Return a value as one short line for an error."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # an integer with thousands of digits
        return "a number with thousands of digits"
    return _make_printable(text)


def _make_printable(text: str) -> str:
    return text if text.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in text)
