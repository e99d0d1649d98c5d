"""Runs in the tested process: swaps code there, and records which functions a test ran. Standard library only."""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterable
from types import CodeType, FrameType, FunctionType
from typing import Any

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
    source = ""

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, source: str):
        self._module, self._source = module, source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return None
        loader = _Loader(fullname, spec.origin)
        loader.source = self._source
        spec.loader = loader
        return spec


def install_import_hook(module: str, path: str, source: str) -> None:
    """Whoever imports the module from now on gets the file `source` instead of `path`."""
    with open(source, encoding="utf-8") as file:
        sys.meta_path.insert(0, _Finder(module, file.read()))


class Tracer:
    """Writes `label function` lines: which functions of the target files ran, and under which label.

    The label is a number in a file that the processes share: who runs the tests sets it before each, and processes that
    a fixture started long ago see it as well.
    """

    def __init__(self, folder: str, root: str, targets: Iterable[str]):
        self._targets = {os.path.join(root, target): target for target in targets}
        with open(os.path.join(folder, "label"), "r+b") as file:
            self._label = mmap.mmap(file.fileno(), 4)
        self._out = os.path.join(folder, "reached")
        self._names: dict[int, tuple[CodeType, str]] = {}
        self._seen: set[tuple[int, str]] = set()

    def start(self) -> None:
        """In this thread and in all later ones."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def set_label(self, label: int) -> None:
        """For all processes of the folder."""
        struct.pack_into("<i", self._label, 0, label)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        known = self._names.get(id(code))
        if known is None:
            target = self._targets.get(code.co_filename)
            name = f"{target}::{code.co_qualname}" if target else ""
            known = self._names[id(code)] = (code, name)
        if not known[1]:
            return
        hit = struct.unpack_from("<i", self._label)[0], known[1]
        if hit not in self._seen:
            self._seen.add(hit)
            with open(self._out, "a", encoding="utf-8") as file:  # one write: other processes append too
                file.write(f"{hit[0]} {hit[1]}\n")
