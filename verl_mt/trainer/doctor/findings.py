"""What a check says, and how checks depend on each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from verl_mt.errors import VerlMTError, error_text

Status = Literal["ok", "warning", "error", "skipped"]
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One line of the list."""

    check: str
    status: Status
    text: str
    """What was found; where it was raised, what to do as well."""
    fix: str = ""


@dataclass(frozen=True)
class Note:
    """A finding, before it has the name of its check."""

    status: Status
    text: str
    fix: str = ""


def ok(text: str) -> Note:
    return Note("ok", text)


def warning(text: str, fix: str) -> Note:
    return Note("warning", text, fix)


def error(text: str, fix: str) -> Note:
    return Note("error", text, fix)


@dataclass(frozen=True)
class Check(Generic[T]):
    """Looks at one thing."""

    name: str
    look: Callable[[T], Iterator[Note]]
    needs: tuple[str, ...] = ()
    """Checks without whose success this one has nothing to look at."""


def run_checks(checks: Sequence[Check[T]], subject: T) -> Iterator[Finding]:
    """All findings, in order. What a check raises is its error, and whoever needs that check is skipped: never a
    traceback (the environment variable VERL_MT_TRACEBACK=1 shows it)."""
    failed: set[str] = set()
    for check in checks:
        missing = [name for name in check.needs if name in failed]
        if missing:
            failed.add(check.name)
            yield Finding(check.name, "skipped", f"needs {' and '.join(missing)}")
            continue
        for note in _look(check, subject):
            if note.status == "error":
                failed.add(check.name)
            yield Finding(check.name, note.status, note.text, note.fix)


def _look(check: Check[T], subject: T) -> Iterator[Note]:
    try:
        yield from check.look(subject)
    except VerlMTError as raised:
        yield error(str(raised), "")
    except Exception as raised:
        if os.environ.get("VERL_MT_TRACEBACK") == "1":
            raise
        yield error(error_text(raised, named=True), "VERL_MT_TRACEBACK=1 shows where; a run would end there as well")
