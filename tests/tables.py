"""Exhaustive tables: one case of each class runs for every commit, the whole table before a release."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


def one_of_each(cases: Iterable[Any], kind: Callable[[Any], Hashable]) -> list[Any]:
    """Arguments for `pytest.mark.parametrize`: cases after the first of their class get the mark `release`.

    Args:
        cases: values, tuples of values, or `pytest.param(value, ...)`. `kind` gets what the case holds.
        kind: the class of a case; cases of one class take the same path through the code.
    """
    seen: set[Hashable] = set()
    marked = []
    for case in cases:
        if hasattr(case, "marks"):
            param = case
        else:
            param = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
        values = param.values[0] if len(param.values) == 1 else tuple(param.values)
        of_case = kind(values)
        if of_case in seen:
            param = pytest.param(*param.values, marks=[*param.marks, pytest.mark.release], id=param.id)
        seen.add(of_case)
        marked.append(param)
    return marked


def before_release(*values: Any, id: str | None = None) -> Any:
    """A case for `pytest.mark.parametrize` that takes the path of another one."""
    return pytest.param(*values, marks=pytest.mark.release, id=id)


def newest_first(revisions: Iterable[str]) -> list[Any]:
    """Revisions of another library, oldest first: their files are nearly equal, so only the newest runs per commit."""
    *older, newest = revisions
    return [newest, *(pytest.param(revision, marks=pytest.mark.release) for revision in older)]
