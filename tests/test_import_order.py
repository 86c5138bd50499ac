"""Imports follow the order of LEVELS: a module imports only from lower levels, or from its own folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import glasu

ROOT = Path(glasu.__file__).parent
LEVELS = {
    "cli": 16,
    "experiments": 15,
    "integrations": 15,  # neither experiments nor integrations imports the other
    "network": 14,
    "pki": 13,
    "runtime": 13,  # neither pki nor runtime imports the other
    "html_report": 12,
    "report": 11,
    "protocol": 10,
    "privacy": 9,
    "model": 9,  # neither privacy nor model imports the other
    "wire": 8,
    "data": 7,
    "config": 6,
    "config_checks": 5,
    "config_sections": 4,
    "profiles": 3,
    "records": 2,
    "compiling": 1,
    "files": 1,
    "randomness": 1,
    "registry": 1,
    "ckks_parameters": 0,  # a leaf
    "errors": 0,
    "extension_checks": 0,  # a leaf
    "html_table": 0,  # a leaf
    "secret": 0,  # a leaf
    "timing": 0,  # a leaf
}
PUBLIC = {  # public name -> the module that defines it
    name: module
    for module, name in re.findall(
        r"^from (\S+) import (\w+)", (ROOT / "__init__.pyi").read_text(encoding="utf-8"), re.MULTILINE
    )
}
NO_WORLD = {"asyncio", "grpc", "io", "multiprocessing", "os", "pathlib", "socket", "subprocess", "threading", "time"}


def list_imports(source: str, module: str) -> Iterator[str]:
    """List every module that the source imports anywhere, also inside functions and for type checking."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            if base == "glasu":
                yield from (PUBLIC.get(alias.name, f"glasu.{alias.name}") for alias in node.names)
            else:
                yield base


def violations(source: str, module: str) -> list[str]:
    """List the imports of a module that go against the order; within one folder everything is allowed."""
    own = module.split(".")[1]
    found = []
    for name in list_imports(source, module):
        package, _, rest = name.partition(".")
        layer = rest.split(".")[0]
        if package != "glasu" or layer in (own, "__version__"):
            continue
        if layer not in LEVELS or LEVELS[layer] >= LEVELS[own]:
            found.append(f"{module} imports {name}")
    return found


def modules() -> dict[str, str]:
    """Return the source of every module but glasu/__init__.py, which names things without loading them."""
    result = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts != ("__init__",):
            result[".".join(["glasu", *parts])] = path.read_text(encoding="utf-8")
    return result


def test_every_module_has_a_place_in_the_order():
    names = modules()
    assert len(names) > 30
    assert {name.split(".")[1] for name in names} <= set(LEVELS)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """List the groups of modules that import each other, directly or not (strongly connected components)."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, stack = set(), [start]
        while stack:
            for name in graph[stack.pop()] - seen:
                seen.add(name)
                stack.append(name)
        reached[start] = seen
    groups = {frozenset(other for other in seen if name in reached[other]) for name, seen in reached.items()}
    return sorted(sorted(group) for group in groups if group)


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports; `from package import module` counts as the module."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        found = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                if node.module == "glasu":
                    found |= {PUBLIC[alias.name] for alias in node.names if alias.name in PUBLIC}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[module] = (found & set(sources)) - {module}
    return graph


def test_no_modules_import_each_other_not_even_for_type_checking():
    assert cycles(import_graph(modules())) == []


def test_a_cycle_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_experiments_train_through_public_names_only():
    inner = tuple(f"glasu.{folder}." for folder in ("network", "pki", "runtime", "protocol", "privacy", "wire"))
    for name, source in modules().items():
        if name.startswith("glasu.experiments."):
            found = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
            assert not [module for module in found if module and module.startswith(inner)], name


def test_no_import_goes_against_the_order():
    assert [found for name, source in modules().items() for found in violations(source, name)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("glasu.model.layers", "from glasu.protocol.messages import Partial"),
        ("glasu.model.layers", "from glasu.privacy import release"),
        ("glasu.privacy.release", "import glasu.model.blocks"),
        ("glasu.data.party", "def f():\n    from glasu.model.blocks import Block"),
        ("glasu.errors", "from glasu import config"),
        ("glasu.records", "from glasu.config import RunConfig"),
        ("glasu.errors", "from glasu.records import Checked"),
        ("glasu.config", "if TYPE_CHECKING:\n    from glasu.data.party import Graph"),
        ("glasu.report", "from .runtime import meter"),
        ("glasu.protocol.server", "from ..runtime.telemetry import Telemetry"),
        ("glasu.timing", "from glasu.randomness import Stream"),
        ("glasu.protocol.rounds", "from glasu import train"),
        ("glasu.runtime.simulation", "from glasu.experiments.search import search"),
        ("glasu.protocol.server", "import glasu"),
    ],
)
def test_an_import_against_the_order_is_found(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("glasu.cli.main", "from glasu import __version__"),
        ("glasu.cli.train", "from glasu.errors import GlasuError"),
        ("glasu.protocol.server", "from glasu.model.aggregation import Mean\nfrom .messages import Partial"),
        ("glasu.data.party", "import numpy as np\nfrom glasu.errors import DataError"),
    ],
)
def test_an_import_along_the_order_is_allowed(module, source):
    assert violations(source, module) == []


def test_the_protocol_and_the_model_know_no_socket_thread_clock_or_file():
    found = {
        name: outside
        for name, source in modules().items()
        if name.split(".")[1] in ("protocol", "model", "privacy")
        and (outside := NO_WORLD & {item.split(".")[0] for item in list_imports(source, name)})
    }
    assert found == {}
