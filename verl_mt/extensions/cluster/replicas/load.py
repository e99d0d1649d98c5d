"""What one replica is doing: how many requests it takes at once, and when it last got on with any of them."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections.abc import Iterator

from verl_mt.errors import EngineError
from verl_mt.extensions.cluster.replicas.clients import CONNECT_S, Client

_LOOKS = 4
"""How often an engine is looked at while a request may go without a token."""


class Seats:
    """Requests that a replica has at once. The others wait here, and those of conversations that have begun come
    first: their caches are there.

    Args:
        number: sequences that the engine decodes at once. A quarter more is sent, so that it never waits for the next.
    """

    def __init__(self, number: int):
        self.resize(number)
        self._taken = 0
        self._count = itertools.count()
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []

    def resize(self, number: int) -> None:
        """The engine decodes this many now."""
        self.decodes = number
        self.number = number + max(1, number // 4)

    @property
    def num_waiting(self) -> int:
        """Requests without a seat."""
        return sum(not future.done() for *_, future in self._waiting)

    @contextlib.contextmanager
    def one(self, *, begins: bool) -> Iterator[asyncio.Future[None]]:
        """A seat is there when the future has a result. Runs on the rollout's loop and waits for nothing.

        Args:
            begins: the conversation has sent nothing yet.
        """
        seat = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (begins, next(self._count), seat))
        self._fill()
        try:
            yield seat
        finally:
            if seat.done():
                self._taken -= 1
            seat.cancel()
            self._fill()

    def _fill(self) -> None:
        while self._waiting and self._taken < self.number:
            *_, seat = heapq.heappop(self._waiting)
            if not seat.done():
                seat.set_result(None)
                self._taken += 1


class Progress:
    """When a replica last finished a request, or was seen with new tokens."""

    def __init__(self) -> None:
        self._at = -math.inf
        self._seen: object = None
        self._looking: asyncio.Task[None] | None = None

    def made(self) -> None:
        """It has finished a request. Runs on the rollout's loop and waits for nothing."""
        self._at = asyncio.get_running_loop().time()

    async def wait(
        self, asked: asyncio.Future, stopped: asyncio.Future, client: Client, deadline: float, patience_s: float
    ) -> None:
        """Return when the request has its answer, is stopped, or has to be aborted. Runs on the rollout's loop.

        Args:
            asked: the request.
            stopped: done = somebody wants it to end.
            client: of the engine.
            deadline: on the loop's clock; inf = none.
            patience_s: seconds without progress of the engine; inf = any.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while True:
            left_s = min(deadline - loop.time(), patience_s / _LOOKS)
            timeout = None if left_s == math.inf else max(0.0, left_s)
            await asyncio.wait({asked, stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() or stopped.done() or loop.time() >= deadline:
                return
            await self._look(client, asked, stopped)
            if asked.done() or stopped.done():
                return
            if loop.time() - max(begun, self._at) >= patience_s:
                return

    async def _look(self, client: Client, *ends: asyncio.Future) -> None:
        """Once for all who ask at the same time. An engine that is slow to tell keeps nobody from an end (`ends`)."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._ask(client))
        await asyncio.wait({self._looking, *ends}, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)

    async def _ask(self, client: Client) -> None:
        with contextlib.suppress(EngineError, TimeoutError):  # no word of it is no progress
            seen = await asyncio.wait_for(client.progress(), CONNECT_S)
            if seen is not None and seen != self._seen:
                self._seen = seen
                self.made()
