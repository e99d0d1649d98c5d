"""One live connection to an MCP server, shared by all tools of that server and all trajectories, and its streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from typing import Any, TextIO, TypeVar

import anyio
from mcp.client.streamable_http import streamable_http_client

from verl_mt.bounds import MAX_FRAME_BYTES
from verl_mt.errors import ToolCallError
from verl_mt.extensions.toolbox.mcp_client.sdk import (
    MCPError,
    SessionMessage,
    get,
    httpx,
    open_client,
    result_of,
    types,
)
from verl_mt.extensions.toolbox.mcp_client.servers import McpServer
from verl_mt.extensions.toolbox.mcp_client.stdio import stdio_streams

_TAIL = 2000


class StderrTail:
    """The end of what a started server writes to stderr: it says why it died, and must not fill the terminal."""

    def __init__(self) -> None:
        self._text = b""

    def __str__(self) -> str:
        return self._text.decode("utf-8", "replace").strip()

    @contextlib.contextmanager
    def collecting(self) -> Any:
        """A file for the server to write to, read on the running loop. Runs on the loop of the thread `mcp`."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(reader, self._read, reader)
        file: TextIO = os.fdopen(writer, "w")
        try:
            yield file
        finally:
            file.close()
            self._read(reader)
            loop.remove_reader(reader)
            os.close(reader)

    def _read(self, reader: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(reader, 65536):
                self._text = (self._text + data)[-_TAIL:]


@contextlib.asynccontextmanager
async def open_transport(
    server: McpServer,
    *,
    connect_timeout_s: float,
    stderr: StderrTail,
    on_unread: Callable[[str], None],
    at_end: Callable[[], None],
) -> AsyncIterator[tuple[Any, Any]]:
    """Start or reach a server. `at_end` is called when it hangs up, so that the next call need not find that out."""
    inner = _http(server, connect_timeout_s) if server.url is not None else _stdio(server, stderr, on_unread)
    async with inner as (read, write):
        yield _Watched(read, at_end), write


def _http(server: McpServer, connect_timeout_s: float) -> AbstractAsyncContextManager[tuple[Any, Any]]:
    @contextlib.asynccontextmanager
    async def transport() -> AsyncIterator[tuple[Any, Any]]:
        # A call's deadline is the executor's. One request that fails takes the whole connection down, so none may
        # fail for want of a slot in the pool.
        timeout = httpx.Timeout(connect_timeout_s, read=None, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        assert server.url is not None
        async with (
            httpx.AsyncClient(
                headers={"accept-encoding": "identity", **server.all_headers},
                timeout=timeout,
                limits=limits,
                event_hooks={"response": [_bound]},
            ) as http,
            streamable_http_client(server.url, http_client=http) as (read, write, *_),
        ):
            yield read, write

    return transport()


@contextlib.asynccontextmanager
async def _stdio(
    server: McpServer, stderr: StderrTail, on_unread: Callable[[str], None]
) -> AsyncIterator[tuple[Any, Any]]:
    with stderr.collecting() as file:
        async with stdio_streams(server, file, on_unread) as streams:
            yield streams


async def _bound(response: httpx.Response) -> None:
    response.headers.pop("content-encoding", None)  # 16 MB may unpack to 16 GB, and nobody asked for packed answers
    # The SDK bounds the events of a stream by itself, and a stream has no end.
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Bounded(response.stream)


class _Bounded(httpx.AsyncByteStream):
    """A body that ends with an error after `MAX_FRAME_BYTES`."""

    def __init__(self, stream: httpx.AsyncByteStream):
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._stream:
            size += len(part)
            if size > MAX_FRAME_BYTES:
                raise httpx.StreamError(f"the answer has more than {MAX_FRAME_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Watched:
    """A stream of messages that tells when it ends."""

    def __init__(self, stream: Any, at_end: Callable[[], None]):
        self._stream, self._at_end = stream, at_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive(self) -> Any:
        try:
            return _without_output_schemas(await self._stream.receive())
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self._at_end()
            raise

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)


def _without_output_schemas(item: Any) -> Any:
    """A message whose tools have none: the SDK would check each result by them, without a bound."""
    result = result_of(item.message) if isinstance(item, SessionMessage) else None
    if isinstance(result, dict) and isinstance(result.get("tools"), list):
        for tool in result["tools"]:
            if isinstance(tool, dict):
                tool.pop("outputSchema", None)
    return item


logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_CLOSE_S = 10.0
_ENDS_S = 0.1
_MAX_PAGES = 100


class McpServerDown(ConnectionError):
    """The server cannot be reached: the tool's failure, never the model's."""


class McpConnection:
    """Connects at the first use, and again after the connection was lost.

    While a server is down, one attempt in a growing pause (1 s to 30 s) is made to reach it; all other calls fail at
    once. A call is sent at most once: what was in flight when the connection broke fails, and only
    `multi_turn.tool_retries` sends it again.

    Calls run concurrently on one event loop of its own thread, so nothing here ever blocks a rollout.

    Args:
        name: of the server, for errors.
        server: how to reach it.
        connect_timeout_s: for starting or reaching it and agreeing on the protocol.
        calls_per_s: how many calls may begin per second; None = no limit.
    """

    def __init__(
        self, name: str, server: McpServer, *, connect_timeout_s: float = 10.0, calls_per_s: float | None = None
    ):
        self.name, self.server = name, server
        self.num_connects = 0
        """How often a connection was made."""
        self.num_unread = 0
        """Lines of a started server that are no messages."""
        self._connect_timeout_s, self._calls_per_s = connect_timeout_s, calls_per_s
        self._next_call_s = 0.0
        self._is_private, self._paced_by = False, self
        self._lock = asyncio.Lock()
        self._client: Any = None
        self._owner: asyncio.Task[None] | None = None
        self._check: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._why, self._pause_s, self._quiet_until_s = "", 0.0, 0.0

    def private(self) -> McpConnection:
        """Another connection to the same server, within the same limit of calls per second.

        The server may keep a state for it, so it is made once: when it is lost, all later calls fail.
        """
        other = McpConnection(self.name, self.server, connect_timeout_s=self._connect_timeout_s)
        other._is_private, other._paced_by = True, self
        return other

    async def list_tools(self) -> list[types.Tool]:
        """All tools of the server.

        Runs on the caller's loop. Waits for the loop of the thread `mcp`, and that for the server.

        Raises:
            McpServerDown: it cannot be reached.
            MCPError: it refused.
        """
        return await _on_mcp_loop(self._list_tools())

    async def call(self, tool: str, arguments: dict[str, Any]) -> types.CallToolResult:
        """Call a tool. Cancelling the caller cancels the request.

        Runs on the caller's loop. Waits for the loop of the thread `mcp`, and that for the server.

        Raises:
            McpServerDown: it cannot be reached, or the connection broke before the answer.
            ToolCallError: the server refuses the tool's name or its arguments.
            MCPError: it refused the request for another reason.
        """
        return await _on_mcp_loop(self._call(tool, arguments))

    async def close(self) -> None:
        """End the connection, and the server if it was started here. A later call would connect again. Runs on the
        caller's loop. Waits for the loop of the thread `mcp`."""
        await _on_mcp_loop(self._close())

    async def _list_tools(self) -> list[types.Tool]:
        client = await self._connected()
        tools: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await self._guarded(client, client.list_tools(cursor=cursor))
            tools += page.tools
            cursor = get(page, "next_cursor")
            if not cursor:
                return tools
        raise McpServerDown(f"MCP server {self.name!r} lists its tools on more than {_MAX_PAGES} pages")

    async def _call(self, tool: str, arguments: dict[str, Any]) -> types.CallToolResult:
        await self._paced_by._wait_for_turn()
        client = await self._connected()
        return await self._guarded(client, client.call_tool(tool, arguments))

    async def _guarded(self, client: Any, request: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._unless_it_ends(request)
        except asyncio.CancelledError:
            self._check_later(client)
            raise
        except MCPError as error:
            if error.error.code == types.INVALID_PARAMS:
                raise ToolCallError(str(error)) from error
            # A server that was started anew does not know our session.
            forgotten = error.error.code == types.INVALID_REQUEST and "session" in str(error).lower()
            # Servers use the code of a closed connection for errors of their own.
            ended = error.error.code == types.CONNECTION_CLOSED and await self._ends(client)
            if not ended and not forgotten:
                raise
            self._drop(client)
            raise McpServerDown(f"the connection to MCP server {self.name!r} broke: {error}") from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, httpx.HTTPError, OSError) as error:
            self._drop(client)
            raise McpServerDown(f"the connection to MCP server {self.name!r} broke: {_leaf(error)}") from error

    async def _unless_it_ends(self, request: Coroutine[Any, Any, T]) -> T:
        """The answer. Version 1 of the SDK leaves a call without one whose connection ended just before. Runs on the
        loop of the thread `mcp`. Waits for the server."""
        call, ended = asyncio.ensure_future(request), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({call, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not (await asyncio.wait({call}, timeout=_ENDS_S))[0]:
                raise BrokenPipeError("Connection closed")
            return call.result()
        finally:
            call.cancel()
            ended.cancel()

    async def _ends(self, client: Any) -> bool:
        """Whether the connection has ended, or is about to: some versions of the SDK tell the callers first."""
        if client is self._client and self._owner is not None:
            await asyncio.wait([self._owner], timeout=_ENDS_S)
        return client is not self._client

    def _check_later(self, client: Any) -> None:
        """A call got no answer in time: find out whether the server answers anything at all."""
        if client is self._client and (self._check is None or self._check.done()):
            self._check = asyncio.create_task(self._check_alive(client), name=f"mcp {self.name} check")

    async def _check_alive(self, client: Any) -> None:
        with contextlib.suppress(MCPError, OSError, RuntimeError, anyio.ClosedResourceError, anyio.BrokenResourceError):
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    # Newer versions of the protocol have no ping. A session keeps no list, a client may.
                    await getattr(client, "session", client).list_tools()
            except TimeoutError:
                if client is self._client:
                    logger.warning(
                        "MCP server %r answered neither a call nor tools/list within %g s: reconnecting",
                        self.name,
                        self._connect_timeout_s,
                    )
                self._drop(client)

    def _unread(self, reason: str) -> None:
        """The server wrote a line that is no message."""
        self.num_unread += 1
        if self.num_unread == 1:
            logger.warning("MCP server %r wrote %s. It is left out, as are all others like it", self.name, reason)

    async def _wait_for_turn(self) -> None:
        if self._calls_per_s is None:
            return
        now = time.monotonic()
        begin = max(now, self._next_call_s)
        self._next_call_s = begin + 1.0 / self._calls_per_s
        await asyncio.sleep(begin - now)

    async def _connected(self) -> Any:
        """Runs on the loop of the thread `mcp`. Waits for the server, at most `connect_timeout_s`."""
        async with self._lock:
            if self._client is not None:
                return self._client
            if self._is_private and self.num_connects:
                raise McpServerDown(f"the connection to MCP server {self.name!r} broke, and with it went its state")
            if time.monotonic() < self._quiet_until_s:
                raise McpServerDown(f"MCP server {self.name!r} is down: {self._why}")
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._stop = asyncio.Event()
            self._owner = owner = asyncio.create_task(self._own(ready, self._stop), name=f"mcp {self.name}")
            try:
                self._client = await asyncio.wait_for(asyncio.shield(ready), self._connect_timeout_s)
            except BaseException as error:
                owner.cancel()
                late = isinstance(error, TimeoutError | asyncio.CancelledError)
                self._failed(f"no answer within {self._connect_timeout_s:g} s" if late else str(error))
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise McpServerDown(f"MCP server {self.name!r} is down: {self._why}") from error
            self.num_connects += 1
            self._pause_s = 0.0
            return self._client

    def _failed(self, why: str) -> None:
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s or _FIRST_PAUSE_S)
        self._quiet_until_s, self._why = time.monotonic() + self._pause_s, why
        logger.warning("MCP server %r is down: %s; the next attempt is in %g s", self.name, why, self._pause_s)

    async def _own(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        """Holds the connection open. A separate task: what a transport opens must be closed by the same task."""
        client: Any = None
        stderr = StderrTail()

        def hung_up() -> None:
            stop.set()
            if client is not None:
                self._drop(client)

        transport = open_transport(
            self.server,
            connect_timeout_s=self._connect_timeout_s,
            stderr=stderr,
            on_unread=self._unread,
            at_end=hung_up,
        )
        try:
            async with open_client(transport, has_session=self._is_private) as client:
                if not ready.done():
                    ready.set_result(client)
                await stop.wait()
        except (Exception, asyncio.CancelledError) as error:
            # Over HTTP a request that cannot be sent ends the connection with an exception of its own.
            why = _leaf(error) + (f"; it wrote: {stderr}" if str(stderr) else "")
            logger.debug("the connection to MCP server %r ended: %s", self.name, why)
            if not ready.done():
                ready.set_exception(ConnectionError(why))
                ready.exception()  # whoever waited for it may be gone
        finally:
            if client is not None:
                self._drop(client)

    def _drop(self, client: Any) -> None:
        if self._client is client:
            self._client = None
            self._stop.set()

    async def _close(self) -> None:
        """Runs on the loop of the thread `mcp`. Waits for the transport, at most `_CLOSE_S`."""
        async with self._lock:
            owner, self._client = self._owner, None
            self._stop.set()
            if owner is not None and (await asyncio.wait([owner], timeout=_CLOSE_S))[1]:
                owner.cancel()


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the connections' loop and block until it is done. Not for that loop itself. Runs in any other
    thread."""
    return asyncio.run_coroutine_threadsafe(work, _mcp_loop()).result()


async def _on_mcp_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs on the caller's loop. Waits for the loop of the thread `mcp`."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _mcp_loop()))


@lru_cache(maxsize=1)
def _mcp_loop() -> asyncio.AbstractEventLoop:
    """All connections of a process live on one loop, whose thread never keeps the process alive. Runs in
    any thread and waits for nothing."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="mcp").start()
    return loop


def _leaf(error: BaseException) -> str:
    """What happened, below the groups that task groups wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
