"""The registry of choices: map a seam and a name to an implementation, and load the implementation on first use.

A seam is a place where one implementation can replace another, for example the sampler. Every seam has one table next
to its implementations. This module knows where the tables are and adds the choices of extensions. An extension is a
Python module of the user. It calls `register` when it is imported:

    from glasu import registry

    registry.register("sampler", "hubs", "my_module:HubSampler")

The user of a machine decides which extensions are loaded there: with `load_extension`, or by installing a package with
an entry point of the group "glasu.extensions". No message can cause an extension to be loaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from glasu.errors import ConfigError, GlasuError
from glasu.extension_checks import list_class_faults, list_constructor_faults, list_object_faults


class Seam(NamedTuple):
    """Where the choices of a seam are."""

    table: str  # module:attribute
    # The base class of the choices, in the module of the table. If the class is abstract, a choice is a subclass that
    # defines all abstract methods. Otherwise, a choice is an instance. None: no extension can add a choice.
    base: str | None = None


SEAMS = {
    "aggregation": Seam("glasu.model.aggregation:AGGREGATIONS", "Aggregation"),
    "backbone": Seam("glasu.model.backbones:BACKBONES", "Backbone"),
    "data": Seam("glasu.data.sources:SOURCES", "DataSource"),
    "encoding": Seam("glasu.wire.encodings:ENCODINGS", "Precision"),
    "method": Seam("glasu.data.methods:METHODS", "Method"),
    "optimizer": Seam("glasu.model.optimizer:OPTIMIZERS", "Optimizer"),
    "partition": Seam("glasu.data.partition:PARTITIONS", "Partition"),
    "preset": Seam("glasu.data.presets:PRESETS", "Preset"),
    "profile": Seam("glasu.profiles:PROFILES"),
    "sampler": Seam("glasu.model.sampler:SAMPLERS", "Sampler"),
    "schedule": Seam("glasu.model.optimizer:SCHEDULES", "Schedule"),
    "secure aggregation": Seam("glasu.privacy.secure_aggregation:SECURE_AGGREGATIONS"),
    "task": Seam("glasu.model.task:TASKS", "Task"),
}
# Seams to which an extension may add a choice. The other seams are privacy rules, which the threat model describes.
EXTENSIBLE = tuple(name for name, seam in SEAMS.items() if seam.base is not None)
EXTENSION_HINT = (
    "if an extension registers this name, load that extension with --extension, or in Python with "
    "registry.load_extension"
)
ENTRY_POINTS = "glasu.extensions"
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_MODULE = re.compile(r"[^./\\]+(\.[^./\\]+)*")
_registered: dict[str, dict[str, Any]] = {seam: {} for seam in SEAMS}  # choices that extensions added
_sources: dict[tuple[str, str], str] = {}  # seam and name of a registered choice -> start of errors about it
_checked: dict[tuple[str, str], Any] = {}  # seam and name of a registered choice -> the choice that `load` accepted
_extensions: dict[str, Extension] = {}
_loading: list[str] = []  # names of the extensions that are being imported, innermost last


@dataclass(frozen=True)
class Extension:
    """A loaded extension. Parties that train together must have the same extensions."""

    name: str  # name of the module
    version: str  # empty if the module has none
    digest: str  # SHA-256 of the source files, in hexadecimal

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.version, f"({self.digest[:16]}..)")))


def choices(seam: str) -> tuple[str, ...]:
    """Return the names of all choices of a seam: first the choices of GLASU, then the choices of extensions."""
    load_entry_points()
    return (*_load_table(seam), *_registered[seam])


def is_choice(seam: str, name: str) -> bool:
    """Return whether a seam has a choice of this name."""
    # Entry points are read only for names that are not known yet. So a run without extensions imports no extension.
    return name in _load_table(seam) or name in _registered[seam] or name in choices(seam)


def select(seam: str, **properties: object) -> Iterator[str]:
    """Yield the names of the choices whose attributes have these values: `select("sampler", reads_whole_graph=True)`.

    The choices of GLASU come first. A caller that stops at one of these choices imports no installed extension.
    """
    seen = [*_load_table(seam)]
    yield from (name for name in seen if _has_properties(load(seam, name), properties))
    yield from (name for name in choices(seam) if name not in seen and _has_properties(load(seam, name), properties))


def load(seam: str, name: str) -> Any:
    """Return the implementation of a choice; import it if necessary."""
    if not is_choice(seam, name):
        listed = ", ".join(choices(seam))
        raise ConfigError(f"{seam} {name!r} is not known; known are {listed}. Correct the name; {EXTENSION_HINT}.")
    table, what = _load_table(seam), f"{seam} {name!r}"
    if name in table:
        target = table[name]
        return import_attribute(target, what) if isinstance(target, str) else target
    target, what = _registered[seam][name], f"{_sources[seam, name]}{what}"
    choice = import_attribute(target, what) if isinstance(target, str) else target
    if _checked.get((seam, name)) is not choice:
        _check_base(seam, choice, what)
        _checked[seam, name] = choice
    return choice


def register(seam: str, name: str, target: object) -> None:
    """Add a choice to a seam.

    Args:
        seam: one of `EXTENSIBLE`.
        name: the value in the config; lower-case letters, digits, "_" and "-".
        target: the implementation, or "module:attribute" to import it on first use. It must be a subclass or an
            instance of the base class in `SEAMS`; `load` checks this.
    """
    source = f"extension {_loading[-1]!r}: " if _loading else ""
    if seam not in SEAMS:
        raise ConfigError(f"{source}there is no seam {seam!r}; the seams are {', '.join(EXTENSIBLE)}.")
    what = f"{source}{seam} {name!r}"
    if seam not in EXTENSIBLE:
        raise ConfigError(f"{what}: extensions cannot add a {seam}; they can add to {', '.join(EXTENSIBLE)}.")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what}: a name has 1 to 40 lower-case letters, digits, '_' and '-', and starts with a letter."
        )
    # Two implementations under one name would let parties compute different things with equal settings.
    if name in _load_table(seam) or not _is_same(_registered[seam].get(name, target), target):
        raise ConfigError(f"{what} is registered already; choose another name.")
    _registered[seam][name], _sources[seam, name] = target, source


def load_extension(name: str) -> Extension:
    """Import an extension by the name of its module; record its version and the digest of its source."""
    if name.endswith(".py") or not _MODULE.fullmatch(name):
        module = Path(name).stem.strip(".") or "mine"
        raise ConfigError(
            f"extension {name!r}: is not the name of a module; for the file {module}.py, put its folder on PYTHONPATH "
            f"and give --extension {module}."
        )
    return _load_extension(name, "")


@functools.cache  # slow: it reads the entry points of every installed package
def load_entry_points() -> None:
    """Load the extensions that installed packages offer in the entry-point group "glasu.extensions"."""
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        _load_extension(entry.module, "" if entry.dist is None else entry.dist.version)


def extensions() -> tuple[Extension, ...]:
    """Return the loaded extensions, sorted by name. The handshake compares them."""
    return tuple(_extensions[name] for name in sorted(_extensions))


def find_extension(seam: str, name: str) -> Extension | None:
    """Return the loaded extension whose module or package implements a choice; None for the choices of GLASU."""
    target = _registered[seam].get(name, "")
    return _find_by_module(target.partition(":")[0] if isinstance(target, str) else getattr(target, "__module__", ""))


def find_failed_extension(error: BaseException) -> Extension | None:
    """Return the loaded extension whose code raised an error or called the code that did; None if there is none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = (_find_by_module(frame.f_globals.get("__name__", "")) for frame in reversed(frames))
    return next(filter(None, found), None)


