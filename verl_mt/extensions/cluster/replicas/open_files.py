"""Files that this process may have open, and the requests to servers that are counted against them.

Each request over HTTP takes a socket, which is an open file. Many systems let a process open 1,024 (`ulimit -n`), and
let it raise that itself up to a hard limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
from collections.abc import AsyncIterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from verl_mt.errors import EngineError

log = logging.getLogger(__name__)

_MOST = 1 << 20
"""A kernel takes no more by default, whatever the hard limit says."""
_CALLS = 32
"""Connections for calls that are not requests: aborts, pauses, health."""
_CONNECT_S = 30.0
_AGAIN_S = 0.5
_PATIENCE_S = 60.0
"""Without a file for this long, a request fails."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns how many files this process may have open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """Files that this process has open."""
    try:
        return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))
    except OSError as error:
        if not out_of_files(error):
            raise
        return raise_limit()  # to look takes a file, too


def out_of_files(error: BaseException) -> bool:
    """Whether this process, or its machine, had no file left. Libraries hide that in what they raise."""
    seen: list[BaseException | None] = [error]
    while seen:
        if (found := seen.pop()) is None:
            continue
        if isinstance(found, OSError) and found.errno in (errno.EMFILE, errno.ENFILE):
            return True
        seen += [found.__cause__, found.__context__]
        seen += found.exceptions if isinstance(found, BaseExceptionGroup) else ()
    return False


class Connections:
    """Connections from one event loop to all servers. A request waits for one, first come, first served.

    Args:
        number: of connections at once.
    """

    def __init__(self, number: int):
        self.number = number
        self._free = asyncio.Semaphore(number)
        # One for all: it reads the certificates of authorities, which takes 30 ms.
        self._ssl = httpx.create_ssl_context(trust_env=False)
        self._idle: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []
        self._told = False

    async def post(
        self, url: str, body: Any, headers: Mapping[str, str], query: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """Runs on the loop of the connections. Waits for a connection, then for the server.

        Raises:
            EngineError: this process has had no file left for a minute.
            httpx.TransportError: the server does not answer.
        """
        return await self._ask("POST", url, headers, json=body, params=dict(query or {}))

    async def get(self, url: str, headers: Mapping[str, str], timeout_s: float) -> httpx.Response:
        """As `post`, with a deadline for each wait of httpx."""
        return await self._ask("GET", url, headers, timeout=timeout_s)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        for client in self._all:
            await client.aclose()

    async def _ask(self, method: str, url: str, headers: Mapping[str, str], **more: Any) -> httpx.Response:
        for _ in range(round(_PATIENCE_S / _AGAIN_S)):
            async with self._one() as client:
                try:
                    return await client.request(method, url, headers=dict(headers), **more)
                except (httpx.TransportError, OSError) as error:
                    if not out_of_files(error):
                        raise
                    self._tell()
            await asyncio.sleep(_AGAIN_S)
        raise EngineError(
            f"no connection to {url}: this process has {num_open()} files open and may have {raise_limit()} (`ulimit "
            f"-n`), for {_PATIENCE_S:.0f} s. The server is not the cause. Raise the hard limit (`ulimit -Hn`), or set "
            "actor_rollout_ref.rollout.max_concurrent or more rollout.num_workers"
        )

    @contextlib.asynccontextmanager
    async def _one(self) -> AsyncIterator[httpx.AsyncClient]:
        async with self._free:
            client = self._idle.pop() if self._idle else self._new()
            try:
                yield client
            finally:
                self._idle.append(client)

    def _new(self) -> httpx.AsyncClient:
        """A client for one request after another. It opens a connection for each: a server closes one that stood idle,
        and on a busy machine a request may be on its way in that moment. Nobody knows then whether it was begun. httpx
        looks at all connections of a client for each request, so each client has one."""
        self._all.append(
            httpx.AsyncClient(
                headers={"Connection": "close"},
                limits=httpx.Limits(max_connections=1),
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                trust_env=False,  # a server in the cluster is reached directly, whatever proxy this machine has
                verify=self._ssl,
            )
        )
        return self._all[-1]

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "this process has %d files open and may have %d (`ulimit -n`): requests to servers wait for free ones. "
                "Raise the hard limit (`ulimit -Hn`) for more at once",
                num_open(), raise_limit(),
            )  # fmt: skip


class Shared:
    """The connections of one event loop: for requests, and for all other calls, which must get through meanwhile."""

    def __init__(self) -> None:
        limit = raise_limit()
        # A quarter stays for everything else that opens files: tools, rollout rows, Ray.
        room = limit - num_open() - limit // 4 - _CALLS
        self.requests = Connections(min(max(room, 8), 16_384))
        self.calls = Connections(_CALLS)
        self.users: set[int] = set()


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, Shared] = WeakKeyDictionary()


def shared(user: object) -> Shared:
    """The connections of the running loop, until `leave` was called for all of its users."""
    loop = asyncio.get_running_loop()
    found = _SHARED.get(loop)
    if found is None:
        found = _SHARED[loop] = Shared()
    found.users.add(id(user))
    return found


async def leave(user: object) -> None:
    """This one needs no connections any more; the last one closes them. Idempotent."""
    loop = asyncio.get_running_loop()
    found = _SHARED.get(loop)
    if found is not None:
        found.users.discard(id(user))
        if not found.users:
            del _SHARED[loop]
            await asyncio.gather(found.requests.close(), found.calls.close())
