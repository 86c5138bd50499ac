"""One word, one meaning: a class, a constant or a public function has a name that no other module of glasu defines."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import glasu

ROOT = Path(glasu.__file__).parent
OF_EVERY_COMMAND = {"EXAMPLE", "INTERRUPTED", "add_arguments", "run"}  # `cli/main.py` reads them from each command
SHARED = {
    "draw_neighbors": "blocks.py calls the compiled loop of the same name",
    "encode": "bytes of a message, bytes of node ids; callers name the module",
    "decode": "as encode",
    "main": "every program has one",
    "train": "Flower's name for the work of a ClientApp",
}


def find_names(tree: ast.Module) -> Iterator[str]:
    """Yield the classes, constants and public functions that a module defines.

    A type alias counts as a constant. A type variable does not: it means nothing outside its module.
    """
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names = [] if node.name.startswith("_") else [node.name]
        elif isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign) and not is_type_variable(node.value):
            names = [part.id for target in node.targets for part in list_assigned(target)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        is_function = isinstance(node, ast.FunctionDef)
        yield from (name for name in names if is_function or not name.islower())


def list_assigned(target: ast.expr) -> list[ast.Name]:
    """Return the names that an assignment binds; an attribute binds none."""
    return [part for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]


def is_type_variable(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("TypeVar", "ParamSpec")
    )


def find_shared_names(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names that several modules define, with these modules; takes pairs of module and source."""
    found = defaultdict(list)
    for module, source in sources:
        for name in set(find_names(ast.parse(source))):
            if name not in SHARED and not (name in OF_EVERY_COMMAND and module.startswith("cli/")):
                found[name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_the_name_of_a_class_constant_or_public_function_exists_once_in_the_tree():
    paths = sorted(ROOT.rglob("*.py"))
    sources = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    assert find_shared_names(sources) == {}


def test_the_check_finds_classes_constants_aliases_and_functions_but_no_variables():
    first = "from typing import TypeVar\nclass Peer: ...\nLIMIT: int = 3\nA, B = 1, 2\nT = TypeVar('T')\nlog = _X = 1\n"
    second = "class Peer: ...\nLIMIT = 4\nB = 5\nT = TypeVar('T')\nlog = _X = 1\ndef f():\n    A = 3\n"
    functions = "def f(): ...\ndef _g(): ...\n"
    found = find_shared_names([("a.py", first), ("b.py", second), ("c.py", functions), ("d.py", "def _g(): ...\n")])
    shared = {name: ["a.py", "b.py"] for name in ("Peer", "LIMIT", "B", "_X")}
    assert found == {**shared, "f": ["b.py", "c.py"]}
