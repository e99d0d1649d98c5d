"""One pass over an update's tensors for several engines: gathered and packed once, sent to all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from verl_mt.engines.sglang.buckets import Bucket


class SharedPass:
    """The next bucket is packed when every member is done with the last one; who leaves is not waited for.

    Args:
        buckets: each holds until the next one is asked for.
        num_members: every one of them enters `member()` once.
    """

    def __init__(self, buckets: Iterator[Bucket], num_members: int):
        self._buckets = buckets
        self._num_members = num_members
        self._waiting: list[asyncio.Future[Bucket | None]] = []

    @contextmanager
    def member(self) -> Iterator[AsyncIterator[Bucket]]:
        """The buckets, for one engine. What goes wrong with the tensors is raised for every member that is left."""
        try:
            yield self._take()
        finally:
            self._num_members -= 1
            self._go_on()

    async def _take(self) -> AsyncIterator[Bucket]:
        while True:
            upcoming: asyncio.Future[Bucket | None] = asyncio.get_running_loop().create_future()
            self._waiting.append(upcoming)
            self._go_on()
            bucket = await upcoming
            if bucket is None:
                return
            yield bucket

    def _go_on(self) -> None:
        """Pack the next bucket once all want it."""
        self._waiting = [future for future in self._waiting if not future.cancelled()]
        if not self._waiting or len(self._waiting) < self._num_members:
            return
        waiting, self._waiting = self._waiting, []
        try:
            bucket = next(self._buckets, None)
        except Exception as error:
            for future in waiting:
                future.set_exception(error)
        else:
            for future in waiting:
                future.set_result(bucket)
