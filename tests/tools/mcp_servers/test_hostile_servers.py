"""MCP servers that misbehave: each costs the call that it answers wrongly, never the server or other calls."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs the mcp extra")

import anyio
from hostile_server import MODES

from verl_mt.bounds import MAX_FRAME_BYTES
from verl_mt.extensions.toolbox.mcp_client.connection import McpConnection
from verl_mt.extensions.toolbox.mcp_client.sdk import IS_FIRST, MCPError, get
from verl_mt.extensions.toolbox.mcp_client.servers import McpServer
from verl_mt.extensions.toolbox.mcp_client.stdio import lines

pytestmark = pytest.mark.slow

SERVER = str(Path(__file__).with_name("hostile_server.py"))


@contextlib.asynccontextmanager
async def connected(*args: str):
    # -S: started in 30 ms, so that a short deadline for connecting is enough on a busy machine too.
    server = McpServer(command=sys.executable, args=["-S", SERVER, *args])
    connection = McpConnection("hostile", server, connect_timeout_s=3.0)
    try:
        yield connection
    finally:
        await connection.close()


async def act(connection: McpConnection, mode: str, timeout_s: float = 20.0) -> str:
    async with asyncio.timeout(timeout_s):
        result = await connection.call("act", {"mode": mode})
    return result.content[0].text


@pytest.mark.parametrize("mode", MODES)
def test_after_any_misbehaviour_the_next_calls_reach_a_working_server(mode):
    async def run() -> float:
        async with connected() as connection:
            assert await act(connection, "here") == "here"
            with contextlib.suppress(Exception):
                await act(connection, mode, 0.5)
            begun = time.monotonic()
            while True:
                with contextlib.suppress(TimeoutError, ConnectionError):
                    if await act(connection, "here", 1.0) == "here":
                        return time.monotonic() - begun
                assert time.monotonic() - begun < 60, "the server never came back"

    assert asyncio.run(run()) < 30  # 0 to 4 s on an idle machine


def test_an_error_with_the_code_of_a_closed_connection_fails_one_call_and_no_other():
    async def run():
        async with connected() as connection:
            await act(connection, "here")
            calls = [act(connection, m) for m in ("here", "error -32000", "here", "here")]
            return await asyncio.gather(*calls, return_exceptions=True), connection.num_connects

    (first, failed, *others), num_connects = asyncio.run(run())
    assert isinstance(failed, MCPError) and str(failed) == "no such page"
    assert [first, *others] == ["here"] * 3 and num_connects == 1


def test_a_line_that_cannot_be_read_fails_its_call_at_once_and_is_said_once(caplog):
    async def run():
        async with connected() as connection:
            for mode in ("image of 20 MB", "result is a list", "print", "empty lines"):
                with contextlib.suppress(MCPError):
                    await act(connection, mode, 60.0)
            return connection.num_unread, connection.num_connects

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) == (3, 1)
    (record,) = caplog.records
    assert f"wrote a message of more than {MAX_FRAME_BYTES} bytes. It is left out" in record.message


def test_the_servers_own_schema_of_results_is_neither_retrieved_nor_run():
    async def run(url):
        async with connected(url) as connection:
            return await connection.call("act", {"mode": "structured"})

    with socket.create_server(("127.0.0.1", 0)) as listening:
        result = asyncio.run(run(f"http://127.0.0.1:{listening.getsockname()[1]}/s.json"))
        listening.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert get(result, "structured_content") == {"a": "b"}


def test_lines_are_put_together_in_linear_time_and_long_ones_are_cut():
    class Parts:
        def __init__(self, *parts):
            self.parts = list(parts)

        async def receive(self):
            if not self.parts:
                raise anyio.EndOfStream
            return self.parts.pop(0)

    async def read(*parts, limit):
        return [line async for line in lines(Parts(*parts), limit)]

    assert asyncio.run(read(b"a", b"b\nc\n\nde", b"fgh\nlast", limit=4)) == [
        (b"ab", True),
        (b"c", True),
        (b"", True),
        (b"defg", False),
    ]
    begun = time.process_time()
    ((line, is_whole),) = asyncio.run(read(*[b"x" * 65536] * 2000, b"\n", limit=2**20))
    assert len(line) == 2**20 and not is_whole and time.process_time() - begun < 5.0


def test_an_answer_over_http_is_bounded_and_fails_its_call_only():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            import json

            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = {
                "initialize": lambda: {
                    "protocolVersion": message["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "large", "version": "1"},
                },
                "tools/list": lambda: {"tools": []},
                "tools/call": lambda: {
                    "content": [{"type": "text", "text": "x" * int(message["params"]["arguments"]["size"])}]
                },
            }.get(message["method"])
            body = {"result": answer()} if answer else {"error": {"code": -32601, "message": "unknown method"}}
            data = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), **body}).encode()
            self.send_response(200 if "id" in message else 202)
            self.send_header("content-type", "application/json")
            if message["method"] == "tools/call" and message["params"]["arguments"].get("packed"):
                data = gzip.compress(data)
                self.send_header("content-encoding", "gzip")
            self.send_header("content-length", str(len(data) if "id" in message else 0))
            self.end_headers()
            if "id" in message:
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(data)

        def log_message(self, *args):
            pass

    async def run(url: str):
        connection = McpConnection("large", McpServer(url=url))
        try:
            good = asyncio.gather(*(connection.call("get", {"size": 10}) for _ in range(5)))
            with pytest.raises((MCPError, TimeoutError)) as caught:
                async with asyncio.timeout(10):
                    await connection.call("get", {"size": MAX_FRAME_BYTES + 1})
            # Version 1 of the SDK does not say which call an answer that it cannot read belongs to.
            with pytest.raises((MCPError, TimeoutError)):  # unpacked it would have no bound
                async with asyncio.timeout(10):
                    await connection.call("get", {"size": 10, "packed": True})
            assert IS_FIRST or f"more than {MAX_FRAME_BYTES} bytes" in str(caught.value)
            return [r.content[0].text for r in await good], connection.num_connects
        finally:
            await connection.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert asyncio.run(run(f"http://127.0.0.1:{server.server_port}/mcp")) == (["x" * 10] * 5, 1)
        server.shutdown()
