"""The source of somebody's class or function, as a syntax tree."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def file_tree(thing: Any) -> ast.Module | None:
    """The file of a function, a class or an object's class; None where it has no source (written in C, or at a
    prompt)."""
    try:
        source = Path(inspect.getfile(_named(thing))).read_text("utf-8")
        return ast.parse(source)
    except (OSError, TypeError, ValueError, SyntaxError):
        return None


def own_tree(thing: Any) -> ast.AST | None:
    """The function or class alone; None where it has no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(_named(thing)))).body[0]
    except (OSError, TypeError, ValueError, SyntaxError, IndexError):
        return None


def _named(thing: Any) -> Any:
    return thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing)


def returns(tree: ast.AST) -> Iterator[ast.expr | None]:
    """What a function returns, without what functions inside it do."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Return):
            yield node.value
        yield from returns(node)


def only_constant(function: Any) -> Any | None:
    """The one number that all `return` lines of a function write down; None where they do more."""
    tree = own_tree(function)
    if not isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    values = [node.value if isinstance(node, ast.Constant) else None for node in returns(tree)]
    numbers = {value for value in values if isinstance(value, int | float)}
    return numbers.pop() if len(numbers) == 1 and len(values) == values.count(values[0]) else None


def method(thing: Any, name: str) -> ast.AST | None:
    """A method of an object, where its class (or one above it) writes it."""
    return own_tree(getattr(type(thing), name, None))


def keys_read(tree: ast.AST, name: str) -> set[str]:
    """Keys that code takes from a mapping of that name: `name["key"]`, `name.get("key")`."""
    found = set()
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and _is(node.value, name):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is(node.func.value, name):
            key = node.args[0] if node.func.attr in ("get", "pop", "setdefault") and node.args else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            found.add(key.value)
    return found


def uses_whole(tree: ast.AST, name: str) -> bool:
    """Whether code hands on the mapping itself: `f(name)`, `f(**name)`, `x = name`."""
    taken = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript | ast.Attribute) and _is(node.value, name)
    }
    return any(_is(node, name) and id(node) not in taken for node in ast.walk(tree))


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
