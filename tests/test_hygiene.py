"""Tests change nothing inside glasu and import no other test: what a test varies is an argument."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SETTERS = {"setattr", "delattr", "setitem", "delitem", "patch", "object", "dict", "multiple"}


def find_imports(tree: ast.AST) -> dict[str, str]:
    """Return the module of every imported name: {"sessions": "glasu.network.client_session"}."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {item.asname or item.name.partition(".")[0]: item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {item.asname or item.name: f"{node.module}.{item.name}" for item in node.names}
    return found


def find_test_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every test module that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{item.name}" for item in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            files = [TESTS.joinpath(*parts[:end]).with_suffix(".py") for end in range(1, len(parts) + 1)]
            if any(file.name.startswith("test_") and file.is_file() for file in files):
                yield node.lineno, name


def is_of_glasu(target: ast.expr, imports: dict[str, str]) -> bool:
    """Return whether an expression is a part of glasu: a dotted path, or reached through an import of glasu."""
    if isinstance(target, ast.JoinedStr):
        target = target.values[0] if target.values else target
    if isinstance(target, ast.Constant):
        return isinstance(target.value, str) and target.value.partition(".")[0] == "glasu"
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    return isinstance(target, ast.Name) and imports.get(target.id, "").partition(".")[0] == "glasu"


def find_changes(tree: ast.AST) -> Iterator[int]:
    """Yield the line of every statement that changes a part of glasu.

    A path that is computed (`patch.setattr(name, ...)`) counts if its function has a string that begins with "glasu.".
    """
    imports = find_imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            parts = [target for target in targets if isinstance(target, (ast.Attribute, ast.Subscript))]
            if any(is_of_glasu(part, imports) for part in parts):
                yield node.lineno
        elif isinstance(node, ast.Call) and node.args and _is_setter(node.func) and is_of_glasu(node.args[0], imports):
            yield node.lineno
        elif isinstance(node, ast.FunctionDef):
            paths = any(isinstance(part, ast.Constant) and is_of_glasu(part, imports) for part in ast.walk(node))
            calls = [part for part in ast.walk(node) if isinstance(part, ast.Call) and _is_setter(part.func)]
            yield from (call.lineno for call in calls if paths and call.args and isinstance(call.args[0], ast.Name))


def _is_setter(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in SETTERS


def list_sources() -> list[str]:
    return sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py"))


@pytest.mark.parametrize("file", list_sources())
def test_no_test_changes_a_part_of_glasu_or_imports_another_test(file):
    tree = ast.parse((TESTS / file).read_text())
    found = [f"line {line}: imports {name}" for line, name in find_test_imports(tree)]
    found += [f"line {line}: changes glasu" for line in find_changes(tree)]
    assert not found, "; ".join(found)


@pytest.mark.parametrize(
    "source",
    [
        'monkeypatch.setattr("glasu.cli.serve.run", stop)',
        'monkeypatch.setattr(f"glasu.cli.main.{place}", stop)',
        "from glasu.cli import progress\nmonkeypatch.setattr(progress, 'SILENCE', 1)",
        "from glasu.network import client_session as sessions\npatch.setattr(sessions.time, 'sleep', stop)",
        "from glasu.model.sampler import Sampler\nSampler.chunk_rows = 2",
        "import glasu.registry\nglasu.registry.SEAMS['sampler'] = other",
        "import glasu.registry as table\ndel table.SEAMS",
        "from unittest import mock\nmock.patch('glasu.files.write', stop)",
        "from glasu import files\nmock.patch.object(files, 'write', stop)",
        "from glasu import files\nsetattr(files, name, stop)",
        "def test_x(monkeypatch):\n    for name in ('glasu.a', 'glasu.b'):\n        monkeypatch.setattr(name, stop)",
    ],
)
def test_a_change_of_glasu_is_found(source):
    assert list(find_changes(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "monkeypatch.setattr('os.fsync', stop)",
        "import shutil\nmonkeypatch.setattr(shutil, 'disk_usage', stop)",
        "from glasu.model.sampler import Sampler\nsampler = Sampler()\nsampler.chunk_rows = 2",
        "monkeypatch.setenv('GLASU_CACHE', 'x')",
    ],
)
def test_a_change_of_anything_else_is_allowed(source):
    assert not list(find_changes(ast.parse(source)))


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("from test_config import settings", 1),
        ("import test_config", 1),
        ("from cli.test_commands import run_file", 1),
        ("from cli import test_commands", 1),
        ("from support.tiny import tiny", 0),
        ("from sklearn.model_selection import train_test_split", 0),
    ],
)
def test_an_import_of_another_test_is_found(source, number):
    assert len(list(find_test_imports(ast.parse(source)))) == number