def _find_by_module(name: object) -> Extension | None:
    """Return the loaded extension that is this module or a package that contains it."""
    module = str(name)
    packages = [module, *(module.rsplit(".", parts)[0] for parts in range(1, module.count(".") + 1))]
    return next((_extensions[package] for package in packages if package in _extensions), None)


def require_extensions(needed: Iterable[Extension], source: str) -> None:
    """Refuse a file that was written with an extension, unless the same version and source of it are loaded now.

    Args:
        needed: the extensions that wrote the file.
        source: the path of the file; the error names it.
    """
    for extension in needed:
        if extension.name not in _extensions:
            load_entry_points()
        loaded = _extensions.get(extension.name)
        if loaded is None:
            raise ConfigError(
                f"{source}: was written with the extension {extension}, which is not loaded; load it with "
                f"--extension {extension.name}, or in Python with registry.load_extension."
            )
        if loaded != extension:
            raise ConfigError(
                f"{source}: was written with the extension {extension}, but {loaded} is loaded; restore the "
                "earlier source, or train again with --fresh."
            )


def import_attribute(target: str, what: str) -> Any:
    """Return the attribute that "module:attribute" names. An error starts with `what`."""
    name, colon, attribute = target.partition(":")
    module = _import(name, what)
    if not colon or not hasattr(module, attribute):
        raise ConfigError(f"{what}: {target!r} names no attribute of a module; write 'module:attribute'.")
    return getattr(module, attribute)


