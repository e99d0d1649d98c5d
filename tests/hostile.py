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


class Bare(BaseException):
    """No `Exception`: passes every `except Exception`."""


class Unshowable:
    """A value whose `repr` raises."""

    def __repr__(self) -> str:
        raise AttributeError("no response")


EXCEPTIONS: dict[str, BaseException] = {
    "Unspeakable": Unspeakable(),
    "Exits": Exits(),
    "Bare": Bare("bare"),
    "SystemExit": SystemExit(3),
}
"""One of each. Tests take the name: pytest shows the arguments of a test that fails, by their `repr`."""
