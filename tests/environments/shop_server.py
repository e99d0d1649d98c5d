"""An MCP shop over stdio: it keeps a basket for each value of `session_id`, and one for calls without it."""

from __future__ import annotations

import os
from collections import defaultdict

try:
    from mcp.server import MCPServer

    server = MCPServer("shop", log_level="ERROR")
except ImportError:  # version 1
    from mcp.server.fastmcp import FastMCP

    server = FastMCP("shop", log_level="ERROR")  # type: ignore[assignment]
baskets: dict[str, list[str]] = defaultdict(list)


@server.tool()
def buy(item: str, session_id: str = "") -> str:
    """Put something into the basket.

    Args:
        item: what
    """
    baskets[session_id].append(item)
    return f"basket: {', '.join(baskets[session_id])}; shop {os.getpid()} has {len(baskets)} baskets"


if __name__ == "__main__":
    server.run()
