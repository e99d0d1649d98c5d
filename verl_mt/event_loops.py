"""What calls from one event loop to another are made of."""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    error: Exception | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Reply:
    """A future of the loop that waits, answered from another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Outcome] = self._loop.create_future()

    def send(self, outcome: Outcome) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: Outcome) -> None:
        if not self.future.done():
            self.future.set_result(outcome)


class LoopClock(selectors.DefaultSelector):
    """A loop's selector, which counts the time in which the loop served nobody who waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0.0, time.monotonic()
        """Lost seconds, and the time after which all time is lost again: the loop executes code or wakes too late."""

    def lost_s(self) -> float:
        lost_s, since = self._count
        return lost_s + max(0.0, time.monotonic() - since)

    def busy_s(self) -> float:
        """For how long the loop has executed code without a look at what else is due."""
        return max(0.0, time.monotonic() - self._count[1])

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._count = self.lost_s(), math.inf if timeout is None else time.monotonic() + max(timeout, 0.0)
        ready = super().select(timeout)
        self._count = self.lost_s(), time.monotonic()
        return ready


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then cancel what is left on it."""
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


@dataclass
class HeldUp:
    """Time that calls lost to other code; their deadlines do not count it, and no deadline of several calls should."""

    seconds: float = 0.0
