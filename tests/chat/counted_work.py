"""How much work code does, counted: a test of linear time that does not look at the clock."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from verl_mt.chat.parsers.base import IndexedText


class Work:
    """Counts executed lines of Python: what code costs, the same on every machine."""

    def __init__(self) -> None:
        self.amount = 0

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        self.amount += event == "line"
        return self.trace

    def of(self, function: Callable[..., Any], *args: Any) -> int:
        self.amount, before = 0, sys.gettrace()
        sys.settrace(self.trace)
        try:
            function(*args)
        finally:
            sys.settrace(before)
        return self.amount


class CountedPattern:
    """A pattern; each search adds the characters up to the end of what it finds."""

    def __init__(self, pattern: re.Pattern[str], work: Work):
        self._pattern, self._work = pattern, work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pattern, name)

    def search(self, text: str, pos: int = 0, endpos: int = sys.maxsize) -> re.Match[str] | None:
        found = self._pattern.search(text, pos, endpos)
        self._work.amount += (found.end() if found else min(endpos, len(text))) - pos
        return found

    def match(self, text: str, pos: int = 0, endpos: int = sys.maxsize) -> re.Match[str] | None:
        found = self._pattern.match(text, pos, endpos)
        self._work.amount += found.end() - pos if found else 1
        return found

    def finditer(self, text: str, pos: int = 0, endpos: int = sys.maxsize) -> Iterator[re.Match[str]]:
        for found in self._pattern.finditer(text, pos, endpos):
            self._work.amount += found.end() - pos
            pos = found.end()
            yield found
        self._work.amount += min(endpos, len(text)) - pos

    def sub(self, new: Any, text: str, count: int = 0) -> str:
        self._work.amount += len(text)
        return self._pattern.sub(new, text, count)


def parser_work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Counts also the characters that the parsers' patterns pass and that are cut out of a turn."""
    work = Work()
    packages = ("verl_mt.chat.parsers", "verl_mt.extensions.rare_parsers")
    modules = [module for name, module in sys.modules.items() if name.startswith(packages)]
    classes = {id(c): c for m in modules for c in vars(m).values() if isinstance(c, type)}
    for owner in (*modules, *classes.values()):
        for name, value in list(vars(owner).items()):
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(owner, name, CountedPattern(value, work))

    def part(self: IndexedText, place: Any) -> str:
        found = str.__getitem__(self, place)
        work.amount += len(found)
        return found

    monkeypatch.setattr(IndexedText, "__getitem__", part)
    return work