def _load_extension(name: str, version: str) -> Extension:
    if name not in _extensions:
        _loading.append(name)
        try:
            module = _import(name, f"extension {name!r}")
        finally:
            _loading.pop()
        stated = version or str(getattr(module, "__version__", ""))
        _extensions[name] = Extension(name, stated, _digest_source(module))
    return _extensions[name]


def _digest_source(module: ModuleType) -> str:
    """Return the SHA-256 of a module's source file, or of all Python files of a package.

    The digest does not cover other modules that the extension imports: keep an extension in one module or package.
    """
    file = Path(module.__file__ or "")
    root = file.parent
    files = sorted(root.rglob("*.py")) if file.name == "__init__.py" else [file]
    if file.suffix != ".py":
        raise ConfigError(f"extension {module.__name__!r} has no Python source file, so its digest cannot be compared.")
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _check_base(seam: str, choice: object, what: str) -> None:
    """Refuse a choice that does not fit the base class of its seam, or does not define all abstract methods."""
    base = import_attribute(f"{SEAMS[seam].table.partition(':')[0]}:{SEAMS[seam].base}", what)
    required = f"{base.__module__}.{base.__name__}"
    if not inspect.isabstract(base):
        if not isinstance(choice, base):
            raise ConfigError(
                f"{what}: must be an instance of {required}, got {_describe(choice)}; register an instance."
            )
        _refuse(what, type(choice), base, list_object_faults(choice))
    elif not (isinstance(choice, type) and issubclass(choice, base)):
        raise ConfigError(f"{what}: must be a subclass of {required}, got {_describe(choice)}; register a subclass.")
    else:
        _refuse(what, choice, base, list_class_faults(choice) + list_constructor_faults(choice, base))


def check_instance(found: object, base: type, what: str) -> None:
    """Refuse an object from an extension whose class does not fit the base class. An error starts with `what`."""
    if not isinstance(found, base):
        required = f"{base.__module__}.{base.__name__}"
        raise ConfigError(f"{what} must be a {required}, got {_describe(found)}. Correct the extension.")
    _refuse(what, type(found), base, list_class_faults(type(found)))


def _refuse(what: str, found: type, base: type, faults: list[str]) -> None:
    if faults:
        raise ConfigError(
            f"{what}: {found.__qualname__} does not fit {base.__module__}.{base.__name__}: {'; '.join(faults)}. "
            "Correct the extension."
        )


def _describe(choice: object) -> str:
    """Return the kind of a registered object for an error."""
    if isinstance(choice, type):
        return f"the class {choice.__module__}.{choice.__qualname__}"
    return f"an object of the type {type(choice).__name__}"


def _is_same(target: object, other: object) -> bool:
    """Return whether two targets are equal, or are one definition in a notebook cell that was run again."""
    names = [(getattr(each, "__module__", ""), getattr(each, "__qualname__", "")) for each in (target, other)]
    return target == other or (names[0] == names[1] and names[0][0] == "__main__")


def _has_properties(choice: object, properties: dict[str, object]) -> bool:
    return all(getattr(choice, name) == value for name, value in properties.items())


@functools.cache
def _load_table(seam: str) -> dict[str, Any]:
    table: dict[str, Any] = import_attribute(SEAMS[seam].table, f"seam {seam!r}")
    return table


def _import(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except GlasuError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        remedy = f"install {missing!r}, or put its folder on PYTHONPATH" if missing else "correct the module"
        if missing and f"{name}.".startswith(f"{missing}."):
            raise ConfigError(f"{what}: cannot import {name!r} ({error}); {remedy}.") from error
        cause = f"{type(error).__name__}: {error}{_find_line(error)}"
        raise ConfigError(f"{what}: importing {name!r} failed ({cause}); {remedy}.") from error


def _find_line(error: BaseException) -> str:
    """Return the last line that the imported module, or a module in the same folder, executed before the error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    frames = frames[2:]  # the first two are in this module and in importlib
    own = [frame for frame in frames if Path(frame.filename).parent == Path(frames[0].filename).parent]
    return f" in {own[-1].filename}, line {own[-1].lineno}" if own else ""
