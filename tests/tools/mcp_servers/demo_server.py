"""A real MCP server for the tests: `demo_server.py` speaks over stdio, `demo_server.py PORT` over streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from typing import Any

from pydantic import BaseModel

try:
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Context, Image
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ToolAnnotations

    server = MCPServer("demo", log_level="ERROR")
except ImportError:  # version 1
    from mcp.server.fastmcp import Context, FastMCP, Image
    from mcp.server.fastmcp.exceptions import ToolError
    from mcp.types import ToolAnnotations

    server = FastMCP("demo", log_level="ERROR")
running, most = 0, 0
counts: Counter[Any] = Counter()


class Point(BaseModel):
    x: int
    y: int = 2


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def norm(point: Point) -> int:
    """The square of a point's distance."""
    return point.x**2 + point.y**2


@server.tool()
async def wait(seconds: float, others: int = 0) -> str:
    """Wait. With `others`, wait first until that many other calls wait too, and say how many waited at once."""
    global running, most
    if others:
        running += 1
        most = max(most, running)
        while most <= others:
            await asyncio.sleep(0.01)
    await asyncio.sleep(seconds)
    return f"{most} at once"


@server.tool()
def find(name: str) -> str:
    """Find a file."""
    raise ToolError(f"there is no file {name}")


@server.tool(annotations=ToolAnnotations.model_validate({"readOnlyHint": True}))
def look() -> Image:
    """A picture."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def secret(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "unset")


@server.tool()
def count() -> str:
    """How often this process was asked."""
    counts[""] += 1
    return str(counts[""])


@server.tool()
def visits(context: Context) -> str:
    """How often this session was asked."""
    session = context.request_context.request.headers.get("mcp-session-id")
    counts[session] += 1
    return f"{counts[session]} {session is not None}"


@server.tool()
def order(key: str, item: str = "") -> str:
    """How often this item was ordered under this key."""
    counts[key, item] += 1
    return f"{item} {counts[key, item]}"


@server.tool()
def die() -> str:
    """End the server in the middle of a call."""
    print("the demo server gave up", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1 and hasattr(server.settings, "port"):  # version 1
        server.settings.port = int(sys.argv[1])
        server.run("streamable-http")
    elif len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
