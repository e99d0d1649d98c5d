"""Runs in the tested process: swaps code there, and records which functions a test ran. Standard library only."""

from __future__ import annotations

import ast
import builtins
import functools
import gc
import importlib.abc
import importlib.machinery
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

from mutants import codes_by_name, module_of, named_functions

CodeKey = tuple[str, str, int]
"""File, `co_qualname`, first line."""


def key_of(code: CodeType) -> CodeKey:
    """The same for a function and for its code in a fresh compilation of the file."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def live_functions(root: str) -> dict[CodeKey, list[FunctionType]]:
    """All functions of files below `root`. Frozen objects count too."""
    gc.unfreeze()
    found: dict[CodeKey, list[FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(root):
            found.setdefault(key_of(thing.__code__), []).append(thing)
    gc.freeze()
    return found


def swap(pairs: Iterable[tuple[CodeType, CodeType]], live: dict[CodeKey, list[FunctionType]]) -> int:
    """Give functions their new code in place: every reference sees it, decorated functions and methods too.

    Returns:
        how many functions got one.
    """
    count = 0
    for old, new in pairs:
        for function in live.get(key_of(old), []):
            if function.__code__.co_freevars == new.co_freevars:
                function.__code__ = new
                count += 1
    return count


class _Loader(importlib.machinery.SourceFileLoader):
    code: Any = None

    def get_code(self, fullname: str) -> Any:
        return self.code(self.path)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, codes: dict[str, Callable[[str], CodeType]]):
        self._codes = codes

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self._codes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return None
        loader = _Loader(fullname, spec.origin)
        loader.code = self._codes[fullname]
        spec.loader = loader
        return spec


def install_import_hook(module: str, path: str, source: str) -> None:
    """Whoever imports the module from now on gets the file `source` instead of `path`."""
    with open(source, encoding="utf-8") as file:
        text = file.read()
    sys.meta_path.insert(0, _Finder({module: lambda path: compile(text, path, "exec", dont_inherit=True)}))


class Tracer:
    """Writes `label function` lines: which functions of the target files ran, and under which label.

    Each function of these files reports when it begins. A profile function would slow all code down, and exceptions
    that one thread sends to another would arrive in it. The label is a number in a file that the processes share. The
    process that runs the tests sets it before each, and processes that a fixture started long ago see it as well.
    """

    def __init__(self, folder: str, root: str, targets: Iterable[str]):
        self._root, self._targets = root, list(targets)
        with open(os.path.join(folder, "label"), "r+b") as file:
            self._label = mmap.mmap(file.fileno(), 4)
        self._out = os.path.join(folder, "reached")
        self._seen: set[tuple[int, str]] = set()

    def start(self) -> None:
        """In imported modules and in those that come later."""
        setattr(builtins, _HIT, self._hit)
        modules = {module_of(target): target for target in self._targets}
        codes = {module: functools.partial(self._compiled, target) for module, target in modules.items()}
        sys.meta_path.insert(0, _Finder(codes))
        loaded = {module: target for module, target in modules.items() if module in sys.modules}
        live = live_functions(self._root) if loaded else {}
        for target in loaded.values():
            path = os.path.join(self._root, target)
            with open(path, encoding="utf-8") as file:
                old = codes_by_name(compile(file.read(), path, "exec", dont_inherit=True))
            new = codes_by_name(self._compiled(target, path))
            swap([pair for name in old for pair in zip(old[name], new[name], strict=True)], live)

    def set_label(self, label: int) -> None:
        """For all processes of the folder."""
        struct.pack_into("<i", self._label, 0, label)

    def _compiled(self, target: str, path: str) -> CodeType:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        for name, node in named_functions(tree):
            first = node.body[0]
            after_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            report = ast.parse(f"{_HIT}({f'{target}::{name}'!r})").body[0]
            for part in ast.walk(report):
                if hasattr(part, "lineno"):
                    ast.copy_location(part, first)
            node.body.insert(1 if after_docstring else 0, report)
        return compile(tree, path, "exec", dont_inherit=True)

    def _hit(self, function: str) -> None:
        hit = struct.unpack_from("<i", self._label)[0], function
        if hit not in self._seen:
            self._seen.add(hit)
            with open(self._out, "a", encoding="utf-8") as file:  # one write: other processes append too
                file.write(f"{hit[0]} {hit[1]}\n")


_HIT = "_mutation_reached"


def fork_ranks_from_here() -> None:
    """Processes that tests keep as templates of ranks were forked before this one changed its code: make new ones."""
    pool = sys.modules.get("rank_pool")
    if pool is not None and pool._template is not None:
        pool.make_template()
