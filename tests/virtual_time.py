"""An event loop without a clock, for tests in which all that takes time are deadlines and sleeps of coroutines."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Instead of waiting until the next timer is due, it moves the time there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class VirtualTime(asyncio.SelectorEventLoop):
    """Time passes only while every coroutine waits. Not for code that waits for other threads."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtually(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(coroutine)
