"""Mutants by name: file, qualified function, old text and new text. No line number, so an edit above keeps it."""

from __future__ import annotations

import ast
import difflib
import functools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def module_of(file: str) -> str:
    """Dotted name of the module that a file of the root is."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class StaleMutantError(ValueError):
    """A mutant's text is not in today's code."""


@dataclass(frozen=True, order=True)
class Mutant:
    """One planted bug."""

    file: str
    """Relative to the repository, with slashes."""
    function: str
    """Its `__qualname__`."""
    old: str
    """Text of the function."""
    new: str
    """The text that replaces it."""
    occurrence: int = 1
    """Which occurrence of `old` in the function, from 1."""
    name: str = ""
    """Of a planted mutant."""
    proof: str = ""
    """Why an equivalent mutant changes nothing that anybody can see."""

    @property
    def label(self) -> str:
        """One line."""
        nth = f" (occurrence {self.occurrence})" if self.occurrence > 1 else ""
        text = f"{' '.join(self.old.split())}  ->  {' '.join(self.new.split())}"
        return f"{self.name and self.name + ': '}{self.file}::{self.function}{nth}: {text}"

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Without name and proof."""
        return self.file, self.function, self.old, self.new, self.occurrence

    @property
    def module(self) -> str:
        """Dotted."""
        return module_of(self.file)

    def apply(self, source: str) -> str:
        """The file's text with the bug.

        Raises:
            StaleMutantError: the function or the text is gone, or the result does not compile.
        """
        node = functions(source).get(self.function)
        if node is None:
            raise StaleMutantError(f"{self.label}: no such function, or several. Update or remove the entry.")
        text = Text(source)
        start, end = text.span(node)
        at = start - 1
        for _ in range(self.occurrence):
            at = source.find(self.old, at + 1, end)
            if at < 0:
                raise StaleMutantError(f"{self.label}: the text is not in the function. Update or remove the entry.")
        changed = source[:at] + self.new + source[at + len(self.old) :]
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise StaleMutantError(f"{self.label}: does not compile: {error}") from error
        return changed

    def diff(self, source: str) -> str:
        """The changed lines, with `-` and `+`."""
        pair = source.splitlines(), self.apply(source).splitlines()
        lines = list(difflib.unified_diff(*pair, n=0, lineterm=""))
        return "\n".join(line for line in lines[2:] if not line.startswith("@@"))

    def as_json(self) -> dict[str, str | int]:
        """Without empty fields."""
        return {name: value for name, value in asdict(self).items() if value != ""}


def read_list(path: Path) -> list[Mutant]:
    """Of a JSON file."""
    return [Mutant(**entry) for entry in json.loads(path.read_text())]


class Text:
    """Offsets of AST nodes in a source text."""

    def __init__(self, source: str):
        self.source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """`line` from 1, `column` in bytes of UTF-8, as AST nodes have them."""
        text = self._lines[line - 1]
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def span(self, node: ast.stmt | ast.expr | ast.keyword) -> tuple[int, int]:
        """Start and end."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.stmt | ast.expr) -> str:
        """The node's text."""
        start, end = self.span(node)
        return self.source[start:end]

    def lines_around(self, start: int, end: int) -> tuple[int, int]:
        """Start and end of the whole lines, without indentation and line end."""
        first = self.source.rfind("\n", 0, start) + 1
        last = self.source.find("\n", end)
        last = len(self.source) if last < 0 else last
        stripped = self.source[first:last].lstrip()
        return last - len(stripped), first + len(self.source[first:last].rstrip())


def named_functions(tree: ast.Module) -> list[tuple[str, FunctionNode]]:
    """(`__qualname__`, node), in the order of the file."""
    found: list[tuple[str, FunctionNode]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FunctionNode):
                found.append((prefix + child.name, child))
                visit(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(tree, "")
    return found


@functools.lru_cache(maxsize=200)
def functions(source: str) -> dict[str, FunctionNode]:
    """`__qualname__` -> node. Names that several functions of the file have are left out."""
    found = named_functions(ast.parse(source))
    count = Counter(name for name, _ in found)
    return {name: node for name, node in found if count[name] == 1}


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """The code and all nested ones, outer ones first."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def changed_codes(mutant: Mutant, source: str, path: str) -> list[tuple[CodeType, CodeType]]:
    """(old, new) code of the mutated function, of the functions around it and of those that it defines.

    Raises:
        StaleMutantError: the bytecode is the same, or a running closure could not take the new code.
    """
    texts = source, mutant.apply(source)
    old, new = (codes_by_name(compile(text, path, "exec", dont_inherit=True)) for text in texts)
    around = [name for name in old if mutant.function.startswith(name + ".<locals>.")]
    within = [name for name in old if name.startswith(mutant.function + ".<locals>.")]
    before, after = old[mutant.function][0], new[mutant.function][0]
    if same(before, after):
        raise StaleMutantError(f"{mutant.label}: the bytecode is the same")
    pairs = []
    for name in (*around, mutant.function, *within):
        before, after = old[name], new.get(name, [])
        if len(before) != len(after) and name in within:
            continue  # a lambda that the bug removed or added: only the function around it makes it
        for one, other in zip(before, after, strict=True):
            if one.co_freevars != other.co_freevars and name not in within:
                raise StaleMutantError(f"{mutant.label}: changes which variables a closure holds")
            if one.co_freevars == other.co_freevars:
                pairs.append((one, other))
    return pairs


def same(one: CodeType, other: CodeType) -> bool:
    """Equal but for positions."""
    parts = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable")
    if any(getattr(one, part) != getattr(other, part) for part in parts) or len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else repr(a) == repr(b)
        for a, b in zip(one.co_consts, other.co_consts)
    )


def codes_by_name(module: CodeType) -> dict[str, list[CodeType]]:
    """`co_qualname` -> code objects, in the order of the file."""
    found: dict[str, list[CodeType]] = {}
    for code in codes_of(module):
        found.setdefault(code.co_qualname, []).append(code)
    return found
