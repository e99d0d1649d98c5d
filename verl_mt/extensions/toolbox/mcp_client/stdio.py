"""A started MCP server's pipes as streams of messages. No line that it writes ends the connection.

The SDK's own transport ends its reader at the first line that is not UTF-8, and puts together a long line in quadratic
time without a limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any, TextIO

import anyio
from anyio.abc import ByteReceiveStream, Process
from mcp.client.stdio import get_default_environment

from verl_mt.bounds import MAX_FRAME_BYTES
from verl_mt.extensions.toolbox.mcp_client.sdk import SessionMessage, error_message, read_message
from verl_mt.extensions.toolbox.mcp_client.servers import McpServer

_GRACE_S = 2.0
_ID = re.compile(rb'\A\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,15})\b')
"""Of an answer that cannot be read as a whole, where it begins as servers write it."""


@contextlib.asynccontextmanager
async def stdio_streams(server: McpServer, stderr: TextIO, on_unread: Callable[[str], None]) -> AsyncIterator[Any]:
    """Start the server and yield (read stream, write stream) of `SessionMessage`; end it and its children afterwards.

    Args:
        stderr: file for what it writes to its standard error.
        on_unread: gets the reason for each line that is no message.

    Raises:
        OSError: it cannot be started.
    """
    assert server.command is not None
    process = await anyio.open_process(
        [server.command, *server.args],
        stderr=stderr,
        env=get_default_environment() | server.env,
        cwd=server.cwd,
        start_new_session=True,
    )
    to_session, read = anyio.create_memory_object_stream[SessionMessage](0)
    write, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read, process, to_session, on_unread)
            tasks.start_soon(_write, process, from_session, to_session)
            yield read, write
            tasks.cancel_scope.cancel()
    finally:
        for stream in (to_session, read, write, from_session):
            stream.close()
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _read(process: Process, to_session: Any, on_unread: Callable[[str], None]) -> None:
    assert process.stdout is not None
    async with to_session:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            async for line, is_whole in lines(process.stdout):
                message = _message(line, is_whole, on_unread)
                if message is not None:
                    await to_session.send(SessionMessage(message))


async def _write(process: Process, from_session: Any, to_session: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        async for item in from_session:
            await process.stdin.send(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
        return
    to_session.close()  # it reads no more: pending requests learn that the connection ended


async def lines(stream: ByteReceiveStream, limit: int = MAX_FRAME_BYTES) -> AsyncIterator[tuple[bytes, bool]]:
    """Lines without their end, in linear time. Of a longer one than `limit` bytes comes its beginning.

    Yields:
        (line, whether it is whole).
    """
    line, is_whole = bytearray(), True
    with contextlib.suppress(anyio.EndOfStream):
        while True:
            for k, part in enumerate((await stream.receive()).split(b"\n")):
                if k > 0:
                    yield bytes(line), is_whole
                    line, is_whole = bytearray(), True
                if len(line) + len(part) > limit:
                    part, is_whole = part[: limit - len(line)], False
                line += part


def _message(line: bytes, is_whole: bool, on_unread: Callable[[str], None]) -> Any:
    """The message of a line. What cannot be read is an error for the request that it answers, where that is known."""
    if not line.strip():
        return None
    reason = f"a message of more than {MAX_FRAME_BYTES} bytes"
    if is_whole:
        try:
            return read_message(line.decode("utf-8", "replace"))
        except ValueError:
            reason = f"a line that is no JSON-RPC message: {line[:100].decode('utf-8', 'replace')!r}"
    on_unread(reason)
    request = _ID.match(line)
    if request is None:
        return None
    return error_message(int(request[1]), f"it sent {reason}")


async def _end(process: Process) -> None:
    """Close its input, then end its process group, ever harder."""
    if process.stdin is not None:
        with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await process.stdin.aclose()
    await _wait(process)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        await _wait(process)
    if process.returncode is not None:
        await process.aclose()


async def _wait(process: Process) -> None:
    """Until it ended, for at most the time of grace. Not `process.wait()`: children may hold its pipes."""
    with anyio.move_on_after(_GRACE_S):
        while process.returncode is None:
            await anyio.sleep(0.01)
