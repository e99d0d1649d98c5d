"""A concurrency limit that belongs to an object, not to an event loop or to import time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator
from weakref import WeakKeyDictionary

_held: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("verl_mt_held_limits", default=frozenset())


class ConcurrencyLimit:
    """At most `limit` holders at once in one event loop.

    Re-entrant: code that runs inside a slot, tasks that it starts included, may ask for a slot again without waiting,
    so that a tool which calls itself cannot deadlock.

    Args:
        limit: at least 1.
    """

    def __init__(self, limit: int):
        if limit < 1:
            raise ValueError(f"a concurrency limit must be at least 1, got {limit}")
        self.limit = limit
        # A semaphore belongs to the loop where it is first waited on, so each loop gets its own.
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the slots: `async with limit.slot(): ...`."""
        held = _held.get()
        if id(self) in held:
            yield
            return
        async with self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.limit)):
            token = _held.set(held | {id(self)})
            try:
                yield
            finally:
                _held.reset(token)
