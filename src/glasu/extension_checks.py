"""List the faults of a class or an object that an extension registers, before a run uses it."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from functools import cached_property
from inspect import Parameter, Signature
from types import FunctionType
from typing import Any

_METHODS = (FunctionType, classmethod, staticmethod)
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def list_class_faults(found: type) -> list[str]:
    """List what a class lacks, and its members that do not fit the members of GLASU's classes that they override."""
    parents = [parent for parent in found.__mro__ if _is_of_glasu(parent)]
    if found in parents:
        return []
    names = {name for parent in parents for name in vars(parent)} - {*getattr(found, "__dataclass_fields__", {})}
    nearest = {name: next(parent for parent in parents if name in vars(parent)) for name in sorted(names)}
    faults = (_find_member_fault(found, parent, name) for name, parent in nearest.items())
    return [f"{name} is missing" for name in _list_missing(found, parents)] + [*filter(None, faults)]


def list_constructor_faults(found: type, base: type) -> list[str]:
    """List the fault of a class that GLASU cannot create with the arguments of the base class."""
    fault = _find_call_fault("__init__", found, base)
    return [fault] if fault else []


def list_object_faults(found: Any) -> list[str]:
    """List the fields of a dataclass object that are annotated as functions and do not accept the arguments of a call.

    The fields are those of a class of GLASU, so their annotations are strings: "Callable[[Graph, int], Draw]".
    """
    faults = list_class_faults(type(found))
    for field in fields(found):
        value, count = getattr(found, field.name), _count_arguments(str(field.type))
        if count is None or value is None:
            continue
        if not callable(value):
            faults.append(f"{field.name} is not a function")
        elif (given := _read_signature(value)) is not None and not _accepts(given, [None] * count):
            faults.append(f"{field.name}{_format(given)} must accept {count} argument{'' if count == 1 else 's'}")
    return faults


def _is_of_glasu(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def _list_missing(found: type, parents: list[type]) -> list[str]:
    """List abstract methods that are not defined, and annotated class variables without a value."""
    values = (
        name
        for parent in parents
        for name, kind in inspect.get_annotations(parent).items()
        if str(kind).startswith("ClassVar") and not hasattr(found, name)
    )
    return sorted({*getattr(found, "__abstractmethods__", ()), *values})


def _find_member_fault(found: type, parent: type, name: str) -> str:
    """Return why a member does not fit the member of `parent` that it overrides, or ""."""
    required, member = vars(parent)[name], inspect.getattr_static(found, name)
    is_internal = name.startswith("_") and not getattr(required, "__isabstractmethod__", False)
    if member is required or is_internal:
        return ""
    if not isinstance(required, _METHODS):
        kind = "a property or a value" if isinstance(required, (property, cached_property)) else "a value"
        return f"{name} must be {kind}, not a method" if isinstance(member, _METHODS) else ""
    if not callable(getattr(found, name)):
        return f"{name} is not a method"
    if isinstance(required, classmethod) and isinstance(member, FunctionType):
        return f"{name} must be a class method"
    # The parameters of other callable objects are unknown.
    return _find_call_fault(name, _bind(found, name), _bind(parent, name)) if isinstance(member, _METHODS) else ""


def _bind(cls: type, name: str) -> Any:
    """Return the method as an instance has it, without `self`."""
    method = getattr(cls, name)
    return method.__get__(object()) if isinstance(inspect.getattr_static(cls, name), FunctionType) else method


def _find_call_fault(name: str, found: Any, required: Any) -> str:
    """Return why a callable cannot be called like the required one, or "".

    Required arguments are passed by position. Arguments that have a default are passed by position or by name.
    """
    given, expected = _read_signature(found), _read_signature(required)
    if given is None or expected is None:
        return ""
    parameters = expected.parameters.values()
    needed = [each.name for each in parameters if each.kind in _POSITIONAL and each.default is Parameter.empty]
    optional = [each.name for each in parameters if each.kind in _POSITIONAL and each.default is not Parameter.empty]
    named = [each.name for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
    calls = ((needed, named), ([*needed, *optional], named), (needed, [*optional, *named]))
    if all(_accepts(given, positional, names) for positional, names in calls):
        return ""
    return f"{name}{_format(given)} must accept the parameters {_format(expected)}"


def _accepts(signature: Signature, positional: list[Any], names: list[str] | None = None) -> bool:
    try:
        signature.bind(*positional, **dict.fromkeys(names or []))
    except TypeError:
        return False
    return True


def _read_signature(function: Any) -> Signature | None:
    """Return the parameters of a callable; None for functions in C, which do not state them, such as `list`."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _format(signature: Signature) -> str:
    """Return the parameters as in Python, without annotations."""
    plain = [each.replace(annotation=Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=Signature.empty))


def _count_arguments(annotation: str) -> int | None:
    """Return the number of arguments in Callable[[...], result]; None if an annotation contains no such type."""
    for node in ast.walk(ast.parse(annotation, mode="eval")):
        match node:
            case ast.Subscript(ast.Name("Callable"), ast.Tuple([ast.List(arguments), _])):
                return len(arguments)
    return None
