"""What foreign code raises and returns at its worst."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verl_mt.user_code import UserCode


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


def deadline_only_for(patch: pytest.MonkeyPatch, hangs: Callable[..., bool]) -> None:
    """Only calls of user code whose arguments `hangs` accepts keep their deadline.

    On a busy machine a good call can miss a deadline that is short enough to test a hanging one.
    """
    run = UserCode.run

    async def patient(self: UserCode, function: Any, args: Any, kwargs: Any, *, timeout_s: float, **more: Any) -> Any:
        return await run(self, function, args, kwargs, timeout_s=timeout_s if hangs(*args, **kwargs) else 1e4, **more)

    patch.setattr(UserCode, "run", patient)


EXCEPTIONS: dict[str, BaseException] = {
    "Unspeakable": Unspeakable(),
    "Exits": Exits(),
    "Bare": Bare("bare"),
    "SystemExit": SystemExit(3),
}
"""One of each. Tests take the name: pytest shows the arguments of a test that fails, by their `repr`."""
