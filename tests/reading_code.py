"""What the source of the product calls, by its full name and where: for tests that list every such place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from re import Pattern
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("sim", "topology", "runtime", "calibrate", "experiments")


class Use(NamedTuple):
    """A name that is called, or handed on."""

    where: str
    """FILE:FUNCTION, the outermost one; of what stands in no function the file alone."""
    name: str
    """With its modules, as far as they are imported; of an attribute of a value, where it is called, .NAME."""


def places(names: Pattern[str]) -> set[str]:
    """Return where the product uses names that match as a whole."""
    accepted = {name for name in {use.name for use in _uses()} if names.fullmatch(name)}
    return {use.where for use in _uses() if use.name in accepted}


@cache
def _uses() -> frozenset[Use]:
    """Return all names of the product with the functions that use them."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "results" not in path.parts]
    return frozenset(use for path in [ROOT / "longstep.py", *found] for use in _uses_in(path))


def _uses_in(path: Path) -> Iterator[Use]:
    tree = ast.parse(path.read_text())
    imported = dict(_imported(tree))
    for function, part in _parts(tree.body):
        where = f"{path.relative_to(ROOT)}{function and ':'}{function}"
        nodes = list(ast.walk(part))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            name = _named(node, imported)
            if name and (not name.startswith(".") or id(node) in called):
                yield Use(where, name)


def _parts(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield outermost functions by their names, those of classes too, and all other statements."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from (("", one) for one in [*statement.bases, *statement.decorator_list])
            yield from _parts(statement.body)
        else:
            is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            yield statement.name if is_function else "", statement


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what names of a file stand for that are imported, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                top = one.name.partition(".")[0]
                yield (one.asname, one.name) if one.asname else (top, top)
        elif isinstance(node, ast.ImportFrom):
            yield from ((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)


def _named(node: ast.AST, imported: dict[str, str]) -> str:
    """Return the full name that an expression is; .NAME where it is of a value, nothing where it is no name."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id)
    if not isinstance(node, ast.Attribute):
        return ""
    of = node.value
    while isinstance(of, ast.Attribute):
        of = of.value
    inside = isinstance(of, ast.Name) and of.id in imported
    return f"{_named(node.value, imported) if inside else ''}.{node.attr}"
