"""What foreign code raises and returns at its worst."""

from __future__ import annotations


class Unspeakable(Exception):
    """The usual bug: `__str__` reads an attribute that is not there."""

    def __str__(self) -> str:
        return f"{self.response.status}"  # type: ignore[attr-defined]

    __repr__ = __str__


class Exits(Exception):
    """Its text ends the process."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class Bare(BaseException):
    """No `Exception`: passes every `except Exception`."""


class Unshowable:
    """A value whose `repr` raises."""

    def __repr__(self) -> str:
        raise AttributeError("no response")


EXCEPTIONS = [Unspeakable(), Exits(), Bare("bare"), SystemExit(3)]
"""One of each; ids for pytest: `[type(e).__name__ for e in EXCEPTIONS]`."""
