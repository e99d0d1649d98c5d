"""The streams between this process and an MCP server."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TextIO

import anyio
import httpx2
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from verl_mt.tools.mcp_client.servers import McpServer

_TAIL = 2000


class StderrTail:
    """The end of what a started server writes to stderr: it says why it died, and must not fill the terminal."""

    def __init__(self) -> None:
        self._text = b""

    def __str__(self) -> str:
        return self._text.decode("utf-8", "replace").strip()

    @contextlib.contextmanager
    def collecting(self) -> Any:
        """A file for the server to write to, read on the running loop."""
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
    server: McpServer, *, connect_timeout_s: float, stderr: StderrTail, at_end: Callable[[], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """Start or reach a server. `at_end` is called when it hangs up, so that the next call need not find that out."""
    inner = _http(server, connect_timeout_s) if server.url is not None else _stdio(server, stderr)
    async with inner as (read, write):
        yield _Watched(read, at_end), write


def _http(server: McpServer, connect_timeout_s: float) -> AbstractAsyncContextManager[tuple[Any, Any]]:
    @contextlib.asynccontextmanager
    async def transport() -> AsyncIterator[tuple[Any, Any]]:
        # A call's deadline is the executor's. One request that fails takes the whole connection down, so none may
        # fail for want of a slot in the pool.
        timeout = httpx2.Timeout(connect_timeout_s, read=None, pool=None)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        assert server.url is not None
        async with (
            httpx2.AsyncClient(headers=server.all_headers, timeout=timeout, limits=limits) as http,
            streamable_http_client(server.url, http_client=http) as streams,
        ):
            yield streams

    return transport()


def _stdio(server: McpServer, stderr: StderrTail) -> AbstractAsyncContextManager[tuple[Any, Any]]:
    @contextlib.asynccontextmanager
    async def transport() -> AsyncIterator[tuple[Any, Any]]:
        assert server.command is not None
        parameters = StdioServerParameters(
            command=server.command, args=server.args, env=server.env or None, cwd=server.cwd
        )
        with stderr.collecting() as file:
            async with stdio_client(parameters, errlog=file) as streams:
                yield streams

    return transport()


class _Watched:
    """A stream of messages that tells when it ends."""

    def __init__(self, stream: Any, at_end: Callable[[], None]):
        self._stream, self._at_end = stream, at_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive(self) -> Any:
        try:
            return await self._stream.receive()
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
