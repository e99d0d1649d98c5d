"""A cache of the answers of slow services: equal questions asked at the same time are asked once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class CoalescingCache(Generic[T]):
    """Least recently used answers by key. Errors are never kept, and reach all who waited for the same answer.

    Args:
        max_entries: answers that are kept; 0 = none (equal questions at the same time are still asked once).
    """

    def __init__(self, max_entries: int):
        if max_entries < 0:
            raise ValueError(f"max_entries must be at least 0, got {max_entries}")
        self.max_entries = max_entries
        self.hits = 0
        """Answers that needed no call of their own: kept ones, and those that another caller was waiting for."""
        self.misses = 0
        """Calls that were made, failed ones included."""
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        # A task belongs to its event loop: the key says which.
        self._running: dict[tuple[asyncio.AbstractEventLoop, Hashable], _Call[T]] = {}

    @property
    def hit_rate(self) -> float:
        """hits / (hits + misses); 0 before the first question."""
        return self.hits / max(1, self.hits + self.misses)

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: Hashable, compute: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The answer, and whether it was a hit.

        A caller that is cancelled takes nothing from the others: the call goes on while anyone waits for it.

        Raises:
            Exception: what `compute` raised.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            self.hits += 1
            return self._kept[key], True
        where = (asyncio.get_running_loop(), key)
        call = self._running.get(where)
        shared = call is not None
        if call is None:
            self.misses += 1
            call = self._running[where] = _Call(asyncio.ensure_future(compute()))
            call.task.add_done_callback(lambda task: self._ended(where, task))
        call.num_waiting += 1
        try:
            answer = await asyncio.shield(call.task)
        finally:
            call.num_waiting -= 1
            if call.num_waiting == 0 and not call.task.done():
                # Nobody may join it any more: who asks from now on makes a call of their own.
                self._running.pop(where, None)
                call.task.cancel()
        self.hits += shared
        return answer, shared

    def _ended(self, where: tuple[asyncio.AbstractEventLoop, Hashable], task: asyncio.Future[T]) -> None:
        if where in self._running and self._running[where].task is task:
            del self._running[where]
        if task.cancelled() or task.exception() is not None:
            return
        self._kept[where[1]] = task.result()
        self._kept.move_to_end(where[1])
        while len(self._kept) > self.max_entries:
            self._kept.popitem(last=False)


@dataclass
class _Call(Generic[T]):
    """A call under way."""

    task: asyncio.Future[T]
    num_waiting: int = 0
