"""The replicas of an engine as a rollout worker uses them: it starts none, and publishes weights to none.

The engine of the trainer's process keeps the replicas alive; its news say where each one's present life is to be asked.
A branch that finds one gone says so, for of servers that only branches ask the engine would not hear it.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from verl_mt.errors import EngineError, EngineGoneError
from verl_mt.extensions.cluster.replicas.clients import Client, Endpoint
from verl_mt.extensions.cluster.replicas.engine import ReplicatedEngine
from verl_mt.extensions.cluster.replicas.routing import Router

Say = Callable[[Any], None]
Connect = Callable[[Endpoint], Client]
"""Makes the client of a server at this address."""


@dataclass(eq=False)
class _Ways:
    """Where the present life of one replica is asked; None = it is away."""

    number: int
    present: Endpoint | None = None
    client: BorrowedClient | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, endpoint: Endpoint | None) -> None:
        """What the engine knows now."""
        if endpoint == self.present:
            return
        self.present = endpoint
        self.changed.set()
        if self.client is not None:
            self.client.give_up("it was lost, or restarts")

    async def after(self, last: Endpoint | None) -> Endpoint:
        """The present life, if it is another than that."""
        while self.present is None or self.present == last:
            self.changed.clear()
            await self.changed.wait()
        return self.present


class BorrowedClient(Client):
    """One life of a replica that somebody else keeps.

    Args:
        ways: to it.
        connect: to a server.
        say: tells the engine that it is gone.
        last: the life before, which nobody wants to ask again.
    """

    local = False

    def __init__(self, ways: _Ways, connect: Connect, say: Say, last: list[Endpoint | None]):
        super().__init__()
        self.name = "engine"
        self._ways, self._connect, self._say, self._last = ways, connect, say, last
        self._endpoint: Endpoint | None = None
        self._http: Client | None = None

    async def start(self, timeout_s: float) -> None:
        endpoint = self._endpoint = await self._ways.after(self._last[0])
        self.name, self._last[0] = endpoint.name, endpoint
        if endpoint.url:
            self._http = self._connect(endpoint)
        self._ways.client = self

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._asked("generate", body)

    async def call(self, name: str, body: dict[str, Any], timeout_s: float) -> None:
        await self._asked("call", name, body, timeout_s)

    async def progress(self) -> Any:
        return await self._asked("progress")

    def give_up(self, reason: str) -> None:
        if self._reason is None and self._endpoint is not None and self._ways.present == self._endpoint:
            self._say((self._ways.number, self._endpoint.life, reason))
        super().give_up(reason)

    async def stop(self) -> None:
        super().give_up("it was closed")
        if self._http is not None:
            await self._http.stop()

    async def _asked(self, method: str, *args: Any) -> Any:
        if self._reason is not None or self._endpoint is None:
            raise self._gone_error()
        asked = self._http if self._http is not None else self._endpoint
        try:
            return await self._unless_gone(getattr(asked, method)(*args))
        except EngineGoneError as error:
            self.give_up(str(error))
            raise


class BorrowingEngine(ReplicatedEngine):
    """See the module. A subclass is the engine too, and says how its servers are asked.

    Args:
        options: of the engine.
        names: of its replicas.
        worker: number of the rollout worker. Each begins with another replica, so that not all send their first
            conversations to one.
    """

    def __init__(self, options: Any, names: Sequence[str], worker: int):
        self._ways = [_Ways(number) for number in range(len(names))]
        super().__init__(replace(options, hosts=(), num_launched=0, servers=tuple(names), adapters=None))
        first = worker % len(names)
        self._router = Router([*self._replicas[first:], *self._replicas[:first]])

    @abc.abstractmethod
    def _connect(self, endpoint: Endpoint) -> Client:
        """The client of a server at this address."""

    def share(self, count: int) -> None:
        """As many rollout workers ask the same replicas: this one sends its part of what they decode at once."""
        for replica in self._replicas:
            replica.seats.resize(-(-self._options.max_num_seqs // count))

    def hear(self, news: Any) -> None:
        version, endpoints = news
        if version != self._version:
            self._version = version
            self._router.forget_prompts()
        for ways, endpoint in zip(self._ways, endpoints):
            ways.tell(endpoint)

    async def apply(self, update: Any) -> None:
        raise EngineError("weights go to an engine from the trainer's process, not from a rollout worker")

    def _makers(self) -> Iterable[Callable[[], Client]]:
        return [partial(BorrowedClient, ways, self._connect, self._tell_engine, [None]) for ways in self._ways]

    async def _start_replicas(self) -> None:
        """A replica that is away, or has never been there, is waited for while the others are asked."""
        for replica in self._replicas:
            replica.start_later("it has not served yet")
        here = [replica for replica, ways in zip(self._replicas, self._ways) if ways.present is not None]
        wanted, when = (here, asyncio.ALL_COMPLETED) if here else (self._replicas, asyncio.FIRST_COMPLETED)
        waiting = [asyncio.ensure_future(replica.ready(self._options.timeout_s)) for replica in wanted]
        try:
            done, _ = await asyncio.wait(waiting, return_when=when)
            done.pop().result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _tell_engine(self, word: Any) -> None:
        if self.say is not None:
            self.say(word)
